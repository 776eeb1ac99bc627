"""How each op is emitted on squeezed tensors: operands of the old graph -> of the new one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from blinkc.errors import BlinkError
from blinkc.surgery.fold_shapes import Shape
from blinkc.surgery.token_graph import Operand, TokenGraph, check_rows, kept_axes, squeezed

Operands = Sequence[Operand | None]


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The node being rewritten."""

    built: TokenGraph
    where: str
    attributes: dict[str, Any]
    node: onnx.NodeProto

    @property
    def op(self) -> str:
        return str(self.node.op_type)

    def fail(self, what: str, hint: str = "") -> BlinkError:
        return BlinkError(f"{self.where}: {what}", hint=hint)


Rule = Callable[[NodeContext, Operands], list[Operand]]


def _required(context: NodeContext, inputs: Operands, index: int) -> Operand:
    operand = inputs[index] if index < len(inputs) else None
    if operand is None:
        raise context.fail(f"input {index} is missing")
    return operand


def _known_ints(
    context: NodeContext, inputs: Operands, index: int, attribute: str
) -> list[int] | None:
    """Read an argument that newer opsets take as input and older ones as attribute."""
    if index < len(inputs) and inputs[index] is not None:
        value = _required(context, inputs, index).value
        if value is None or value.dtype == object:
            raise context.fail(f"`{attribute}` is not a constant")
        return [int(item) for item in value.reshape(-1)]
    found = context.attributes.get(attribute)
    if found is None:
        return None
    return list(found) if isinstance(found, list) else [int(found)]


def _axis(context: NodeContext, shape: Shape, default: int) -> int:
    axis = context.attributes.get("axis", default)
    axis = axis + len(shape) if axis < 0 else axis
    if axis == 0 and shape and isinstance(shape[0], str):
        raise context.fail(
            "it works across tokens", hint="only blink::PagedAttention may mix tokens"
        )
    return int(axis)


def _viewed(context: NodeContext, operand: Operand, rank: int, kept: Sequence[int]) -> gs.Tensor:
    """See an operand of a broadcast over `rank` axes with the `kept` axes only."""
    tensor = context.built.tensor_of(operand)
    if operand.has_rows and len(operand.shape) != rank:
        raise context.fail(f"tokens of a tensor {list(operand.shape)} meet another axis")
    padded = (1,) * (rank - len(operand.shape)) + operand.shape
    target = tuple(padded[axis] for axis in kept)
    if not operand.has_rows:
        while target and target[0] == 1:
            target = target[1:]
    return context.built.view(tensor, target)


def _finished(
    context: NodeContext, tensor: gs.Tensor, shape: Shape, dtype: np.dtype[Any]
) -> Operand:
    check_rows(shape, context.where)
    return Operand(shape=shape, dtype=dtype, tensor=context.built.view(tensor, squeezed(shape)))


def _broadcast(context: NodeContext, shapes: Sequence[Shape]) -> Shape:
    rank = max(len(shape) for shape in shapes)
    out: list[int | str] = []
    for axis in range(rank):
        dims = {shape[axis - rank + len(shape)] for shape in shapes if axis >= rank - len(shape)}
        dims.discard(1)
        if len(dims) > 1:
            raise context.fail(f"shapes {[list(shape) for shape in shapes]} do not broadcast")
        out.append(dims.pop() if dims else 1)
    return tuple(out)


def elementwise(
    context: NodeContext,
    op: str,
    operands: Sequence[Operand],
    dtype: np.dtype[Any],
    **attributes: Any,
) -> Operand:
    """Emit an op that works on broadcast elements."""
    shape = _broadcast(context, [operand.shape for operand in operands])
    check_rows(shape, context.where)
    kept = kept_axes(shape)
    tensors = [_viewed(context, operand, len(shape), kept) for operand in operands]
    out = tuple(shape[axis] for axis in kept)
    made = context.built.emit(op, tensors, attributes, [(out, dtype)])[0]
    return _finished(context, made, shape, dtype)


def reshape(context: NodeContext, operand: Operand, shape: Shape) -> Operand:
    """See an operand under another shape of the front end's graph."""
    if operand.value is not None and operand.tensor is None:
        return Operand(shape=shape, dtype=operand.dtype, value=operand.value.reshape(shape))
    check_rows(shape, context.where)
    if operand.shape[:1] != shape[:1] and (operand.has_rows or _has_symbol(shape)):
        raise context.fail(
            f"it turns {list(operand.shape)} into {list(shape)}, which moves tokens off axis 0"
        )
    return _finished(context, context.built.tensor_of(operand), shape, operand.dtype)


def _has_symbol(shape: Shape) -> bool:
    return any(isinstance(dim, str) for dim in shape)


def _rule_elementwise(dtype: str | None = None, which: int = 0) -> Rule:
    def rule(context: NodeContext, inputs: Operands) -> list[Operand]:
        operands = [operand for operand in inputs if operand is not None]
        out = np.dtype(dtype) if dtype else operands[which].dtype
        if len(operands) == 1 and context.op in ("Max", "Min", "Sum", "Mean"):
            return [operands[0]]
        return [elementwise(context, context.op, operands, out, **context.attributes)]

    return rule


def _rule_cast(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(context.attributes["to"]))
    if dtype == operand.dtype:
        return [operand]
    return [elementwise(context, "Cast", [operand], dtype, to=context.attributes["to"])]


def _rule_cast_like(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand, dtype = _required(context, inputs, 0), _required(context, inputs, 1).dtype
    if dtype == operand.dtype:
        return [operand]
    if operand.value is not None and operand.value.dtype != object:
        return [Operand(shape=operand.shape, dtype=dtype, value=operand.value.astype(dtype))]
    to = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return [elementwise(context, "Cast", [operand], dtype, to=to)]


def _rule_pow(context: NodeContext, inputs: Operands) -> list[Operand]:
    base, exponent = _required(context, inputs, 0), _required(context, inputs, 1)
    known = exponent.value
    if known is not None and known.size == 1 and float(known.reshape(-1)[0]) == 2.0:
        return [elementwise(context, "Mul", [base, base], base.dtype)]
    return [elementwise(context, "Pow", [base, exponent], base.dtype)]


def _rule_neutral(op: str, neutral: float) -> Rule:
    """Drop a multiplication by one or an addition of zero that keeps the shape."""

    def rule(context: NodeContext, inputs: Operands) -> list[Operand]:
        left, right = _required(context, inputs, 0), _required(context, inputs, 1)
        pairs = [(left, right)] if op in ("Sub", "Div") else [(left, right), (right, left)]
        for kept, other in pairs:
            known = other.value
            if known is None or known.dtype == object or known.size != 1:
                continue
            if len(known.shape) <= len(kept.shape) and float(known.reshape(-1)[0]) == neutral:
                return [kept]
        return [elementwise(context, op, [left, right], left.dtype)]

    return rule


def _rule_identity(context: NodeContext, inputs: Operands) -> list[Operand]:
    return [_required(context, inputs, 0)]


def _rule_reshape(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand, target = _required(context, inputs, 0), _required(context, inputs, 1).value
    if target is None:
        raise context.fail("the shape depends on data")
    dims = list(target.reshape(-1))
    if not context.attributes.get("allowzero", 0):
        dims = [operand.shape[i] if dim == 0 else dim for i, dim in enumerate(dims)]
    dims = [dim if isinstance(dim, str) else int(dim) for dim in dims]
    if -1 in dims:
        static = math.prod(dim for dim in operand.shape if not isinstance(dim, str))
        rest = math.prod(dim for dim in dims if not isinstance(dim, str) and dim != -1)
        missing: int | str = static // rest
        if operand.has_rows and not _has_symbol(tuple(dims)):
            if missing != 1:
                raise context.fail(
                    f"it merges tokens with another axis: {list(operand.shape)} to {dims}"
                )
            missing = operand.shape[0]
        dims[dims.index(-1)] = missing
    return [reshape(context, operand, tuple(dims))]


def _rule_squeeze(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    axes = _known_ints(context, inputs, 1, "axes")
    rank = len(operand.shape)
    if axes is None:
        axes = [axis for axis, dim in enumerate(operand.shape) if dim == 1]
    dropped = {axis % rank for axis in axes}
    shape = tuple(dim for axis, dim in enumerate(operand.shape) if axis not in dropped)
    return [reshape(context, operand, shape)]


def _rule_unsqueeze(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    axes = _known_ints(context, inputs, 1, "axes") or []
    rank = len(operand.shape) + len(axes)
    inserted = {axis % rank for axis in axes}
    dims = iter(operand.shape)
    shape = tuple(1 if axis in inserted else next(dims) for axis in range(rank))
    return [reshape(context, operand, shape)]


def _rule_flatten(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    axis = context.attributes.get("axis", 1) % len(operand.shape)
    if axis != 1 and operand.has_rows:
        raise context.fail("it merges tokens with another axis")
    inner = math.prod(dim for dim in operand.shape[1:] if not isinstance(dim, str))
    return [reshape(context, operand, (operand.shape[0], inner))]


def _rule_expand(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand, target = _required(context, inputs, 0), _required(context, inputs, 1).value
    if target is None:
        raise context.fail("the shape depends on data")
    dims = tuple(dim if isinstance(dim, str) else int(dim) for dim in target.reshape(-1))
    shape = _broadcast(context, [operand.shape, dims])
    if not operand.has_rows:
        # Expanding over rows is left to the broadcast of whatever uses it.
        shape = tuple(1 if isinstance(dim, str) else dim for dim in shape)
        padded = (1,) * (len(shape) - len(operand.shape)) + operand.shape
        if operand.tensor is None and operand.value is not None:
            sizes = tuple(int(dim) for dim in shape)
            value = np.array(np.broadcast_to(operand.value, sizes))
            return [Operand(shape=shape, dtype=operand.dtype, value=value)]
        if padded == shape:
            return [reshape(context, operand, shape)]
    padded_operand = reshape(
        context, operand, (1,) * (len(shape) - len(operand.shape)) + operand.shape
    )
    if padded_operand.shape == shape:
        return [padded_operand]
    kept = kept_axes(shape)
    tensor = _viewed(context, padded_operand, len(shape), kept)
    out = tuple(shape[axis] for axis in kept)
    sizes = context.built.constant(
        np.array([1 if isinstance(dim, str) else dim for dim in out], dtype=np.int64)
    )
    made = context.built.emit("Expand", [tensor, sizes], {}, [(out, operand.dtype)])[0]
    return [_finished(context, made, shape, operand.dtype)]


def _rule_constant_of_shape(context: NodeContext, inputs: Operands) -> list[Operand]:
    target = _required(context, inputs, 0).value
    if target is None:
        raise context.fail("the shape depends on data")
    shape = tuple(dim if isinstance(dim, str) else int(dim) for dim in target.reshape(-1))
    check_rows(shape, context.where)
    fill = context.attributes.get("value")
    number = np.zeros(1, np.float32) if fill is None else onnx.numpy_helper.to_array(fill)
    inner = tuple(int(dim) for dim in squeezed(shape)[1:])
    content = np.full(inner, number.reshape(-1)[0], dtype=number.dtype)
    if len(shape) == 1 or number.dtype == np.bool_:
        raise context.fail("it fills a tensor no segment may hold")
    tensor = context.built.filled_rows(str(shape[0]), content)
    return [_finished(context, tensor, shape, number.dtype)]


def _rule_transpose(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    rank = len(operand.shape)
    perm = list(context.attributes.get("perm", reversed(range(rank))))
    shape = tuple(operand.shape[axis] for axis in perm)
    check_rows(shape, context.where)
    kept = kept_axes(operand.shape)
    order = [kept.index(axis) for axis in perm if axis in kept]
    tensor = _viewed_rows(context, operand, kept)
    if order != sorted(order):
        out = tuple(tensor.shape[axis] for axis in order)
        tensor = context.built.emit("Transpose", [tensor], {"perm": order}, [(out, operand.dtype)])[
            0
        ]
    return [_finished(context, tensor, shape, operand.dtype)]


def _viewed_rows(context: NodeContext, operand: Operand, kept: Sequence[int]) -> gs.Tensor:
    """See one operand with its `kept` axes, whether it has rows or not."""
    target = tuple(operand.shape[axis] for axis in kept)
    return context.built.view(context.built.tensor_of(operand), target)


def reduce(
    context: NodeContext, op: str, operand: Operand, axes: Sequence[int], keepdims: bool
) -> Operand:
    """Emit a reduction over inner axes."""
    rank = len(operand.shape)
    reduced = sorted({axis % rank for axis in axes})
    if operand.has_rows and 0 in reduced:
        raise context.fail(
            "it reduces over tokens", hint="only blink::PagedAttention may mix tokens"
        )
    shape: Shape = tuple(
        1 if axis in reduced else dim
        for axis, dim in enumerate(operand.shape)
        if keepdims or axis not in reduced
    )
    kept = kept_axes(operand.shape)
    inner = [kept.index(axis) for axis in reduced if axis in kept]
    tensor = _viewed_rows(context, operand, kept)
    if inner and any(tensor.shape[axis] != 1 for axis in inner):
        rest = tuple(dim for axis, dim in enumerate(tensor.shape) if axis not in inner)
        ones = tuple(1 if axis in inner else dim for axis, dim in enumerate(tensor.shape))
        keep = squeezed(shape) == ones
        out = ones if keep else rest
        axes_input = context.built.constant(np.array(inner, dtype=np.int64))
        attributes = {"keepdims": int(keep)}
        tensor = context.built.emit(op, [tensor, axes_input], attributes, [(out, operand.dtype)])[0]
    return _finished(context, tensor, shape, operand.dtype)


def _rule_reduce(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    axes = _known_ints(context, inputs, 1, "axes")
    if axes is None:
        if context.attributes.get("noop_with_empty_axes", 0):
            return [operand]
        axes = list(range(len(operand.shape)))
    return [reduce(context, context.op, operand, axes, bool(context.attributes.get("keepdims", 1)))]


def _rule_softmax(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    axis = _axis(context, operand.shape, -1)
    kept = kept_axes(operand.shape, axis)
    tensor = _viewed_rows(context, operand, kept)
    made = context.built.emit(
        context.op,
        [tensor],
        {"axis": kept.index(axis)},
        [(tuple(tensor.shape), operand.dtype)],
    )[0]
    return [_finished(context, made, operand.shape, operand.dtype)]


def _rule_concat(context: NodeContext, inputs: Operands) -> list[Operand]:
    operands = [operand for operand in inputs if operand is not None]
    first = operands[0].shape
    axis = _axis(context, first, 0)
    total = 0
    for operand in operands:
        if len(operand.shape) != len(first) or operand.shape[:1] != first[:1]:
            raise context.fail(f"it joins shapes {[list(o.shape) for o in operands]}")
        dim = operand.shape[axis]
        if isinstance(dim, str):
            raise context.fail("it joins tokens")
        total += dim
    shape = (*first[:axis], total, *first[axis + 1 :])
    kept = kept_axes(shape, axis)
    operands = [operand for operand in operands if operand.shape[axis]]
    if len(operands) == 1:
        return [operands[0]]
    tensors = [_viewed_rows(context, operand, kept) for operand in operands]
    out = tuple(shape[index] for index in kept)
    dtype = operands[0].dtype
    made = context.built.emit("Concat", tensors, {"axis": kept.index(axis)}, [(out, dtype)])[0]
    return [_finished(context, made, shape, dtype)]


def slice_axis(
    context: NodeContext, operand: Operand, axis: int, start: int, end: int, step: int = 1
) -> Operand:
    """Emit a slice of one inner axis; bounds are normalized."""
    dim = operand.shape[axis]
    assert isinstance(dim, int)
    span = range(dim)[slice(start, end, step)]
    if len(span) == dim and step == 1:
        return operand
    shape = (*operand.shape[:axis], len(span), *operand.shape[axis + 1 :])
    if not span:
        return Operand(shape=shape, dtype=operand.dtype)  # only a concatenation may take it
    kept = kept_axes(operand.shape, axis)
    tensor = _viewed_rows(context, operand, kept)
    stop = span[-1] + (1 if step > 0 else -1)
    numbers = [span[0], stop if stop >= 0 else -(dim + 1), kept.index(axis), step]
    arguments = [context.built.constant(np.array([n], dtype=np.int64)) for n in numbers]
    out = tuple(shape[index] for index in kept)
    made = context.built.emit("Slice", [tensor, *arguments], {}, [(out, operand.dtype)])[0]
    return _finished(context, made, shape, operand.dtype)


def _rule_slice(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    starts = _known_ints(context, inputs, 1, "starts") or []
    ends = _known_ints(context, inputs, 2, "ends") or []
    axes = _known_ints(context, inputs, 3, "axes") or list(range(len(starts)))
    steps = _known_ints(context, inputs, 4, "steps") or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(operand.shape)
        if isinstance(operand.shape[axis], str):
            if start == 0 and end >= 1 << 31 and step == 1:
                continue
            raise context.fail("it slices tokens", hint="only blink::PagedAttention may mix tokens")
        operand = slice_axis(context, operand, axis, start, end, step)
    return [operand]


def _rule_split(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    axis = _axis(context, operand.shape, 0)
    dim = operand.shape[axis]
    assert isinstance(dim, int)
    sizes = _known_ints(context, inputs, 1, "split")
    if sizes is None:
        count = len(context.node.output)
        each = -(-dim // count)
        sizes = [min(each, dim - index * each) for index in range(count)]
    outputs, start = [], 0
    for size in sizes:
        outputs.append(slice_axis(context, operand, axis, start, start + size))
        start += size
    return outputs


def _rule_split_to_sequence(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    sizes = _known_ints(context, inputs, 1, "split") or [1]
    if not context.attributes.get("keepdims", 1):
        raise context.fail("it drops the axis it splits")
    axis = _axis(context, operand.shape, 0)
    dim = operand.shape[axis]
    assert isinstance(dim, int)
    if len(sizes) == 1 and _required(context, inputs, 1).shape == ():
        sizes = [min(sizes[0], dim - start) for start in range(0, dim, sizes[0])]
    items, start = [], 0
    for size in sizes:
        items.append(slice_axis(context, operand, axis, start, start + size))
        start += size
    return [Operand(shape=(), dtype=operand.dtype, items=tuple(items))]


def _rule_sequence_at(context: NodeContext, inputs: Operands) -> list[Operand]:
    (index,) = _known_ints(context, inputs, 1, "position") or [0]
    return [_required(context, inputs, 0).items[index]]


def _rule_gather(context: NodeContext, inputs: Operands) -> list[Operand]:
    data, index = _required(context, inputs, 0), _required(context, inputs, 1)
    rank = len(data.shape)
    axis = context.attributes.get("axis", 0) % rank
    shape = (*data.shape[:axis], *index.shape, *data.shape[axis + 1 :])
    if index.value is not None and index.value.size == 1 and axis > 0:
        at = int(index.value.reshape(-1)[0])
        at += int(data.shape[axis]) if at < 0 else 0
        return [reshape(context, slice_axis(context, data, axis, at, at + 1), shape)]
    if data.has_rows and axis == 0 and not index.has_rows:
        raise context.fail("it picks tokens by a constant")
    if not data.has_rows and axis > 0 and index.has_rows:
        raise context.fail("it looks up tokens on an inner axis")
    if data.has_rows and index.has_rows and axis > 0:
        raise context.fail("it looks up an inner axis by token: use GatherElements")
    kept = kept_axes(data.shape, axis)
    tensor = _viewed_rows(context, data, kept)
    tensors = [tensor, context.built.tensor_of(index)]
    at_axis = kept.index(axis)
    out = (*tensor.shape[:at_axis], *tensors[1].shape, *tensor.shape[at_axis + 1 :])
    if index.shape and index.has_rows:
        tensors[1] = context.built.view(
            tensors[1], tuple(d for i, d in enumerate(index.shape) if i == 0 or d != 1)
        )
        out = (*tensors[1].shape, *tensor.shape[1:])
    made = context.built.emit("Gather", tensors, {"axis": at_axis}, [(tuple(out), data.dtype)])[0]
    return [_finished(context, made, shape, data.dtype)]


def _rule_gather_nd(context: NodeContext, inputs: Operands) -> list[Operand]:
    data, index = _required(context, inputs, 0), _required(context, inputs, 1)
    if context.attributes.get("batch_dims", 0) or index.shape[-1] != 1:
        raise context.fail("it looks up several axes at once")
    flat = reshape(context, index, index.shape[:-1])
    gather = NodeContext(context.built, context.where, {"axis": 0}, context.node)
    return _rule_gather(gather, [data, flat])


def _rule_by_axis(num_outputs: int = 1) -> Rule:
    """Emit an op whose inputs share their shape and which works along one inner axis."""

    def rule(context: NodeContext, inputs: Operands) -> list[Operand]:
        operands = _with_rows(context, [o for o in inputs if o is not None])
        first = operands[0]
        axis = _axis(context, first.shape, 0)
        kept = kept_axes(first.shape, axis, *_wider_axes(operands))
        tensors = [_viewed_rows(context, operand, kept) for operand in operands]
        shape = operands[1].shape if context.op == "GatherElements" else first.shape
        attributes = {**context.attributes, "axis": kept.index(axis)}
        out = tuple(shape[index] for index in kept)
        made = context.built.emit(
            context.op, tensors, attributes, [(out, first.dtype)] * num_outputs
        )
        return [_finished(context, tensor, shape, first.dtype) for tensor in made]

    return rule


def _with_rows(context: NodeContext, operands: list[Operand]) -> list[Operand]:
    """Give rows to the constants among operands that must have the same axes."""
    rows = next((operand.shape[0] for operand in operands if operand.has_rows), None)
    if rows is None:
        return operands
    spread = []
    for operand in operands:
        known = operand.value
        if not operand.has_rows and known is not None and operand.shape[:1] == (1,):
            shape = (rows, *operand.shape[1:])
            inner = tuple(int(dim) for dim in squeezed(shape)[1:])
            tensor = context.built.filled_rows(str(rows), known.reshape(inner))
            operand = _finished(context, tensor, shape, operand.dtype)
        spread.append(operand)
    return spread


def _wider_axes(operands: Sequence[Operand]) -> list[int]:
    rank = len(operands[0].shape)
    return [
        axis
        for axis in range(1, rank)
        if any(len(o.shape) == rank and o.shape[axis] != 1 for o in operands)
    ]


def _rule_cumsum(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    axis = (_known_ints(context, inputs, 1, "axis") or [0])[0] % len(operand.shape)
    _axis(NodeContext(context.built, context.where, {"axis": axis}, context.node), operand.shape, 0)
    kept = kept_axes(operand.shape, axis)
    tensor = _viewed_rows(context, operand, kept)
    at = context.built.constant(np.array(kept.index(axis), dtype=np.int64))
    made = context.built.emit(
        "CumSum", [tensor, at], context.attributes, [(tuple(tensor.shape), operand.dtype)]
    )[0]
    return [_finished(context, made, operand.shape, operand.dtype)]


def _rule_topk(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = _required(context, inputs, 0)
    count = (_known_ints(context, inputs, 1, "k") or [0])[0]
    axis = _axis(context, operand.shape, -1)
    shape = (*operand.shape[:axis], count, *operand.shape[axis + 1 :])
    kept = kept_axes(operand.shape, axis)
    tensor = _viewed_rows(context, operand, kept)
    out = tuple(shape[index] for index in kept)
    attributes = {"axis": kept.index(axis), "largest": context.attributes.get("largest", 1)}
    attributes["sorted"] = context.attributes.get("sorted", 1)
    ids_dtype = np.dtype(np.int64)
    made = context.built.emit(
        "TopK",
        [tensor, context.built.constant(np.array([count], dtype=np.int64))],
        attributes,
        [(out, operand.dtype), (out, ids_dtype)],
    )
    return [
        _finished(context, made[0], shape, operand.dtype),
        _finished(context, made[1], shape, ids_dtype),
    ]


def _rule_matmul(context: NodeContext, inputs: Operands) -> list[Operand]:
    left, right = _required(context, inputs, 0), _required(context, inputs, 1)
    if not right.has_rows and len(right.shape) == 2 and len(left.shape) >= 2:
        shape = (*left.shape[:-1], right.shape[1])
        kept = kept_axes(left.shape[:-1]) if len(left.shape) > 2 else [0]
        if left.has_rows and len(left.shape) > 2 and all(d == 1 for d in left.shape[1:-1]):
            kept = [0]
        kept = [*kept, len(left.shape) - 1]
        tensor = _viewed_rows(context, left, kept)
        out = (*tensor.shape[:-1], right.shape[1])
        pair = [tensor, context.built.tensor_of(right)]
        made = context.built.emit("MatMul", pair, {}, [(out, left.dtype)])[0]
        return [_finished(context, made, shape, left.dtype)]
    if len(left.shape) < 2 or len(right.shape) < 2:
        raise context.fail(f"it multiplies {list(left.shape)} with {list(right.shape)}")
    # A product within each row, K long: a broadcast and a sum.
    summed = left.shape[-1]
    wide_left = reshape(context, left, (*left.shape, 1))
    wide_right = reshape(context, right, (*right.shape[:-2], 1, *right.shape[-2:]))
    product = elementwise(context, "Mul", [wide_left, wide_right], left.dtype)
    if summed == 1:
        shape = (*product.shape[:-2], product.shape[-1])
        return [reshape(context, product, shape)]
    return [reduce(context, "ReduceSum", product, [len(product.shape) - 2], keepdims=False)]


def _rule_gemm(context: NodeContext, inputs: Operands) -> list[Operand]:
    left, right = _required(context, inputs, 0), _required(context, inputs, 1)
    attributes = context.attributes
    if attributes.get("transA", 0) or right.has_rows:
        raise context.fail("it multiplies tokens with tokens")
    transposed = bool(attributes.get("transB", 0))
    scales = [float(attributes.get(name, 1.0)) for name in ("alpha", "beta")]
    width = right.shape[0 if transposed else 1]
    tensors = [context.built.tensor_of(left), context.built.tensor_of(right)]
    if len(inputs) > 2 and inputs[2] is not None:
        tensors.append(context.built.tensor_of(_required(context, inputs, 2)))
    if scales != [1.0, 1.0]:
        raise context.fail("it scales its product")
    shape = (left.shape[0], width)
    made = context.built.emit("Gemm", tensors, {"transB": int(transposed)}, [(shape, left.dtype)])[
        0
    ]
    return [_finished(context, made, shape, left.dtype)]


def _rule_layer_norm(context: NodeContext, inputs: Operands) -> list[Operand]:
    """Spell a LayerNormalization over the last axis out, in fp32 as its definition wants."""
    operand = _required(context, inputs, 0)
    rank = len(operand.shape)
    if context.attributes.get("axis", -1) % rank != rank - 1:
        raise context.fail("it normalizes more than the last axis")
    fp32 = np.dtype(np.float32)
    wide = operand
    if operand.dtype != fp32:
        wide = elementwise(context, "Cast", [operand], fp32, to=onnx.TensorProto.FLOAT)
    mean = reduce(context, "ReduceMean", wide, [rank - 1], keepdims=True)
    centred = elementwise(context, "Sub", [wide, mean], fp32)
    square = elementwise(context, "Mul", [centred, centred], fp32)
    variance = reduce(context, "ReduceMean", square, [rank - 1], keepdims=True)
    epsilon = np.array(context.attributes.get("epsilon", 1e-5), dtype=np.float32)
    known = Operand(shape=(), dtype=fp32, value=epsilon)
    deviation = elementwise(
        context, "Sqrt", [elementwise(context, "Add", [variance, known], fp32)], fp32
    )
    inverse = elementwise(context, "Reciprocal", [deviation], fp32)
    out = elementwise(context, "Mul", [centred, inverse], fp32)
    if operand.dtype != fp32:
        to = onnx.helper.np_dtype_to_tensor_dtype(operand.dtype)
        out = elementwise(context, "Cast", [out], operand.dtype, to=to)
    out = elementwise(context, "Mul", [out, _required(context, inputs, 1)], operand.dtype)
    if len(inputs) > 2 and inputs[2] is not None:
        out = elementwise(context, "Add", [out, _required(context, inputs, 2)], operand.dtype)
    return [out]


def _rule_paged_attention(context: NodeContext, inputs: Operands) -> list[Operand]:
    """Flatten heads: the cut op sees q `[T, Hq * d]`, k and v `[T, Hkv * d]`."""
    query, key, value, positions = (_required(context, inputs, index) for index in range(4))
    for operand in (query, key, value):
        if len(operand.shape) != 3 or not operand.has_rows:
            raise context.fail(f"q, k and v must be [T, heads, d], not {list(operand.shape)}")
    heads, size = query.shape[1:]
    if key.shape[2] != size or value.shape != key.shape:
        raise context.fail("q, k and v differ in head size, or k and v in heads")
    if positions.tensor is None or positions.tensor.name != "positions":
        raise context.fail("its positions are not the step's positions")
    flat = [
        context.built.tensor_of(
            reshape(context, o, (o.shape[0], int(o.shape[1]) * int(o.shape[2])))
        )
        for o in (query, key, value)
    ]
    attributes = {name: v for name, v in context.attributes.items() if name != "layer"}
    attributes |= {"num_q_heads": heads, "num_kv_heads": key.shape[1], "head_dim": size}
    tensors = [*flat, positions.tensor]
    if len(inputs) > 4 and inputs[4] is not None:
        tensors.append(context.built.tensor_of(_required(context, inputs, 4)))
    shape = (query.shape[0], int(heads) * int(size))
    made = context.built.emit(
        "PagedAttention", tensors, attributes, [(shape, query.dtype)], domain="blink"
    )[0]
    return [reshape(context, Operand(shape=shape, dtype=query.dtype, tensor=made), query.shape)]


def _rule_moe_experts(context: NodeContext, inputs: Operands) -> list[Operand]:
    operands = [_required(context, inputs, index) for index in range(5)]
    if any(len(operand.shape) != 2 for operand in operands[:3]):
        raise context.fail("x, ids and weights must be [T, n]")
    tensors = [context.built.tensor_of(operand) for operand in operands]
    attributes = {name: v for name, v in context.attributes.items() if name != "layer"}
    out = operands[0]
    made = context.built.emit(
        "MoeExperts", tensors, attributes, [(out.shape, out.dtype)], domain="blink"
    )[0]
    return [_finished(context, made, out.shape, out.dtype)]


_UNARY = (
    *("Abs", "Ceil", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
    *("LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid"),
    *("Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Tanh"),
)
_REDUCTIONS = (
    *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"),
    *("ReduceL2", "ReduceSumSquare", "ReduceProd"),
)
_COMPARISONS = ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor"]

RULES: dict[tuple[str, str], Rule] = {
    **{
        ("", op): _rule_elementwise()
        for op in (*_UNARY, "Max", "Min", "Clip", "Mod", "PRelu", "Sum")
    },
    **{("", op): _rule_elementwise("bool") for op in (*_COMPARISONS, "IsNaN", "IsInf")},
    **{("", op): _rule_reduce for op in _REDUCTIONS},
    ("", "Where"): _rule_elementwise(which=1),
    ("", "Mul"): _rule_neutral("Mul", 1.0),
    ("", "Div"): _rule_neutral("Div", 1.0),
    ("", "Add"): _rule_neutral("Add", 0.0),
    ("", "Sub"): _rule_neutral("Sub", 0.0),
    ("", "Pow"): _rule_pow,
    ("", "Cast"): _rule_cast,
    ("", "CastLike"): _rule_cast_like,
    ("", "Identity"): _rule_identity,
    ("", "Dropout"): _rule_identity,
    ("", "Reshape"): _rule_reshape,
    ("", "Squeeze"): _rule_squeeze,
    ("", "Unsqueeze"): _rule_unsqueeze,
    ("", "Flatten"): _rule_flatten,
    ("", "Expand"): _rule_expand,
    ("", "ConstantOfShape"): _rule_constant_of_shape,
    ("", "Transpose"): _rule_transpose,
    ("", "Softmax"): _rule_softmax,
    ("", "LogSoftmax"): _rule_softmax,
    ("", "Concat"): _rule_concat,
    ("", "Slice"): _rule_slice,
    ("", "Split"): _rule_split,
    ("", "SplitToSequence"): _rule_split_to_sequence,
    ("", "SequenceAt"): _rule_sequence_at,
    ("", "Gather"): _rule_gather,
    ("", "GatherND"): _rule_gather_nd,
    ("", "GatherElements"): _rule_by_axis(),
    ("", "ScatterElements"): _rule_by_axis(),
    ("", "CumSum"): _rule_cumsum,
    ("", "TopK"): _rule_topk,
    ("", "MatMul"): _rule_matmul,
    ("", "Gemm"): _rule_gemm,
    ("", "LayerNormalization"): _rule_layer_norm,
    ("blink", "PagedAttention"): _rule_paged_attention,
    ("blink", "MoeExperts"): _rule_moe_experts,
}
