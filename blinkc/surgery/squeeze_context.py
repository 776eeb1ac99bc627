"""What the rules of squeezing share: the node at hand, and the few ways to emit on its operands."""

from __future__ import annotations

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


def required(context: NodeContext, inputs: Operands, index: int) -> Operand:
    operand = inputs[index] if index < len(inputs) else None
    if operand is None:
        raise context.fail(f"input {index} is missing")
    return operand


def known_ints(
    context: NodeContext, inputs: Operands, index: int, attribute: str
) -> list[int] | None:
    """Read an argument that newer opsets take as input and older ones as attribute."""
    if index < len(inputs) and inputs[index] is not None:
        value = required(context, inputs, index).value
        if value is None or value.dtype == object:
            raise context.fail(f"`{attribute}` is not a constant")
        return [int(item) for item in value.reshape(-1)]
    found = context.attributes.get(attribute)
    if found is None:
        return None
    return list(found) if isinstance(found, list) else [int(found)]


def inner_axis(context: NodeContext, shape: Shape, default: int) -> int:
    axis = context.attributes.get("axis", default)
    axis = axis + len(shape) if axis < 0 else axis
    if axis == 0 and shape and isinstance(shape[0], str):
        raise context.fail(
            "it works across tokens", hint="only blink::PagedAttention may mix tokens"
        )
    return int(axis)


def viewed(context: NodeContext, operand: Operand, rank: int, kept: Sequence[int]) -> gs.Tensor:
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


def viewed_rows(context: NodeContext, operand: Operand, kept: Sequence[int]) -> gs.Tensor:
    """See one operand with its `kept` axes, whether it has rows or not."""
    target = tuple(operand.shape[axis] for axis in kept)
    return context.built.view(context.built.tensor_of(operand), target)


def finished(
    context: NodeContext, tensor: gs.Tensor, shape: Shape, dtype: np.dtype[Any]
) -> Operand:
    check_rows(shape, context.where)
    return Operand(shape=shape, dtype=dtype, tensor=context.built.view(tensor, squeezed(shape)))


def broadcast_shape(context: NodeContext, shapes: Sequence[Shape]) -> Shape:
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
    shape = broadcast_shape(context, [operand.shape for operand in operands])
    check_rows(shape, context.where)
    kept = kept_axes(shape)
    tensors = [viewed(context, operand, len(shape), kept) for operand in operands]
    out = tuple(shape[axis] for axis in kept)
    made = context.built.emit(op, tensors, attributes, [(out, dtype)])[0]
    return finished(context, made, shape, dtype)


def reshape(context: NodeContext, operand: Operand, shape: Shape) -> Operand:
    """See an operand under another shape of the front end's graph."""
    if operand.value is not None and operand.tensor is None:
        return Operand(shape=shape, dtype=operand.dtype, value=operand.value.reshape(shape))
    check_rows(shape, context.where)
    if operand.shape[:1] != shape[:1] and (operand.has_rows or has_symbol(shape)):
        raise context.fail(
            f"it turns {list(operand.shape)} into {list(shape)}, which moves tokens off axis 0"
        )
    return finished(context, context.built.tensor_of(operand), shape, operand.dtype)


def has_symbol(shape: Shape) -> bool:
    return any(isinstance(dim, str) for dim in shape)


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
    tensor = viewed_rows(context, operand, kept)
    if inner and any(tensor.shape[axis] != 1 for axis in inner):
        rest = tuple(dim for axis, dim in enumerate(tensor.shape) if axis not in inner)
        ones = tuple(1 if axis in inner else dim for axis, dim in enumerate(tensor.shape))
        keep = squeezed(shape) == ones
        out = ones if keep else rest
        axes_input = context.built.constant(np.array(inner, dtype=np.int64))
        attributes = {"keepdims": int(keep)}
        tensor = context.built.emit(op, [tensor, axes_input], attributes, [(out, operand.dtype)])[0]
    return finished(context, tensor, shape, operand.dtype)


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
    tensor = viewed_rows(context, operand, kept)
    stop = span[-1] + (1 if step > 0 else -1)
    numbers = [span[0], stop if stop >= 0 else -(dim + 1), kept.index(axis), step]
    arguments = [context.built.constant(np.array([n], dtype=np.int64)) for n in numbers]
    out = tuple(shape[index] for index in kept)
    made = context.built.emit("Slice", [tensor, *arguments], {}, [(out, operand.dtype)])[0]
    return finished(context, made, shape, operand.dtype)
