"""How each ONNX operator becomes lazy tensors: elementwise operators, norms, reductions, products.

Operators that only move data are in lower_views.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from blinkc.engine import tensors as t
from blinkc.engine.node_reader import DTYPES, NodeReader, dtype_of
from blinkc.engine.tensors import Tensor, cast, compute, mixes_rows, scalar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Handler = "Callable[[NodeReader], Sequence[Tensor]]"

UNARY = {
    "Sqrt": "sqrt",
    "Rsqrt": "rsqrt",
    "Reciprocal": "reciprocal",
    "Neg": "neg",
    "Abs": "abs",
    "Exp": "exp",
    "Log": "log",
    "Sin": "sin",
    "Cos": "cos",
    "Tanh": "tanh",
    "Erf": "erf",
    "Sigmoid": "sigmoid",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "Sign": "sign",
    "Not": "not",
}
BINARY = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "And": "and", "Or": "or"}
COMPARE = {
    "Equal": "eq",
    "Greater": "gt",
    "GreaterOrEqual": "ge",
    "Less": "lt",
    "LessOrEqual": "le",
    "Xor": "ne",
}


class Builder:
    """Shorthand for composing operators inside one node."""

    def __init__(self, reader: NodeReader) -> None:
        self.label = reader.label

    def __call__(self, op: str, *args: Tensor | float) -> Tensor:
        """Apply an elementwise operation; numbers take the first tensor's type."""
        dtype = next(a.dtype for a in args if isinstance(a, Tensor))
        inputs = [a if isinstance(a, Tensor) else scalar(a, dtype) for a in args]
        return compute(self.label, op, inputs, inputs[-1].dtype if op == "where" else dtype)

    def mean(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Return the mean along static axes, kept as dimensions of 1."""
        total = t.reduce(self.label, x, "sum", axes, keepdims=True)
        count = math.prod(int(x.shape[a]) for a in axes)
        return self("div", total, float(count))


def unary(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    return [compute(r.label, UNARY[r.node.op_type], [x], x.dtype)]


def binary(r: NodeReader) -> Sequence[Tensor]:
    a, b = r.operand(0), r.operand(1)
    return [compute(r.label, BINARY[r.node.op_type], [a, b], _common_dtype(a, b))]


def _common_dtype(a: Tensor, b: Tensor) -> str:
    return b.dtype if a.array is not None and b.array is None else a.dtype


def compare(r: NodeReader) -> Sequence[Tensor]:
    return [compute(r.label, COMPARE[r.node.op_type], [r.operand(0), r.operand(1)], "bool")]


def is_nan(r: NodeReader) -> Sequence[Tensor]:
    return [compute(r.label, "isnan", [r.operand(0)], "bool")]


def where(r: NodeReader) -> Sequence[Tensor]:
    args = [r.operand(i) for i in range(3)]
    return [compute(r.label, "where", args, _common_dtype(args[1], args[2]))]


def min_max(r: NodeReader) -> Sequence[Tensor]:
    op = r.node.op_type.lower()
    result = r.operand(0)
    for index in range(1, len(r.operands)):
        other = r.operand(index)
        result = compute(r.label, op, [result, other], _common_dtype(result, other))
    return [result]


def power(r: NodeReader) -> Sequence[Tensor]:
    b, x, exponent = Builder(r), r.operand(0), r.operand(1)
    known = exponent.array
    value = float(known.reshape(-1)[0]) if known is not None and known.size == 1 else None
    if value == 1.0:
        return [x]
    if value == 2.0:
        return [b("mul", x, x)]
    if value == 3.0:
        return [b("mul", b("mul", x, x), x)]
    if value == 0.5:
        return [b("sqrt", x)]
    if value == -0.5:
        return [b("rsqrt", x)]
    return [b("pow", x, cast(r.label, exponent, x.dtype))]


def modulo(r: NodeReader) -> Sequence[Tensor]:
    op = "fmod" if r.attribute("fmod", 0) else "mod"
    return [compute(r.label, op, [r.operand(0), r.operand(1)], r.operand(0).dtype)]


def clip(r: NodeReader) -> Sequence[Tensor]:
    b, x = Builder(r), r.operand(0)
    bounds = {"max": (1, "min"), "min": (2, "max")}  # operation -> operand, attribute
    for op, (index, attribute) in bounds.items():
        if r.has(index):
            x = b(op, x, cast(r.label, r.operand(index), x.dtype))
        elif r.attribute(attribute) is not None:
            x = b(op, x, float(r.attribute(attribute)))
    return [x]


def activation(r: NodeReader) -> Sequence[Tensor]:
    b, x, op = Builder(r), r.operand(0), r.node.op_type
    if op == "Relu":
        return [b("max", x, 0.0)]
    if op in ("Silu", "Swish", "QuickGelu"):
        alpha = float(r.attribute("alpha", 1.702 if op == "QuickGelu" else 1.0))
        return [b("mul", x, b("sigmoid", x if alpha == 1.0 else b("mul", x, alpha)))]
    if op == "LeakyRelu":
        alpha = float(r.attribute("alpha", 0.01))
        return [b("where", b_compare(b, "lt", x, 0.0), b("mul", x, alpha), x)]
    if op == "Elu":
        alpha = float(r.attribute("alpha", 1.0))
        grown = b("mul", b("sub", b("exp", x), 1.0), alpha)
        return [b("where", b_compare(b, "lt", x, 0.0), grown, x)]
    if op == "Softplus":  # max(x, 0) + log(1 + exp(-|x|)) does not overflow
        tail = b("log", b("add", b("exp", b("neg", b("abs", x))), 1.0))
        return [b("add", b("max", x, 0.0), tail)]
    if op == "HardSigmoid":
        slope, shift = float(r.attribute("alpha", 0.2)), float(r.attribute("beta", 0.5))
        return [b("min", b("max", b("add", b("mul", x, slope), shift), 0.0), 1.0)]
    gate = b("min", b("max", b("add", b("mul", x, 1.0 / 6.0), 0.5), 0.0), 1.0)  # HardSwish
    return [b("mul", x, gate)]


def b_compare(b: Builder, op: str, x: Tensor, y: float) -> Tensor:
    return compute(b.label, op, [x, scalar(y, x.dtype)], "bool")


def gelu(r: NodeReader) -> Sequence[Tensor]:
    b, x = Builder(r), r.operand(0)
    approximate = r.attribute("approximate", b"none")
    if r.node.op_type == "FastGelu" or approximate in (b"tanh", "tanh"):
        if r.has(1):
            x = b("add", x, r.operand(1))
        cube = b("mul", b("mul", x, x), x)
        inner = b("mul", b("add", x, b("mul", cube, 0.044715)), math.sqrt(2.0 / math.pi))
        return [b("mul", b("mul", x, 0.5), b("add", b("tanh", inner), 1.0))]
    erf = b("erf", b("mul", x, math.sqrt(0.5)))
    return [b("mul", b("mul", x, 0.5), b("add", erf, 1.0))]


def cast_op(r: NodeReader) -> Sequence[Tensor]:
    if r.node.op_type == "CastLike":
        return [cast(r.label, r.operand(0), r.operand(1).dtype)]
    return [cast(r.label, r.operand(0), dtype_of(int(r.attribute("to")), r.label))]


REDUCTIONS = {
    "ReduceSum": "sum",
    "ReduceMean": "sum",
    "ReduceSumSquare": "sum",
    "ReduceL2": "sum",
    "ReduceLogSumExp": "sum",
    "ReduceL1": "sum",
    "ReduceProd": "prod",
    "ReduceMax": "max",
    "ReduceMin": "min",
}


def reduction(r: NodeReader) -> Sequence[Tensor]:
    b, x, op = Builder(r), r.operand(0), r.node.op_type
    given = r.axes(1)
    if not given:
        if r.attribute("noop_with_empty_axes", 0):
            return [x]
        given = list(range(len(x.shape)))
    axes = [r.axis(a, len(x.shape)) for a in given]
    keepdims = bool(r.attribute("keepdims", 1))
    if op in ("ReduceSumSquare", "ReduceL2"):
        x = b("mul", x, x)
    elif op == "ReduceL1":
        x = b("abs", x)
    elif op == "ReduceLogSumExp":
        x = b("exp", x)
    result = t.reduce(r.label, x, REDUCTIONS[op], axes, keepdims=keepdims)
    if op == "ReduceMean":
        count = math.prod(int(x.shape[a]) for a in axes)
        result = b("div", result, float(count))
    elif op == "ReduceL2":
        result = b("sqrt", result)
    elif op == "ReduceLogSumExp":
        result = b("log", result)
    return [result]


def softmax(r: NodeReader) -> Sequence[Tensor]:
    b, x = Builder(r), r.operand(0)
    axis = r.axis(r.attribute("axis", -1), len(x.shape))
    dtype = x.dtype
    x = cast(r.label, x, "fp32")
    shifted = b("sub", x, t.reduce(r.label, x, "max", [axis], keepdims=True))
    grown = b("exp", shifted)
    total = t.reduce(r.label, grown, "sum", [axis], keepdims=True)
    if r.node.op_type == "LogSoftmax":
        result = b("sub", shifted, b("log", total))
    else:
        result = b("mul", grown, b("reciprocal", total))
    return [cast(r.label, result, dtype)]


def layer_norm(r: NodeReader) -> Sequence[Tensor]:
    """LayerNormalization, RMSNormalization and SimplifiedLayerNormalization, in fp32 inside."""
    b, x, op = Builder(r), r.operand(0), r.node.op_type
    if len([o for o in r.node.output if o]) > 1:
        raise r.fail("its mean or inverse deviation is used", "use the first output only")
    dtype, axis = x.dtype, r.axis(r.attribute("axis", -1), len(x.shape))
    axes = list(range(axis, len(x.shape)))
    if any(isinstance(x.shape[a], str) for a in axes):
        raise mixes_rows(r.label, "a norm along the token axis")
    x = cast(r.label, x, "fp32")
    if op == "LayerNormalization":
        x = b("sub", x, b.mean(x, axes))
    variance = b.mean(b("mul", x, x), axes)
    epsilon = float(r.attribute("epsilon", 1e-5))
    result = b("mul", x, b("rsqrt", b("add", variance, epsilon)))
    result = b("mul", result, cast(r.label, r.operand(1), "fp32"))
    if r.has(2):
        result = b("add", result, cast(r.label, r.operand(2), "fp32"))
    return [cast(r.label, result, dtype)]


def _weight_operand(x: Tensor) -> tuple[Tensor, str] | None:
    """Recognize a matrix weight, possibly transposed: (source, layout as the right operand)."""
    layout = "kn"
    while x.kind == "view" and len(x.shape) == 2:
        if x.attributes.get("transpose") == (1, 0):
            layout = "nk" if layout == "kn" else "kn"
        elif x.shape != x.inputs[0].shape or not x.keeps_layout:
            return None
        x = x.inputs[0]
    if x.kind == "source" and not x.rows and len(x.shape) == 2:
        return x, layout
    return None


def gemm_tensor(
    r: NodeReader, x: Tensor, weight: Tensor, layout: str, bias: Tensor | None
) -> Tensor:
    """Make the product of a row value with a weight."""
    k, n = (int(d) for d in (weight.shape if layout == "kn" else weight.shape[::-1]))
    if x.shape[-1] != k:
        raise r.fail(f"inner dimensions differ: {x.shape} times {weight.shape}")
    return Tensor(
        "", (*x.shape[:-1], n), x.dtype, "gemm", (x,), node=r.label,
        attributes={
            "weight": weight.name, "layout": layout, "n": n, "k": k,
            "bias": None if bias is None else bias.name,
        },
    )  # fmt: skip


def matmul(r: NodeReader) -> Sequence[Tensor]:
    a, b = r.operand(0), r.operand(1)
    weight = _weight_operand(b)
    rest = a.shape[:-1]
    single = all(d == 1 or isinstance(d, str) for d in rest)
    if weight and a.rows and a.row_axis != len(a.shape) - 1 and single:
        return [gemm_tensor(r, a, *weight, None)]
    return [row_matmul(r, a, b)]


def row_matmul(r: NodeReader, a: Tensor, b: Tensor) -> Tensor:
    """Multiply small matrices inside one row (or broadcast a table with the row)."""
    left_vector, right_vector = len(a.shape) == 1, len(b.shape) == 1
    if left_vector:
        a = t.reshape(r.label, a, (1, *a.shape))
    if right_vector:
        b = t.reshape(r.label, b, (*b.shape, 1))
    if isinstance(a.shape[-1], str) or isinstance(b.shape[-2], str):
        raise mixes_rows(r.label, "a product that sums over the token axis")
    if a.shape[-1] != b.shape[-2]:
        raise r.fail(f"inner dimensions differ: {a.shape} times {b.shape}")
    rank = max(len(a.shape), len(b.shape))
    a = t.reshape(r.label, a, (*[1] * (rank - len(a.shape)), *a.shape))
    b = t.reshape(r.label, b, (*[1] * (rank - len(b.shape)), *b.shape))
    left = t.reshape(r.label, a, (*a.shape[:-1], 1, a.shape[-1]))  # [.., m, 1, k]
    swapped = t.transpose(r.label, b, (*range(rank - 2), rank - 1, rank - 2))
    right = t.reshape(r.label, swapped, (*swapped.shape[:-2], 1, *swapped.shape[-2:]))
    product = compute(r.label, "mul", [left, right], _common_dtype(a, b))  # [.., m, n, k]
    if a.shape[-1] == 1:
        result = t.reshape(r.label, product, product.shape[:-1])
    else:
        result = t.reduce(r.label, product, "sum", [rank], keepdims=False)
    shape = result.shape
    if left_vector:
        shape = (*shape[:-2], shape[-1])
    if right_vector:
        shape = shape[:-1]
    return t.reshape(r.label, result, shape)


def gemm(r: NodeReader) -> Sequence[Tensor]:
    b = Builder(r)
    x, w = r.operand(0), r.operand(1)
    bias = r.operand(2) if r.has(2) else None
    if r.attribute("transA", 0):
        x = t.transpose(r.label, x, (1, 0))
    weight = _weight_operand(w)
    if r.attribute("transB", 0):
        w = t.transpose(r.label, w, (1, 0))
        weight = weight and (weight[0], "nk" if weight[1] == "kn" else "kn")
    alpha, beta = float(r.attribute("alpha", 1.0)), float(r.attribute("beta", 1.0))
    if weight is None or not x.rows or x.row_axis != 0:
        result = row_matmul(r, x, w)
    else:
        plain = bias is not None and bias.kind == "source" and alpha == beta == 1.0
        fused = bias if plain and bias and bias.shape == (w.shape[1],) else None
        result = gemm_tensor(r, x, *weight, fused)
        bias = None if fused else bias
    if alpha != 1.0:
        result = b("mul", result, alpha)
    if bias is not None:
        result = b("add", result, bias if beta == 1.0 else b("mul", bias, beta))
    return [result]


def top_k(r: NodeReader) -> Sequence[Tensor]:
    x, count = r.operand(0), r.integers(1)[0]
    if not r.attribute("largest", 1):
        raise r.fail("TopK with largest=0 is not supported", "negate its input")
    axis = r.axis(r.attribute("axis", -1), len(x.shape))
    return list(ranked(r, x, axis, count))


def ranked(r: NodeReader, x: Tensor, axis: int, count: int) -> tuple[Tensor, Tensor]:
    """Return values and indices of the `count` largest along `axis`."""
    if isinstance(x.shape[axis], str):
        raise mixes_rows(r.label, "ranking along the token axis")
    if not 0 < count <= int(x.shape[axis]):
        raise r.fail(f"k is {count}, the axis has {x.shape[axis]} elements")
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    attributes = {"axis": axis, "k": count}
    values = Tensor("", shape, x.dtype, "topk", (x,), node=r.label, attributes=attributes)
    indices = Tensor("", shape, "int32", "topk", (x,), node=r.label, attributes=dict(attributes))
    values.attributes.update(part="values", twin=indices)
    indices.attributes.update(part="indices", twin=values)
    return values, indices


def arg_max(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    if r.attribute("select_last_index", 0):
        raise r.fail("select_last_index is not supported", "leave it out")
    if r.node.op_type == "ArgMin":
        x = Builder(r)("neg", x)
    axis = r.axis(r.attribute("axis", 0), len(x.shape))
    _, indices = ranked(r, x, axis, 1)
    if not r.attribute("keepdims", 1):
        indices = t.reshape(r.label, indices, (*x.shape[:axis], *x.shape[axis + 1 :]))
    return [indices]


def cum_sum(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    axis = r.axis(r.integers(1)[0], len(x.shape))
    if isinstance(x.shape[axis], str):
        raise mixes_rows(r.label, "a running sum along the token axis")
    attributes = {
        "axis": axis,
        "exclusive": bool(r.attribute("exclusive", 0)),
        "reverse": bool(r.attribute("reverse", 0)),
    }
    return [Tensor("", x.shape, x.dtype, "scan", (x,), node=r.label, attributes=attributes)]


HANDLERS: dict[str, Callable[[NodeReader], Sequence[Tensor]]] = {
    **dict.fromkeys(UNARY, unary),
    **dict.fromkeys(BINARY, binary),
    **dict.fromkeys(COMPARE, compare),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(("Min", "Max"), min_max),
    **dict.fromkeys(
        (
            "Relu",
            "Silu",
            "Swish",
            "QuickGelu",
            "LeakyRelu",
            "Elu",
            "Softplus",
            "HardSigmoid",
            "HardSwish",
        ),
        activation,
    ),
    **dict.fromkeys(("Gelu", "FastGelu"), gelu),
    **dict.fromkeys(("Softmax", "LogSoftmax"), softmax),
    **dict.fromkeys(
        ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), layer_norm
    ),
    **dict.fromkeys(("Cast", "CastLike"), cast_op),
    **dict.fromkeys(("ArgMax", "ArgMin"), arg_max),
    "IsNaN": is_nan,
    "Where": where,
    "Pow": power,
    "Mod": modulo,
    "Clip": clip,
    "MatMul": matmul,
    "Gemm": gemm,
    "TopK": top_k,
    "CumSum": cum_sum,
}

__all__ = ["DTYPES", "HANDLERS", "Builder"]
