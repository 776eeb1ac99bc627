"""Builds one row kernel: chooses what is stored and what is nested, then writes its statements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blinkc.engine import indexing
from blinkc.engine import tensors as t
from blinkc.engine.indexing import Domain, find_tile
from blinkc.engine.program import (
    Apply,
    Const,
    Constant,
    Expr,
    Index,
    IndexValue,
    Load,
    Map,
    Reduce,
    RowKernel,
    Scan,
    Statement,
    Store,
    Temporary,
    TopK,
    reads,
)
from blinkc.engine.tensors import MustStore, Point, Reader, Split, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALWAYS_STORED = ("reduce", "topk", "scan", "scatter")


class ConstantPool:
    """The tables of a program, each once."""

    def __init__(self) -> None:
        self._by_content: dict[tuple[str, bytes], Constant] = {}

    def load(self, array: np.ndarray, index: Index) -> Load:
        """Return a load from the table that holds `array`, flat."""
        if array.dtype == np.bool_:
            dtype, flat = "bool", array.reshape(-1)
        elif np.issubdtype(array.dtype, np.integer):
            clipped = np.clip(array, -(2**31), 2**31 - 1)
            dtype, flat = "int32", clipped.astype(np.int32).reshape(-1)
        else:
            dtype, flat = "fp32", array.astype(np.float32).reshape(-1)
        key = (dtype, flat.tobytes())
        if key not in self._by_content:
            name = f"c{len(self._by_content)}"
            self._by_content[key] = Constant(name=name, dtype=dtype, array=flat)
        return Load(self._by_content[key].name, index, dtype)

    def constants(self) -> tuple[Constant, ...]:
        """Return all tables."""
        return tuple(self._by_content.values())

    def names(self) -> set[str]:
        """Return the tables' names."""
        return {c.name for c in self._by_content.values()}


def build_row_kernel(
    name: str,
    rows: str,
    targets: Sequence[tuple[Tensor, tuple[str, ...]]],
    available: Mapping[int, str],
    constants: ConstantPool,
) -> RowKernel:
    """Build the kernel that computes `targets` and writes each to its buffers.

    Args:
        name: of the kernel.
        rows: its row dimension.
        targets: tensors and the row buffers that receive them.
        available: row buffers written before, by identity of the tensor they hold.
        constants: pool shared by the program's kernels.
    """
    forced: set[int] = set()
    while True:
        try:
            return _Builder(rows, targets, available, constants, forced).build(name)
        except MustStore as request:
            forced.add(id(request.tensor))


class _Builder(Reader):
    def __init__(
        self,
        rows: str,
        targets: Sequence[tuple[Tensor, tuple[str, ...]]],
        available: Mapping[int, str],
        constants: ConstantPool,
        forced: set[int],
    ) -> None:
        self.rows = rows
        self.available = available
        self.constants = constants
        self.outputs = {id(x): buffers for x, buffers in targets}
        self.order = self._needed([x for x, _ in targets])
        self.stored = self._choose_stored(forced)
        self.temporaries: dict[int, Temporary] = {}
        self.written: set[int] = set()  # tensors whose temporary is complete
        self.body: list[Statement] = []

    def build(self, name: str) -> RowKernel:
        read_here = self._read_here()
        for x in self.order:
            if id(x) not in self.stored or id(x) in self.written:
                continue
            if id(x) in read_here:
                self._temporary(x)
            self._emit(x)
            self.written.add(id(x))
        read = {b for statement in self.body for b in reads(statement)}
        temporaries = tuple(self.temporaries.values())
        own = {b for buffers in self.outputs.values() for b in buffers}
        row_buffers = read & set(self.available.values())
        return RowKernel(
            name=name,
            rows=self.rows,
            inputs=tuple(sorted(row_buffers)),
            outputs=tuple(sorted(own)),
            params=tuple(sorted(read - row_buffers - {x.name for x in temporaries})),
            temporaries=temporaries,
            body=tuple(self.body),
        )

    def _needed(self, roots: list[Tensor]) -> list[Tensor]:
        """Return the tensors to compute here, inputs first; buffers and constants end the walk."""
        order: list[Tensor] = []
        seen: set[int] = set()
        stack = [(root, False) for root in reversed(roots)]
        while stack:
            x, done = stack.pop()
            if done:
                order.append(x)
            elif (
                id(x) not in seen
                and id(x) not in self.available
                and x.kind
                not in (
                    "source",
                    "constant",
                )
            ):
                seen.add(id(x))
                stack.append((x, True))
                stack.extend((i, False) for i in reversed(x.inputs))
        return order

    def _choose_stored(self, forced: set[int]) -> set[int]:
        """Store what must be, what is read twice, and what each broadcast copy would redo."""
        stored = set(forced) | set(self.outputs)
        uses: dict[int, int] = {}
        for x in reversed(self.order):
            count = uses.get(id(x), 0)
            costs = x.kind == "compute" and x.attributes.get("op") != "cast" and bool(x.rows)
            if x.kind in ALWAYS_STORED or (costs and count > 1):
                stored.add(id(x))
            times = 1 if id(x) in stored else count
            for source in x.inputs:
                again = x.kind == "topk" or (
                    x.size > source.size and not x.attributes.get("disjoint")
                )
                uses[id(source)] = uses.get(id(source), 0) + times * (2 if again else 1)
        return stored

    def _read_here(self) -> set[int]:
        """Return the tensors that some other tensor of this kernel reads."""
        return {id(i) for x in self.order for i in x.inputs} | {
            id(x.attributes["twin"]) for x in self.order if x.kind == "topk"
        }

    def _temporary(self, x: Tensor) -> Temporary:
        if id(x) not in self.temporaries:
            temporary = Temporary(name=f"t{len(self.temporaries)}", size=x.size, dtype=x.dtype)
            self.temporaries[id(x)] = temporary
        return self.temporaries[id(x)]

    # Reading.

    def element(self, tensor: Tensor, point: Point) -> Expr:
        if tensor.kind == "constant":
            return self._constant(tensor, point)
        if id(tensor) in self.written and id(tensor) in self.temporaries:
            return t.load(self.temporaries[id(tensor)].name, tensor, point)
        if id(tensor) in self.available:
            return t.load(self.available[id(tensor)], tensor, point)
        if tensor.kind == "source":
            return t.load(tensor.name, tensor, point)
        if tensor.element is None:
            raise MustStore(tensor)
        return tensor.element(self, point)

    def _constant(self, tensor: Tensor, point: Point) -> Expr:
        array = tensor.array
        assert array is not None
        first = array.reshape(-1)[0].item() if array.size else 0
        if array.size == 1 or np.all(array == array.reshape(-1)[0]):
            return Const(first, tensor.dtype)
        inner, _ = t.inner_point(tensor, point)
        index = indexing.linearize(inner, tensor.inner_shape)
        if tensor.dtype == "int32":
            if np.array_equal(array.reshape(-1), np.arange(array.size)):
                return IndexValue(index)
            if not index.terms:
                return Const(array.reshape(-1)[index.const].item(), "int32")
        load = self.constants.load(array, index)
        return load if load.dtype == tensor.dtype else Apply("cast", (load,), tensor.dtype)

    # Writing.

    def _stores(self, x: Tensor, point: Sequence[Index]) -> tuple[Store, ...]:
        index = indexing.linearize(point, x.inner_shape)
        names = list(self.outputs.get(id(x), ()))
        if id(x) in self.temporaries:
            names.insert(0, self.temporaries[id(x)].name)
        return tuple(Store(name, index, x.dtype) for name in names)

    def _emit(self, x: Tensor) -> None:
        if x.kind == "reduce":
            self._emit_reduce(x)
        elif x.kind == "topk":
            self._emit_topk(x)
        elif x.kind == "scan":
            self._emit_scan(x)
        elif x.kind == "scatter":
            self._emit_scatter(x)
        else:
            assert x.element is not None
            self._emit_map(x, x, Domain.over(x.inner_shape))

    def _emit_map(self, x: Tensor, source: Tensor, domain: Domain) -> None:
        """Write `source`, element by element, to where `x` is stored."""
        try:
            point = source.full_point(domain.point)
            if source is x:
                assert x.element is not None
                expr = x.element(self, point)
            else:
                expr = self.element(source, point)
        except Split as split:
            for half in domain.split(split.position, split.at):
                self._emit_map(x, source, half)
            return
        tile = find_tile(expr)
        if tile:
            self._emit_map(x, source, domain.tile(*tile))
            return
        self.body.append(Map(domain.extents, expr, self._stores(x, domain.point)))

    def _emit_reduce(self, x: Tensor) -> None:
        source = x.inputs[0]
        axes = {
            a if source.row_axis is None or a < source.row_axis else a - 1
            for a in x.attributes["axes"]
        }
        shape = source.inner_shape
        kept = [a for a in range(len(shape)) if a not in axes]
        outer = Domain.over([shape[a] for a in kept])
        inner = Domain.over([shape[a] for a in sorted(axes)], first=len(outer.extents))
        by_axis = dict(zip(kept, outer.point, strict=True))
        by_axis |= dict(zip(sorted(axes), inner.point, strict=True))
        point = tuple(by_axis[a] for a in range(len(shape)))
        domain = Domain((*outer.extents, *inner.extents), point)
        self._emit_reduce_over(x, domain, len(outer.extents), kept)

    def _emit_reduce_over(self, x: Tensor, domain: Domain, num_outer: int, kept: list[int]) -> None:
        source = x.inputs[0]
        try:
            expr = self.element(source, source.full_point(domain.point))
        except Split as split:
            if split.position >= num_outer:
                raise MustStore(source) from None
            for half in domain.split(split.position, split.at):
                self._emit_reduce_over(x, half, num_outer, kept)
            return
        tile = find_tile(expr)
        if tile:
            grown = num_outer + (tile[0] < num_outer)
            self._emit_reduce_over(x, domain.tile(*tile), grown, kept)
            return
        outer = [domain.point[a] for a in kept]
        if x.attributes["keepdims"]:
            result = Tensor("", x.shape, "", "").inner_shape
            places = iter(outer)
            outer = [next(places) if a in kept else Index() for a in range(len(result))]
        self.body.append(
            Reduce(
                domain.extents[:num_outer],
                domain.extents[num_outer:],
                x.attributes["op"],
                expr,
                self._stores(x, outer),
            )
        )

    def _along(self, x: Tensor, axis: int) -> tuple[Domain, int, tuple[Index, ...]]:
        """Return a domain over all axes but one, that axis's inner position, and the point."""
        source = x.inputs[0]
        row = source.row_axis
        inner_axis = axis if row is None or axis < row else axis - 1
        shape = list(source.inner_shape)
        length = shape.pop(inner_axis)
        outer = Domain.over(shape)
        # a loop of one step still has its variable here: ranks and candidates are always counted
        along = indexing.var(len(outer.extents), length)
        point = (*outer.point[:inner_axis], along, *outer.point[inner_axis:])
        return outer, inner_axis, point

    def _whole(self, source: Tensor, point: Sequence[Index]) -> Expr:
        try:
            return self.element(source, source.full_point(point))
        except Split:
            raise MustStore(source) from None

    def _emit_topk(self, x: Tensor) -> None:
        source, twin = x.inputs[0], x.attributes["twin"]
        count = int(x.attributes["k"])
        outer, axis, point = self._along(x, x.attributes["axis"])
        expr = self._whole(source, point)
        if not is_cheap(expr):
            raise MustStore(source)
        rank = indexing.var(len(outer.extents), count)
        place = (*point[:axis], rank, *point[axis + 1 :])
        parts = {x.attributes["part"]: x}
        if id(twin) in self.stored and any(twin is y for y in self.order):
            parts[twin.attributes["part"]] = twin
            if id(twin) in self._read_here():
                self._temporary(twin)
            self.written.add(id(twin))
        values, indices = (
            self._stores(parts[part], place) if part in parts else ()
            for part in ("values", "indices")
        )
        length = int(source.shape[x.attributes["axis"]])
        self.body.append(TopK(outer.extents, length, count, expr, values, indices))

    def _emit_scan(self, x: Tensor) -> None:
        source = x.inputs[0]
        outer, _, point = self._along(x, x.attributes["axis"])
        expr = self._whole(source, point)
        length = int(source.shape[x.attributes["axis"]])
        self.body.append(
            Scan(
                outer.extents,
                length,
                expr,
                self._stores(x, point),
                x.attributes["exclusive"],
                x.attributes["reverse"],
            )
        )

    def _emit_scatter(self, x: Tensor) -> None:
        data, indices, updates = x.inputs
        self._emit_map(x, data, Domain.over(data.inner_shape))
        axis = x.attributes["axis"]
        domain = Domain.over(indices.inner_shape)
        place = indices.full_point(domain.point)
        picked = t.index_of(self._whole(indices, domain.point), x.shape[axis])
        inner, _ = t.inner_point(x, (*place[:axis], picked, *place[axis + 1 :]))
        value = self._whole(updates, domain.point)
        stores = self._stores(x, inner)
        self.body.append(Map(domain.extents, value, stores, True, x.attributes["accumulate"]))


def is_cheap(expr: Expr) -> bool:
    """Say whether an expression is one plain load or number, cheap to evaluate again."""
    return isinstance(expr, Load | Const | IndexValue)
