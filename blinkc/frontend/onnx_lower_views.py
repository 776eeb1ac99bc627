"""How ops that move elements are written on packed tokens: views, slices, joins, look-ups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from blinkc.frontend.onnx_emit import DecoderEmitter

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs

    from blinkc.frontend.onnx_probe import Probe


def lower_view(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Reshape, Squeeze, Unsqueeze, Flatten: the elements of a token keep their order."""
    source, result = node.input[0], node.output[0]
    tensor = emitter.operand(source)
    axes = [emitter.meaning.token_axis(name) for name in (source, result)]
    shapes = [emitter.meaning.shape(name) for name in (source, result)]
    before = [
        math.prod(shape[:axis]) if axis is not None else None
        for shape, axis in zip(shapes, axes, strict=True)
    ]
    if before[0] != before[1]:
        raise emitter.fail(
            node, f"it moves elements between tokens: {list(shapes[0])} becomes {list(shapes[1])}"
        )
    dims = emitter.meaning.packed_shape(result)
    if dims == emitter.meaning.packed_shape(source):
        return [tensor]
    return [emitter.writer.reshape(tensor, dims, name=result)]


def lower_transpose(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Transpose what belongs to one token; tokens stay on axis 0."""
    source, result = node.input[0], node.output[0]
    tensor = emitter.operand(source)
    shape = emitter.meaning.shape(source)
    default = list(reversed(range(len(shape))))
    perm = [int(axis) for axis in emitter.attributes(node, "perm").get("perm", default)]
    tokens = emitter.meaning.token_axis(source)
    writer = emitter.writer
    if tokens is None:
        return [writer.one("Transpose", tensor, name=result, perm=perm)]
    if emitter.meaning.rows_per_token(source) != 1:
        raise emitter.fail(node, "it transposes an axis that holds tokens and heads")
    dims = emitter.meaning.packed_shape(result)
    moved = [axis for axis in perm if axis != tokens and shape[axis] != 1]
    if moved == sorted(moved):
        if dims == emitter.meaning.packed_shape(source):
            return [tensor]
        return [writer.reshape(tensor, dims, name=result)]
    others = [axis for axis in range(len(shape)) if axis != tokens]
    inner = writer.reshape(tensor, [-1, *(shape[axis] for axis in others)])
    order = [0, *(1 + others.index(axis) for axis in perm if axis != tokens)]
    turned = writer.one("Transpose", inner, name=result, perm=order)
    return [writer.reshape(turned, dims)]


def lower_expand(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Expand inner axes; an expansion over tokens is left to the broadcast that follows."""
    source, result = node.input[0], node.output[0]
    rank = len(emitter.meaning.shape(result))
    tensor = emitter.operand(source, rank=rank)
    dims = emitter.meaning.packed_shape(result)
    shape = emitter.meaning.shape(source)
    padded = [1] * (rank - len(shape)) + list(shape)
    tokens = emitter.meaning.token_axis(result)
    if emitter.meaning.token_axis(source) != (
        None if tokens is None else tokens - rank + len(shape)
    ):
        raise emitter.fail(node, "it repeats one token's data for all tokens")
    if all(
        d == p for a, (d, p) in enumerate(zip(dims, padded, strict=True)) if a not in (0, tokens)
    ):
        return [tensor]
    target = [1 if dim == -1 else dim for dim in dims]
    return [emitter.writer.one("Expand", tensor, emitter.writer.ints(*target), name=result)]


def lower_slice(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Slice inner axes; a slice that keeps all tokens is dropped."""
    source, result = node.input[0], node.output[0]
    tensor = emitter.operand(source)
    shape = emitter.meaning.shape(source)
    tokens = emitter.meaning.token_axis(source)
    if emitter.meaning.token_axis(result) != tokens:
        raise emitter.fail(node, "it picks some of the tokens")
    bounds = [_slice_bounds(emitter, node, probe) for probe in emitter.meaning.probes]
    for (axis, start, end, step), *others in zip(*bounds, strict=True):
        axis %= len(shape)
        if axis == tokens or shape[axis] == emitter.meaning.shape(result)[axis]:
            if step != 1:
                raise emitter.fail(node, "it reorders tokens or elements")
            continue
        axis = emitter.inner_axis(node, source, axis)
        if any(other[1:] != (start, end, step) for other in others):
            raise emitter.fail(node, "its bounds depend on the number of tokens")
        first, last, by_step = slice(start, end, step).indices(shape[axis])
        inputs = [emitter.writer.ints(x) for x in (first, last, axis)]
        if by_step != 1:
            if by_step < 0:
                raise emitter.fail(node, "it reverses an axis")
            inputs.append(emitter.writer.ints(by_step))
        tensor = emitter.writer.one("Slice", tensor, *inputs, name=result)
    return [tensor]


def _slice_bounds(
    emitter: DecoderEmitter, node: onnx.NodeProto, probe: Probe
) -> list[tuple[int, int, int, int]]:
    """Return (axis, start, end, step) of each sliced axis at one size."""
    values = [probe.value(name) if name else None for name in node.input[1:]]
    starts, ends, axes, steps = [*values, None, None][:4]
    if starts is None or ends is None:
        raise emitter.fail(node, "its bounds depend on data")
    where = list(range(len(starts))) if axes is None else axes.tolist()
    by = [1] * len(starts) if steps is None else steps.tolist()
    return list(zip(where, starts.tolist(), ends.tolist(), by, strict=True))


def lower_split(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Split an inner axis, with the sizes spelled out."""
    source = node.input[0]
    axis = emitter.inner_axis(node, source, int(emitter.attributes(node, "axis").get("axis", 0)))
    sizes = [emitter.meaning.shape(name)[axis] for name in node.output]
    return list(
        emitter.writer.emit(
            "Split",
            [emitter.operand(source), emitter.writer.ints(*sizes)],
            name=node.output[0],
            num_outputs=len(node.output),
            axis=axis,
        )
    )


def lower_concat(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Concatenate along an inner axis."""
    result = node.output[0]
    axis = emitter.inner_axis(node, result, int(emitter.attributes(node, "axis")["axis"]))
    tokens = emitter.meaning.token_axis(result)
    for name in node.input:
        if tokens is not None and emitter.meaning.token_axis(name) != tokens:
            raise emitter.fail(node, f"its input '{name}' is not per token")
    inputs = [emitter.operand(name) for name in node.input]
    return [emitter.writer.one("Concat", *inputs, name=result, axis=axis)]


def lower_gather(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Look rows of a table up by token, or pick elements of an inner axis by constants."""
    data, index = node.input[:2]
    axis = int(emitter.attributes(node, "axis").get("axis", 0)) % len(emitter.meaning.shape(data))
    result = node.output[0]
    writer = emitter.writer
    if emitter.meaning.token_axis(data) is None:
        table, ids = emitter.operand(data), emitter.operand(index)
        if emitter.meaning.token_axis(index) is None:
            return [writer.one("Gather", table, ids, name=result, axis=axis)]
        shape = emitter.meaning.shape(data)
        if any(dim != 1 for dim in shape[:axis]):
            raise emitter.fail(node, "it looks tokens up on an inner axis")
        longest = emitter.meaning.probes[-1].value(index)
        if longest is not None and longest.size and int(longest.max()) >= shape[axis]:
            raise emitter.fail(
                node,
                f"its table has {shape[axis]} rows, a sequence of "
                f"{emitter.meaning.probes[-1].total} tokens reads row {int(longest.max())}",
                "lower --max-seqlen",
            )
        if axis:
            table = writer.reshape(table, shape[axis:])
        rows = writer.one("Gather", table, ids, name=result, axis=0)
        dims = emitter.meaning.packed_shape(result)
        return [rows if not axis else writer.reshape(rows, dims)]
    axis = emitter.inner_axis(node, data, axis)
    if emitter.meaning.token_axis(index) is not None:
        raise emitter.fail(node, "it picks elements by token", "GatherElements is supported")
    return [
        writer.one("Gather", emitter.operand(data), emitter.operand(index), name=result, axis=axis)
    ]


def lower_gather_elements(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Pick elements within a token, or whole rows of a table by position."""
    data, index = node.input
    if emitter.meaning.token_axis(data) is not None:
        return lower_along_axis(emitter, node)
    axis = int(emitter.attributes(node, "axis").get("axis", 0))
    shape = emitter.meaning.shape(data)
    axis %= len(shape)
    for probe in emitter.meaning.probes:
        ids = probe.value(index)
        rows = np.arange(probe.past, probe.total).reshape(-1, *(1,) * (len(shape) - axis - 1))
        if ids is None or any(d != 1 for d in shape[:axis]) or not np.all(ids == rows):
            raise emitter.fail(node, "it looks up a table by something else than positions")
    if emitter.meaning.probes[-1].total > shape[axis]:
        raise emitter.fail(node, f"its table has {shape[axis]} rows", "lower --max-seqlen")
    writer = emitter.writer
    table = writer.reshape(emitter.operand(data), shape[axis:])
    picked = writer.one("Gather", table, writer.positions, name=node.output[0], axis=0)
    return [writer.reshape(picked, emitter.meaning.packed_shape(node.output[0]))]


def lower_along_axis(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Softmax and the like: one inner axis, the same shape."""
    default = 0 if node.op_type == "GatherElements" else -1  # the ops' own defaults
    axis = int(emitter.attributes(node, "axis").get("axis", default))
    axis = emitter.inner_axis(node, node.input[0], axis)
    inputs = [emitter.operand(name) for name in node.input]
    return [emitter.writer.one(node.op_type, *inputs, name=node.output[0], axis=axis)]


def lower_tile(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Repeat inner axes whose length is one (an Expand)."""
    repeats = emitter.known(node, 1)
    shape = emitter.meaning.shape(node.input[0])
    assert repeats is not None
    if all(count == 1 for count in repeats):
        return [emitter.operand(node.input[0])]
    if any(count != 1 and dim != 1 for count, dim in zip(repeats, shape, strict=True)):
        raise emitter.fail(node, "it repeats an axis longer than one")
    return lower_expand(emitter, node)
