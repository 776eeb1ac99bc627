"""Rules for ops within a row: elementwise, reductions, sorting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from blinkc.surgery.squeeze_context import (
    NodeContext,
    Operands,
    Rule,
    elementwise,
    finished,
    inner_axis,
    known_ints,
    reduce,
    required,
    viewed_rows,
)
from blinkc.surgery.token_graph import Operand, kept_axes, squeezed


def rule_elementwise(dtype: str | None = None, which: int = 0) -> Rule:
    def rule(context: NodeContext, inputs: Operands) -> list[Operand]:
        operands = [operand for operand in inputs if operand is not None]
        out = np.dtype(dtype) if dtype else operands[which].dtype
        if len(operands) == 1 and context.op in ("Max", "Min", "Sum", "Mean"):
            return [operands[0]]
        return [elementwise(context, context.op, operands, out, **context.attributes)]

    return rule


def rule_cast(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(context.attributes["to"]))
    if dtype == operand.dtype:
        return [operand]
    return [elementwise(context, "Cast", [operand], dtype, to=context.attributes["to"])]


def rule_cast_like(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand, dtype = required(context, inputs, 0), required(context, inputs, 1).dtype
    if dtype == operand.dtype:
        return [operand]
    if operand.value is not None and operand.value.dtype != object:
        return [Operand(shape=operand.shape, dtype=dtype, value=operand.value.astype(dtype))]
    to = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    return [elementwise(context, "Cast", [operand], dtype, to=to)]


def rule_clip(context: NodeContext, inputs: Operands) -> list[Operand]:
    """Spell it as Max and Min: either bound may be absent."""
    operand = required(context, inputs, 0)
    for index, op, name in ((1, "Max", "min"), (2, "Min", "max")):
        bound = inputs[index] if index < len(inputs) else None
        if name in context.attributes:  # opset 6
            value = np.array(context.attributes[name], dtype=operand.dtype)
            bound = Operand(shape=(), dtype=operand.dtype, value=value)
        if bound is not None:
            operand = elementwise(context, op, [operand, bound], operand.dtype)
    return [operand]


def rule_pow(context: NodeContext, inputs: Operands) -> list[Operand]:
    base, exponent = required(context, inputs, 0), required(context, inputs, 1)
    known = exponent.value
    if known is not None and known.size == 1 and float(known.reshape(-1)[0]) == 2.0:
        return [elementwise(context, "Mul", [base, base], base.dtype)]
    return [elementwise(context, "Pow", [base, exponent], base.dtype)]


def rule_neutral(op: str, neutral: float) -> Rule:
    """Drop a multiplication by one or an addition of zero that keeps the shape."""

    def rule(context: NodeContext, inputs: Operands) -> list[Operand]:
        left, right = required(context, inputs, 0), required(context, inputs, 1)
        pairs = [(left, right)] if op in ("Sub", "Div") else [(left, right), (right, left)]
        for kept, other in pairs:
            known = other.value
            if known is None or known.dtype == object or known.size != 1:
                continue
            if len(known.shape) <= len(kept.shape) and float(known.reshape(-1)[0]) == neutral:
                return [kept]
        return [elementwise(context, op, [left, right], left.dtype)]

    return rule


def rule_reduce(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    axes = known_ints(context, inputs, 1, "axes")
    if axes is None:
        if context.attributes.get("noop_with_empty_axes", 0):
            return [operand]
        axes = list(range(len(operand.shape)))
    return [reduce(context, context.op, operand, axes, bool(context.attributes.get("keepdims", 1)))]


def rule_softmax(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    axis = inner_axis(context, operand.shape, -1)
    kept = kept_axes(operand.shape, axis)
    tensor = viewed_rows(context, operand, kept)
    made = context.built.emit(
        context.op,
        [tensor],
        {"axis": kept.index(axis)},
        [(tuple(tensor.shape), operand.dtype)],
    )[0]
    return [finished(context, made, operand.shape, operand.dtype)]


def rule_by_axis(num_outputs: int = 1) -> Rule:
    """Emit an op whose inputs share their shape and which works along one inner axis."""

    def rule(context: NodeContext, inputs: Operands) -> list[Operand]:
        operands = _with_rows(context, [o for o in inputs if o is not None])
        first = operands[0]
        axis = inner_axis(context, first.shape, 0)
        if any(o.has_rows for o in operands) and not all(o.has_rows for o in operands):
            return [_look_up(context, operands, axis)]
        kept = kept_axes(first.shape, axis, *_wider_axes(operands))
        tensors = [viewed_rows(context, operand, kept) for operand in operands]
        shape = operands[1].shape if context.op == "GatherElements" else first.shape
        attributes = {**context.attributes, "axis": kept.index(axis)}
        out = tuple(shape[index] for index in kept)
        made = context.built.emit(
            context.op, tensors, attributes, [(out, first.dtype)] * num_outputs
        )
        return [finished(context, tensor, shape, first.dtype) for tensor in made]

    return rule


def _look_up(context: NodeContext, operands: list[Operand], axis: int) -> Operand:
    """Write GatherElements on one table for all rows as Gather."""
    table, index = operands[0], operands[1]
    others = [dim for at, dim in enumerate(table.shape) if at != axis]
    if context.op != "GatherElements" or table.has_rows or any(dim != 1 for dim in others):
        raise context.fail("some of its inputs are the same for every token, some are not")
    tensors = [context.built.view(context.built.tensor_of(table), (table.shape[axis],))]
    tensors.append(context.built.tensor_of(index))
    out = tuple(tensors[1].shape)
    made = context.built.emit("Gather", tensors, {"axis": 0}, [(out, table.dtype)])[0]
    return finished(context, made, index.shape, table.dtype)


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
            operand = finished(context, tensor, shape, operand.dtype)
        spread.append(operand)
    return spread


def _wider_axes(operands: Sequence[Operand]) -> list[int]:
    rank = len(operands[0].shape)
    return [
        axis
        for axis in range(1, rank)
        if any(len(o.shape) == rank and o.shape[axis] != 1 for o in operands)
    ]


def rule_cumsum(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    axis = (known_ints(context, inputs, 1, "axis") or [0])[0] % len(operand.shape)
    along = NodeContext(context.built, context.where, {"axis": axis}, context.node)
    inner_axis(along, operand.shape, 0)
    kept = kept_axes(operand.shape, axis)
    tensor = viewed_rows(context, operand, kept)
    at = context.built.constant(np.array(kept.index(axis), dtype=np.int64))
    made = context.built.emit(
        "CumSum", [tensor, at], context.attributes, [(tuple(tensor.shape), operand.dtype)]
    )[0]
    return [finished(context, made, operand.shape, operand.dtype)]


def rule_topk(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    count = (known_ints(context, inputs, 1, "k") or [0])[0]
    axis = inner_axis(context, operand.shape, -1)
    shape = (*operand.shape[:axis], count, *operand.shape[axis + 1 :])
    kept = kept_axes(operand.shape, axis)
    tensor = viewed_rows(context, operand, kept)
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
        finished(context, made[0], shape, operand.dtype),
        finished(context, made[1], shape, ids_dtype),
    ]
