"""How standard ops are written on packed tokens: emitter, node -> outputs (opset 18).

Every op that is written is listed; an op that is not would be copied blindly, so it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blinkc.frontend.onnx_emit import DecoderEmitter, Handler
from blinkc.frontend.onnx_lower_views import (
    lower_along_axis,
    lower_concat,
    lower_expand,
    lower_gather,
    lower_gather_elements,
    lower_slice,
    lower_split,
    lower_tile,
    lower_transpose,
    lower_view,
)
from blinkc.frontend.onnx_model import attribute_values

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs


_ELEMENTWISE = {
    "Add": (),
    "Sub": (),
    "Mul": (),
    "Div": (),
    "Pow": (),
    "Max": (),
    "Min": (),
    "Sqrt": (),
    "Reciprocal": (),
    "Neg": (),
    "Abs": (),
    "Exp": (),
    "Log": (),
    "Sin": (),
    "Cos": (),
    "Tanh": (),
    "Erf": (),
    "Sigmoid": (),
    "Floor": (),
    "Ceil": (),
    "Round": (),
    "Sign": (),
    "Not": (),
    "And": (),
    "Or": (),
    "Xor": (),
    "Equal": (),
    "Greater": (),
    "GreaterOrEqual": (),
    "Less": (),
    "LessOrEqual": (),
    "Where": (),
    "IsNaN": (),
    "Relu": (),
    "Clip": (),
    "Mod": ("fmod",),
    "Softplus": (),
    "LeakyRelu": ("alpha",),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
}
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2")
_REDUCTIONS_MORE = ("ReduceSumSquare", "ReduceLogSumExp", "ReduceL1")


def lower_elementwise(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Copy an op that works on broadcast elements."""
    rank = len(emitter.meaning.shape(node.output[0]))
    inputs = [emitter.operand(name, rank=rank) if name else None for name in node.input]
    attributes = emitter.attributes(node, *_ELEMENTWISE[node.op_type])
    return [emitter.writer.one(node.op_type, *inputs, name=node.output[0], **attributes)]


def lower_cast(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Cast to the type that stands for the file's; nothing when that is no change."""
    source = emitter.operand(node.input[0])
    to = emitter.mapped_type(node.output[0])
    if to == emitter.mapped_type(node.input[0]):
        return [source]
    return [emitter.writer.cast(source, to, name=node.output[0])]


def lower_identity(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Pass the first input on (Identity, Dropout at inference)."""
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        training = emitter.known(node, 2)
        if training is not None and training.any():
            raise emitter.fail(node, "it is in training mode")
    return [emitter.operand(node.input[0])]


def lower_reduce(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Reduce inner axes (axes as attribute up to opset 17, as input from 18)."""
    attributes: dict[str, Any] = attribute_values(node)
    known = emitter.known(node, 1)
    axes = attributes.get("axes") if known is None else known.ravel().tolist()
    if not axes:
        raise emitter.fail(node, "it reduces all axes, tokens too")
    source = node.input[0]
    found = [emitter.inner_axis(node, source, int(axis)) for axis in axes]
    keepdims = int(attributes.get("keepdims", 1))
    inputs = (emitter.operand(source), emitter.writer.ints(*found))
    tensor = emitter.writer.one(node.op_type, *inputs, name=node.output[0], keepdims=keepdims)
    return [tensor]


def lower_top_k(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Pick the k largest (or smallest) of an inner axis."""
    attributes = emitter.attributes(node, "largest", "sorted")
    axis = emitter.inner_axis(
        node, node.input[0], int(emitter.attributes(node, "axis").get("axis", -1))
    )
    count = emitter.known(node, 1)
    if count is None:
        raise emitter.fail(node, "k is missing")
    inputs = [emitter.operand(node.input[0]), emitter.writer.ints(int(count.ravel()[0]))]
    return list(
        emitter.writer.emit(
            "TopK", inputs, name=node.output[0], num_outputs=2, axis=axis, **attributes
        )
    )


def lower_mat_mul(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Multiply by a weight, or within each token."""
    left, right = node.input
    writer, result = emitter.writer, node.output[0]
    if len(emitter.meaning.shape(right)) == 2 and emitter.meaning.token_axis(right) is None:
        return [writer.one("MatMul", emitter.operand(left), emitter.matrix(right), name=result)]
    rank = len(emitter.meaning.shape(result))
    inputs = [emitter.operand(name, rank=rank) for name in (left, right)]
    return [writer.one("MatMul", *inputs, name=result)]


def lower_gemm(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Write `alpha * x @ W + beta * c` as a product and a sum."""
    attributes: dict[str, Any] = attribute_values(node)
    if attributes.get("transA"):
        raise emitter.fail(node, "it transposes tokens (transA)")
    writer, result = emitter.writer, node.output[0]
    if attributes.get("transB"):
        weight = emitter.operand(node.input[1])
        right = writer.one("Transpose", weight, perm=[1, 0])
    else:
        right = emitter.matrix(node.input[1])
    element_type = emitter.mapped_type(result)
    tensor: gs.Tensor = writer.one("MatMul", emitter.operand(node.input[0]), right, name=result)
    if attributes.get("alpha", 1.0) != 1.0:
        tensor = writer.one("Mul", tensor, writer.number(attributes["alpha"], element_type))
    if len(node.input) > 2 and node.input[2] and attributes.get("beta", 1.0) != 0.0:
        bias = emitter.operand(node.input[2])
        if attributes.get("beta", 1.0) != 1.0:
            bias = writer.one("Mul", bias, writer.number(attributes["beta"], element_type))
        tensor = writer.one("Add", tensor, bias, name=f"{result}_biased")
    return [tensor]


def lower_layer_norm(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Copy a LayerNormalization over the last axis."""
    attributes = emitter.attributes(node, "epsilon")
    axis = int(emitter.attributes(node, "axis").get("axis", -1))
    rank = len(emitter.meaning.shape(node.input[0]))
    if axis % rank != rank - 1:
        raise emitter.fail(node, "it normalizes more than the last axis")
    inputs = [emitter.operand(name) for name in node.input if name]
    return [
        emitter.writer.one(
            "LayerNormalization", *inputs, name=node.output[0], axis=-1, **attributes
        )
    ]


HANDLERS: dict[tuple[str, str], Handler] = {
    **{("", op): lower_elementwise for op in _ELEMENTWISE},
    **{("", op): lower_view for op in ("Reshape", "Squeeze", "Unsqueeze", "Flatten")},
    **{("", op): lower_reduce for op in (*_REDUCTIONS, *_REDUCTIONS_MORE)},
    **{("", op): lower_along_axis for op in ("Softmax", "LogSoftmax")},
    ("", "Identity"): lower_identity,
    ("", "Dropout"): lower_identity,
    ("", "Cast"): lower_cast,
    ("", "Transpose"): lower_transpose,
    ("", "Expand"): lower_expand,
    ("", "Tile"): lower_tile,
    ("", "Slice"): lower_slice,
    ("", "Split"): lower_split,
    ("", "Concat"): lower_concat,
    ("", "Gather"): lower_gather,
    ("", "GatherElements"): lower_gather_elements,
    ("", "TopK"): lower_top_k,
    ("", "MatMul"): lower_mat_mul,
    ("", "Gemm"): lower_gemm,
    ("", "LayerNormalization"): lower_layer_norm,
}
