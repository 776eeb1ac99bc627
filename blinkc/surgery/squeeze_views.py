"""Rules for ops that move elements and compute nothing: reshapes, slices, gathers, joins."""

from __future__ import annotations

import math

import numpy as np
import onnx

from blinkc.surgery.fold_shapes import SAMPLES
from blinkc.surgery.squeeze_context import (
    NodeContext,
    Operands,
    broadcast_shape,
    finished,
    has_symbol,
    inner_axis,
    known_ints,
    required,
    reshape,
    slice_axis,
    viewed,
    viewed_rows,
)
from blinkc.surgery.token_graph import Operand, check_rows, kept_axes, squeezed


def rule_identity(context: NodeContext, inputs: Operands) -> list[Operand]:
    return [required(context, inputs, 0)]


def rule_reshape(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand, target = required(context, inputs, 0), required(context, inputs, 1).value
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
        if operand.has_rows and not has_symbol(tuple(dims)):
            if missing != 1:
                raise context.fail(
                    f"it merges tokens with another axis: {list(operand.shape)} to {dims}"
                )
            missing = operand.shape[0]
        dims[dims.index(-1)] = missing
    return [reshape(context, operand, tuple(dims))]


def rule_squeeze(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    axes = known_ints(context, inputs, 1, "axes")
    rank = len(operand.shape)
    if axes is None:
        axes = [axis for axis, dim in enumerate(operand.shape) if dim == 1]
    dropped = {axis % rank for axis in axes}
    shape = tuple(dim for axis, dim in enumerate(operand.shape) if axis not in dropped)
    return [reshape(context, operand, shape)]


def rule_unsqueeze(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    axes = known_ints(context, inputs, 1, "axes") or []
    rank = len(operand.shape) + len(axes)
    inserted = {axis % rank for axis in axes}
    dims = iter(operand.shape)
    shape = tuple(1 if axis in inserted else next(dims) for axis in range(rank))
    return [reshape(context, operand, shape)]


def rule_flatten(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    axis = context.attributes.get("axis", 1) % len(operand.shape)
    if axis != 1 and operand.has_rows:
        raise context.fail("it merges tokens with another axis")
    inner = math.prod(dim for dim in operand.shape[1:] if not isinstance(dim, str))
    return [reshape(context, operand, (operand.shape[0], inner))]


def rule_expand(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand, target = required(context, inputs, 0), required(context, inputs, 1).value
    if target is None:
        raise context.fail("the shape depends on data")
    dims = tuple(dim if isinstance(dim, str) else int(dim) for dim in target.reshape(-1))
    shape = broadcast_shape(context, [operand.shape, dims])
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
    tensor = viewed(context, padded_operand, len(shape), kept)
    out = tuple(shape[axis] for axis in kept)
    sizes = context.built.constant(
        np.array([1 if isinstance(dim, str) else dim for dim in out], dtype=np.int64)
    )
    made = context.built.emit("Expand", [tensor, sizes], {}, [(out, operand.dtype)])[0]
    return [finished(context, made, shape, operand.dtype)]


def rule_constant_of_shape(context: NodeContext, inputs: Operands) -> list[Operand]:
    target = required(context, inputs, 0).value
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
    return [finished(context, tensor, shape, number.dtype)]


def rule_transpose(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    rank = len(operand.shape)
    perm = list(context.attributes.get("perm", reversed(range(rank))))
    shape = tuple(operand.shape[axis] for axis in perm)
    check_rows(shape, context.where)
    kept = kept_axes(operand.shape)
    order = [kept.index(axis) for axis in perm if axis in kept]
    tensor = viewed_rows(context, operand, kept)
    if order != sorted(order):
        out = tuple(tensor.shape[axis] for axis in order)
        tensor = context.built.emit("Transpose", [tensor], {"perm": order}, [(out, operand.dtype)])[
            0
        ]
    return [finished(context, tensor, shape, operand.dtype)]


def rule_concat(context: NodeContext, inputs: Operands) -> list[Operand]:
    operands = [operand for operand in inputs if operand is not None]
    first = operands[0].shape
    axis = inner_axis(context, first, 0)
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
    tensors = [viewed_rows(context, operand, kept) for operand in operands]
    out = tuple(shape[index] for index in kept)
    dtype = operands[0].dtype
    made = context.built.emit("Concat", tensors, {"axis": kept.index(axis)}, [(out, dtype)])[0]
    return [finished(context, made, shape, dtype)]


def rule_slice(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    starts = known_ints(context, inputs, 1, "starts") or []
    ends = known_ints(context, inputs, 2, "ends") or []
    axes = known_ints(context, inputs, 3, "axes") or list(range(len(starts)))
    steps = known_ints(context, inputs, 4, "steps") or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis %= len(operand.shape)
        if isinstance(operand.shape[axis], str):
            if start == 0 and end >= 1 << 31 and step == 1:
                continue
            raise context.fail("it slices tokens", hint="only blink::PagedAttention may mix tokens")
        operand = slice_axis(context, operand, axis, start, end, step)
    return [operand]


def rule_split(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    axis = inner_axis(context, operand.shape, 0)
    dim = operand.shape[axis]
    assert isinstance(dim, int)
    sizes = known_ints(context, inputs, 1, "split")
    if sizes is None:
        count = len(context.node.output)
        each = -(-dim // count)
        sizes = [min(each, dim - index * each) for index in range(count)]
    outputs, start = [], 0
    for size in sizes:
        outputs.append(slice_axis(context, operand, axis, start, start + size))
        start += size
    return outputs


def rule_split_to_sequence(context: NodeContext, inputs: Operands) -> list[Operand]:
    operand = required(context, inputs, 0)
    sizes = known_ints(context, inputs, 1, "split") or [1]
    if not context.attributes.get("keepdims", 1):
        raise context.fail("it drops the axis it splits")
    axis = inner_axis(context, operand.shape, 0)
    dim = operand.shape[axis]
    assert isinstance(dim, int)
    if len(sizes) == 1 and required(context, inputs, 1).shape == ():
        sizes = [min(sizes[0], dim - start) for start in range(0, dim, sizes[0])]
    items, start = [], 0
    for size in sizes:
        items.append(slice_axis(context, operand, axis, start, start + size))
        start += size
    return [Operand(shape=(), dtype=operand.dtype, items=tuple(items))]


def rule_sequence_at(context: NodeContext, inputs: Operands) -> list[Operand]:
    (index,) = known_ints(context, inputs, 1, "position") or [0]
    return [required(context, inputs, 0).items[index]]


def rule_gather(context: NodeContext, inputs: Operands) -> list[Operand]:
    data, index = required(context, inputs, 0), required(context, inputs, 1)
    rank = len(data.shape)
    axis = context.attributes.get("axis", 0) % rank
    shape = (*data.shape[:axis], *index.shape, *data.shape[axis + 1 :])
    if index.value is not None and index.value.size == 1 and axis > 0:
        at = int(index.value.reshape(-1)[0])
        at += int(data.shape[axis]) if at < 0 else 0
        return [reshape(context, slice_axis(context, data, axis, at, at + 1), shape)]
    if data.has_rows and axis == 0 and not index.has_rows:
        raise context.fail("it picks tokens by a constant")
    if data.has_rows and axis == 0 and index.shape[:1] != (SAMPLES,):
        raise context.fail("it picks tokens by an index made from tokens")
    if not data.has_rows and axis > 0 and index.has_rows:
        raise context.fail("it looks up tokens on an inner axis")
    if data.has_rows and index.has_rows and axis > 0:
        raise context.fail("it looks up an inner axis by token: use GatherElements")
    kept = kept_axes(data.shape, axis)
    tensor = viewed_rows(context, data, kept)
    tensors = [tensor, context.built.tensor_of(index)]
    at_axis = kept.index(axis)
    out = (*tensor.shape[:at_axis], *tensors[1].shape, *tensor.shape[at_axis + 1 :])
    if index.shape and index.has_rows:
        tensors[1] = context.built.view(
            tensors[1], tuple(d for i, d in enumerate(index.shape) if i == 0 or d != 1)
        )
        out = (*tensors[1].shape, *tensor.shape[1:])
    made = context.built.emit("Gather", tensors, {"axis": at_axis}, [(tuple(out), data.dtype)])[0]
    return [finished(context, made, shape, data.dtype)]


def rule_gather_nd(context: NodeContext, inputs: Operands) -> list[Operand]:
    data, index = required(context, inputs, 0), required(context, inputs, 1)
    if context.attributes.get("batch_dims", 0) or index.shape[-1] != 1:
        raise context.fail("it looks up several axes at once")
    flat = reshape(context, index, index.shape[:-1])
    gather = NodeContext(context.built, context.where, {"axis": 0}, context.node)
    return rule_gather(gather, [data, flat])
