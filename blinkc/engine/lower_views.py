"""How ONNX operators that only move data become lazy tensors: views, gathers, scatters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from blinkc.engine import indexing
from blinkc.engine import tensors as t
from blinkc.engine.node_reader import NodeReader, constant_from_proto
from blinkc.engine.program import Const, Expr, IndexValue
from blinkc.engine.tensors import Dim, Point, Reader, Tensor, compute, mixes_rows, scalar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def reshape(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    target = r.values(1)
    zero_is_zero = r.attribute("allowzero", 0)
    shape: list[Dim] = [
        x.shape[i] if d == 0 and not zero_is_zero else d for i, d in enumerate(target)
    ]
    if -1 in shape:
        known = math.prod(d for d in shape if isinstance(d, int) and d != -1)
        rows_named = any(isinstance(d, str) for d in shape)
        at = shape.index(-1)
        if x.rows and not rows_named:
            if known != x.size:
                raise mixes_rows(r.label, f"reshaping {x.shape} to {target}")
            shape[at] = x.rows
        else:
            shape[at] = x.size // known
    return [t.reshape(r.label, x, tuple(shape))]


def flatten(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    axis = r.attribute("axis", 1)
    axis = axis + len(x.shape) if axis < 0 else axis
    return [t.reshape(r.label, x, (_merge(x.shape[:axis]), _merge(x.shape[axis:])))]


def _merge(dims: Sequence[Dim]) -> Dim:
    """Return the one dimension that several become; rows beside others fail later."""
    rows = [d for d in dims if isinstance(d, str)]
    return rows[0] if rows else math.prod(d for d in dims if isinstance(d, int))


def squeeze(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    given = r.axes(1)
    if given is None:
        axes = {a for a, d in enumerate(x.shape) if d == 1}
    else:
        axes = {r.axis(a, len(x.shape)) for a in given}
    if any(x.shape[a] != 1 for a in axes):
        raise r.fail(f"cannot squeeze axes {sorted(axes)} of {x.shape}")
    return [t.reshape(r.label, x, tuple(d for a, d in enumerate(x.shape) if a not in axes))]


def unsqueeze(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    axes = r.axes(1) or []
    rank = len(x.shape) + len(axes)
    places = {r.axis(a, rank) for a in axes}
    dims = iter(x.shape)
    return [t.reshape(r.label, x, tuple(1 if a in places else next(dims) for a in range(rank)))]


def transpose(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    axes = [int(a) for a in r.attribute("perm", range(len(x.shape))[::-1])]
    result = t.transpose(r.label, x, axes)
    result.attributes["transpose"] = tuple(axes)
    return [result]


def identity(r: NodeReader) -> Sequence[Tensor]:
    return [r.operand(0)]


def _slice_axis(r: NodeReader, x: Tensor, axis: int, start: int, step: int, count: int) -> Tensor:
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])

    def point_of(point: Point) -> Point:
        along = point[axis]
        assert along is not None
        moved = indexing.add(indexing.scale(along, step), indexing.constant(start))
        return (*point[:axis], moved, *point[axis + 1 :])

    return t.view(r.label, x, shape, point_of)


def slice_op(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    starts, ends = r.integers(1), r.values(2)
    axes = r.integers(3) if r.has(3) else list(range(len(starts)))
    steps = r.integers(4) if r.has(4) else [1] * len(starts)
    for start, end, given, step in zip(starts, ends, axes, steps, strict=True):
        axis = r.axis(given, len(x.shape))
        dim = x.shape[axis]
        if isinstance(dim, str):
            whole = start == 0 and step == 1 and (end == dim or (end != -1 and _is_huge(end)))
            if not whole:
                raise mixes_rows(r.label, "slicing along the token axis")
            continue
        if isinstance(end, str):
            raise r.fail("the end of a slice depends on the number of tokens")
        picked = range(dim)[slice(start, end if end > -(2**31) else None, step)]
        if len(picked) != dim or step != 1:
            x = _slice_axis(r, x, axis, picked.start, step, len(picked))
    return [x]


def _is_huge(end: Dim) -> bool:
    return isinstance(end, int) and end >= 2**31 - 1


def split(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    axis = r.axis(r.attribute("axis", 0), len(x.shape))
    dim = x.shape[axis]
    if isinstance(dim, str):
        raise mixes_rows(r.label, "splitting along the token axis")
    if r.has(1):
        sizes = r.integers(1)
    elif r.attribute("split") is not None:
        sizes = [int(s) for s in r.attribute("split")]
    else:
        count = r.attribute("num_outputs", len(r.node.output))
        chunk = -(-dim // count)
        sizes = [min(chunk, dim - i * chunk) for i in range(count)]
    starts = np.cumsum([0, *sizes]).tolist()
    if starts[-1] != dim:
        raise r.fail(f"parts {sizes} do not add up to {dim}")
    pairs = zip(starts[:-1], sizes, strict=True)
    return [_slice_axis(r, x, axis, start, 1, size) for start, size in pairs]


def concat(r: NodeReader) -> Sequence[Tensor]:
    parts = [r.operand(i) for i in range(len(r.operands))]
    axis = r.axis(r.attribute("axis"), len(parts[0].shape))
    return [t.concat(r.label, parts, axis)]


def expand(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    shape = t.broadcast(r.label, [x.shape, tuple(r.values(1))])
    return [t.expand(r.label, x, shape)]


def tile(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    for axis, count in enumerate(r.integers(1)):
        if count == 1:
            continue
        if isinstance(x.shape[axis], str):
            raise mixes_rows(r.label, "repeating the token axis")
        x = t.concat(r.label, [x] * count, axis) if count else x
    return [x]


def gather(r: NodeReader) -> Sequence[Tensor]:
    data, indices = r.operand(0), r.operand(1)
    axis = r.axis(r.attribute("axis", 0), len(data.shape))
    if indices.array is not None and indices.array.dtype != object and indices.array.size == 1:
        return [_pick(r, data, indices, axis)]
    return [t.gather(r.label, data, indices, axis)]


def _pick(r: NodeReader, data: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Gather one known position: a slice."""
    assert indices.array is not None
    at, dim = int(indices.array.reshape(-1)[0]), data.shape[axis]
    if isinstance(dim, str):
        raise mixes_rows(r.label, "picking one token")
    sliced = _slice_axis(r, data, axis, at % dim, 1, 1)
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return t.reshape(r.label, sliced, shape)


def gather_elements(r: NodeReader) -> Sequence[Tensor]:
    data, indices = r.operand(0), r.operand(1)
    axis = r.axis(r.attribute("axis", 0), len(data.shape))
    limit = data.shape[axis]
    if isinstance(limit, str) or indices.row_axis != data.row_axis:
        raise mixes_rows(r.label, "picking elements along the token axis")

    def element(reader: Reader, point: Point) -> Expr:
        picked = t.index_of(reader.element(indices, point), limit)
        return reader.element(data, (*point[:axis], picked, *point[axis + 1 :]))

    return [Tensor("", indices.shape, data.dtype, "view", (data, indices), element, node=r.label)]


def gather_nd(r: NodeReader) -> Sequence[Tensor]:
    """GatherND whose index picks along the first axis only, as `h[rows]` is exported."""
    data, indices = r.operand(0), r.operand(1)
    if r.attribute("batch_dims", 0) or indices.shape[-1] != 1:
        raise r.fail("only GatherND along the first axis is supported", "use Gather")
    flat = t.reshape(r.label, indices, indices.shape[:-1])
    return [t.gather(r.label, data, flat, 0)]


def scatter_elements(r: NodeReader) -> Sequence[Tensor]:
    data, indices, updates = (r.operand(i) for i in range(3))
    axis = r.axis(r.attribute("axis", 0), len(data.shape))
    if isinstance(data.shape[axis], str):
        raise mixes_rows(r.label, "scattering along the token axis")
    if indices.rows and not data.rows:  # a constant to start from: give it the token axis
        at = indices.row_axis
        shape = tuple(indices.shape[at] if a == at else d for a, d in enumerate(data.shape))
        data = t.expand(r.label, data, shape)
    reduction = r.attribute("reduction", b"none")
    accumulate = reduction.decode() if isinstance(reduction, bytes) else reduction
    attributes = {"axis": axis, "accumulate": accumulate}
    return [
        Tensor(
            "", data.shape, data.dtype, "scatter", (data, indices, updates), node=r.label,
            attributes=attributes,
        )
    ]  # fmt: skip


def one_hot(r: NodeReader) -> Sequence[Tensor]:
    indices, depth = r.operand(0), r.integers(1)[0]
    axis = r.axis(r.attribute("axis", -1), len(indices.shape) + 1)
    off, on = (_pick(r, r.operand(2), t.constant(np.array(i)), 0) for i in (0, 1))
    shape = (*indices.shape[:axis], 1, *indices.shape[axis:])
    place = t.reshape(r.label, indices, shape)
    negative = compute(r.label, "lt", [place, scalar(0, "int32")], "bool")
    wrapped = compute(r.label, "add", [place, scalar(depth, "int32")], "int32")
    place = compute(r.label, "where", [negative, wrapped, place], "int32")
    count = [depth if a == axis else 1 for a in range(len(shape))]
    steps = counting(tuple(count), axis)
    hit = compute(r.label, "eq", [place, steps], "bool")
    return [compute(r.label, "where", [hit, on, off], on.dtype)]


def counting(shape: tuple[int, ...], axis: int) -> Tensor:
    """Return 0, 1, 2, ... along an axis, without a table."""

    def element(_: Reader, point: Point) -> Expr:
        index = point[axis]
        assert index is not None
        return IndexValue(index)

    return Tensor("", shape, "int32", "view", (), element)


def constant_of_shape(r: NodeReader) -> Sequence[Tensor]:
    value = r.attribute("value")
    fill = constant_from_proto(value) if value is not None else scalar(0.0, "fp32")
    assert fill.array is not None
    fill.array = fill.array.reshape(())
    fill.shape = ()
    shape: tuple[Dim, ...] = tuple(r.values(0))
    number = Const(fill.array.item(), fill.dtype)
    return [Tensor("", shape, fill.dtype, "view", (), lambda _reader, _point: number)]


def constant(r: NodeReader) -> Sequence[Tensor]:
    for attribute in r.node.attribute:
        if attribute.name == "value":
            return [constant_from_proto(attribute.t)]
        value = r.attribute(attribute.name)
        floats = attribute.name.startswith("value_float")
        return [t.constant(np.array(value, np.float32 if floats else np.int64))]
    raise r.fail("a constant without a value")


def shape_of(r: NodeReader) -> Sequence[Tensor]:
    dims = r.operand(0).shape
    dims = dims[slice(r.attribute("start", 0), r.attribute("end", None))]
    symbolic = any(isinstance(d, str) for d in dims)
    return [t.constant(np.array(dims, dtype=object if symbolic else np.int64))]


def range_op(r: NodeReader) -> Sequence[Tensor]:
    raise mixes_rows(r.label, "a Range whose length is the number of tokens")


def is_inf(r: NodeReader) -> Sequence[Tensor]:
    x = r.operand(0)
    size = compute(r.label, "abs", [x], x.dtype)
    return [compute(r.label, "eq", [size, scalar(math.inf, x.dtype)], "bool")]


HANDLERS: dict[str, Callable[[NodeReader], Sequence[Tensor]]] = {
    "Reshape": reshape,
    "Flatten": flatten,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Transpose": transpose,
    "Identity": identity,
    "Dropout": identity,
    "Slice": slice_op,
    "Split": split,
    "Concat": concat,
    "Expand": expand,
    "Tile": tile,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "ScatterElements": scatter_elements,
    "OneHot": one_hot,
    "ConstantOfShape": constant_of_shape,
    "Constant": constant,
    "Shape": shape_of,
    "Range": range_op,
    "IsInf": is_inf,
}

__all__ = ["HANDLERS"]
