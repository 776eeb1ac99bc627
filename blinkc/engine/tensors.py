"""Tensors of a segment seen lazily: each knows how one of its elements is computed from its inputs.

A tensor's shape may hold one row dimension, `TOKENS` or `SAMPLES`, at any axis; the rest is static.
An element is asked for by a full-rank point whose entry at the row axis is None (the kernel's own
row) or a row index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkc.engine import indexing
from blinkc.engine.program import Apply, Const, Expr, Index, IndexValue, Load
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOKENS = "tokens"
SAMPLES = "samples"

Dim = int | str
Point = tuple[Index | None, ...]
Element = "Callable[[Reader, Point], Expr]"


class Split(Exception):
    """A concat needs its consumer's loop `position` cut at `at`."""

    def __init__(self, position: int, at: int) -> None:
        super().__init__()
        self.position = position
        self.at = at


class MustStore(Exception):
    """A tensor cannot be read inside an expression and has to be stored first."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


class Reader:
    """Turns elements of tensors into expressions; kernels say which tensors lie in buffers."""

    def element(self, tensor: Tensor, point: Point) -> Expr:
        """Return the expression of one element."""
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class Tensor:
    """One value of the segment.

    kind: "source" (input or weight: a buffer), "constant", "view" (only index arithmetic),
    "compute" (elementwise), "reduce", "topk", "scan", "scatter" (always stored) or "gemm".
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    kind: str
    inputs: tuple[Tensor, ...] = ()
    element: Callable[[Reader, Point], Expr] | None = field(default=None, repr=False)
    array: np.ndarray | None = field(default=None, repr=False)
    keeps_layout: bool = False  # a view whose flat row is its input's flat row
    foreign_rows: bool = False  # reads inputs[0] at rows given by data
    node: str = ""  # for messages
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def row_axis(self) -> int | None:
        """Axis of the row dimension, or None."""
        for axis, dim in enumerate(self.shape):
            if isinstance(dim, str):
                return axis
        return None

    @property
    def rows(self) -> str:
        """The row dimension, or "" when the tensor is the same for all rows."""
        axis = self.row_axis
        return "" if axis is None else str(self.shape[axis])

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The static dimensions, in order."""
        return tuple(dim for dim in self.shape if isinstance(dim, int))

    @property
    def size(self) -> int:
        """Elements for each row."""
        return prod(self.inner_shape)

    def full_point(self, inner: Sequence[Index], row: Index | None = None) -> Point:
        """Put a row entry into a point of `inner_shape`."""
        axis = self.row_axis
        if axis is None:
            return tuple(inner)
        return (*inner[:axis], row, *inner[axis:])


def inner_point(tensor: Tensor, point: Point) -> tuple[tuple[Index, ...], Index | None]:
    """Split a full point into its static part and its row entry."""
    axis = tensor.row_axis
    row = None if axis is None else point[axis]
    inner = tuple(i for k, i in enumerate(point) if k != axis)
    return tuple(i for i in inner if i is not None), row


def fail(node: str, message: str, hint: str = "") -> BlinkError:
    """Make the error of a node that cannot be lowered."""
    return BlinkError(f"{node}: {message}", hint=hint or "rewrite this part of the model per token")


def mixes_rows(node: str, how: str) -> BlinkError:
    """Make the error of a node that would mix tokens outside a cut op."""
    return fail(
        node,
        f"{how} mixes tokens with each other",
        "only the cut ops (blink::PagedAttention, MoeExperts, Sample) may do that; "
        "cut the model so that this node is inside one",
    )


def constant(value: np.ndarray, name: str = "") -> Tensor:
    """Wrap a known array; integers are held as int32."""
    array = np.asarray(value)
    if array.dtype == np.bool_:
        dtype = "bool"
    elif np.issubdtype(array.dtype, np.integer) or array.dtype == object:
        dtype = "int32"
    else:
        dtype = "fp32"
        array = array.astype(np.float32)
    shape: tuple[Dim, ...] = tuple(array.shape)
    return Tensor(name, shape, dtype, "constant", array=array)


def scalar(value: float, dtype: str) -> Tensor:
    """Wrap one number of a given type."""
    tensor = constant(np.array(value, dtype=np.float64 if dtype != "int32" else np.int64))
    tensor.dtype = dtype
    return tensor


def broadcast(node: str, shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """Return the common shape of elementwise operands, numpy's rule with row dimensions."""
    rank = max(len(shape) for shape in shapes)
    result: list[Dim] = []
    for axis in range(-rank, 0):
        dims = {shape[axis] for shape in shapes if len(shape) >= -axis} - {1}
        if len(dims) > 1:
            if any(isinstance(dim, str) for dim in dims):
                raise mixes_rows(node, f"broadcasting {sorted(map(str, dims))}")
            raise fail(node, f"shapes {shapes} do not broadcast")
        result.append(dims.pop() if dims else 1)
    if sum(isinstance(dim, str) for dim in result) > 1:
        raise mixes_rows(node, f"broadcasting to {result}")
    return tuple(result)


def broadcast_point(tensor: Tensor, point: Point) -> Point:
    """Return the point of `tensor` that broadcasting reads for `point` of the result."""
    rank = len(tensor.shape)
    tail = point[len(point) - rank :]
    return tuple(Index() if dim == 1 else i for dim, i in zip(tensor.shape, tail, strict=True))


def compute(node: str, op: str, inputs: Sequence[Tensor], dtype: str, name: str = "") -> Tensor:
    """Apply an elementwise operation of `program.OPS`, with broadcasting."""
    shape = broadcast(node, [t.shape for t in inputs])
    operands = tuple(inputs)

    def element(reader: Reader, point: Point) -> Expr:
        args = tuple(reader.element(t, broadcast_point(t, point)) for t in operands)
        return Apply(op, args, dtype)

    return Tensor(
        name, shape, dtype, "compute", operands, element, node=node, attributes={"op": op}
    )


def view(
    node: str,
    source: Tensor,
    shape: tuple[Dim, ...],
    point_of: Callable[[Point], Point],
    *,
    keeps_layout: bool = False,
) -> Tensor:
    """Make a tensor whose elements are elements of `source` at computed points."""

    def element(reader: Reader, point: Point) -> Expr:
        return reader.element(source, point_of(point))

    return Tensor(
        "", shape, source.dtype, "view", (source,), element, keeps_layout=keeps_layout, node=node
    )


def cast(node: str, source: Tensor, dtype: str) -> Tensor:
    """Change the number type; nothing when it is the same already."""
    if source.dtype == dtype:
        return source
    if source.array is not None and source.array.dtype != object:
        kinds = {"bool": np.bool_, "int32": np.int64}
        result = constant(source.array.astype(kinds.get(dtype, np.float32)))
        result.dtype = dtype
        return result
    return compute(node, "cast", [source], dtype)


def expand(node: str, source: Tensor, shape: tuple[Dim, ...]) -> Tensor:
    """Broadcast to `shape`."""
    if source.shape == shape:
        return source

    def point_of(point: Point) -> Point:
        return broadcast_point(source, point)

    return view(node, source, shape, point_of)


def reshape(node: str, source: Tensor, shape: tuple[Dim, ...]) -> Tensor:
    """Reshape; the row dimension may move only across dimensions of size 1."""
    if source.shape == shape:
        return source
    result = Tensor("", shape, source.dtype, "view")
    old, new = source.row_axis, result.row_axis
    if prod(source.inner_shape) != prod(result.inner_shape) or source.rows != result.rows:
        raise fail(node, f"cannot reshape {source.shape} to {shape}")
    if old is not None and new is not None:
        before = prod(d for d in source.shape[:old] if isinstance(d, int))
        if before != prod(d for d in shape[:new] if isinstance(d, int)):
            raise mixes_rows(node, f"reshaping {source.shape} to {shape}")

    def point_of(point: Point) -> Point:
        inner, row = inner_point(result, point)
        flat = indexing.linearize(inner, result.inner_shape)
        return source.full_point(indexing.delinearize(flat, source.inner_shape), row)

    return view(node, source, shape, point_of, keeps_layout=True)


def transpose(node: str, source: Tensor, axes: Sequence[int]) -> Tensor:
    """Permute axes."""
    shape = tuple(source.shape[a] for a in axes)
    moved = [a for a in axes if isinstance(source.shape[a], int) and source.shape[a] != 1]

    def point_of(point: Point) -> Point:
        result: list[Index | None] = [None] * len(axes)
        for position, axis in enumerate(axes):
            result[axis] = point[position]
        return tuple(result)

    return view(node, source, shape, point_of, keeps_layout=moved == sorted(moved))


def concat(node: str, parts: Sequence[Tensor], axis: int) -> Tensor:
    """Join along a static axis; readers cut their loops at the seams."""
    if len(parts) == 1:
        return parts[0]
    sizes: list[int] = []
    for part in parts:
        dim = part.shape[axis]
        if isinstance(dim, str):
            raise mixes_rows(node, "concatenating along the token axis")
        sizes.append(dim)
    others = [(*part.shape[:axis], 1, *part.shape[axis + 1 :]) for part in parts]
    shape = list(broadcast(node, others))
    shape[axis] = sum(sizes)
    seams = np.cumsum([0, *sizes]).tolist()

    def element(reader: Reader, point: Point) -> Expr:
        along = point[axis]
        assert along is not None
        low, high = indexing.bounds(along)
        for part, start, end in zip(parts, seams[:-1], seams[1:], strict=True):
            if start <= low and high < end:
                moved = indexing.add(along, indexing.constant(-start))
                return reader.element(part, (*point[:axis], moved, *point[axis + 1 :]))
        if len(along.terms) == 1 and along.terms[0][1] == 1:
            atom = along.terms[0][0]
            if type(atom).__name__ == "Var":
                seam = next(s for s in seams if low < s <= high)
                raise Split(atom.position, seam - along.const)  # type: ignore[union-attr]
        raise MustStore(result)

    result = Tensor("", tuple(shape), parts[0].dtype, "view", tuple(parts), element, node=node)
    result.attributes["disjoint"] = True  # each element reads one part: nothing is read twice
    return result


def reduce(node: str, source: Tensor, op: str, axes: Sequence[int], *, keepdims: bool) -> Tensor:
    """Combine along static axes: "sum", "prod", "max" or "min"."""
    if any(isinstance(source.shape[a], str) for a in axes):
        raise mixes_rows(node, "a reduction along the token axis")
    shape = tuple(
        1 if a in axes else d for a, d in enumerate(source.shape) if keepdims or a not in axes
    )
    return Tensor(
        "", shape, source.dtype, "reduce", (source,), node=node,
        attributes={"op": op, "axes": tuple(axes), "keepdims": keepdims},
    )  # fmt: skip


def gather(node: str, data: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Gather slices of `data` along `axis`; along the token axis only by a sample's row number."""
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    limit = data.shape[axis]
    rank = len(indices.shape)
    foreign = isinstance(limit, str)
    if foreign and (not indices.rows or indices.rows == limit):
        raise mixes_rows(node, "gathering along the token axis")
    if not foreign and data.rows and indices.rows:
        raise mixes_rows(node, "gathering with an index that has tokens too")

    def element(reader: Reader, point: Point) -> Expr:
        picked = reader.element(indices, point[axis : axis + rank])
        return reader.element(data, (*point[:axis], index_of(picked, limit), *point[axis + rank :]))

    if foreign:
        return Tensor(
            "", shape, data.dtype, "view", (data, indices), element, foreign_rows=True, node=node
        )
    return Tensor("", shape, data.dtype, "view", (data, indices), element, node=node)


def index_of(expr: Expr, limit: Dim) -> Index:
    """Turn an integer expression into an index below `limit`."""
    if isinstance(expr, IndexValue):
        return expr.index
    bound = limit if isinstance(limit, int) else 0
    if isinstance(expr, Const):
        value = int(expr.value)
        return indexing.constant(value + bound if value < 0 else value)
    return indexing.gathered(expr, bound)


def load(buffer: str, tensor: Tensor, point: Point) -> Load:
    """Read an element of a tensor that lies in `buffer`, flat."""
    inner, row = inner_point(tensor, point)
    return Load(buffer, indexing.linearize(inner, tensor.inner_shape), tensor.dtype, row)
