"""What a row kernel is like, for CUDA: which loops vectorize, what may be spread over blocks, where
barriers stand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from blinkc.engine.cuda_row_indices import is_contiguous, mentions, places
from blinkc.engine.program import (
    Apply,
    Expr,
    Load,
    Map,
    Program,
    Reduce,
    RowKernel,
    Scan,
    Statement,
    Store,
    TopK,
    index_exprs,
    loads,
    reads,
    stores,
    writes,
)
from blinkc.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence


def num_points(extents: Sequence[int]) -> int:
    """Return how many points a loop nest has."""
    return math.prod(extents)


def is_heavy(expr: Expr) -> bool:
    """Say whether an expression holds a function of hundreds of instructions; never unrolled."""
    if isinstance(expr, Apply):
        return expr.op in ("sin", "cos", "pow") or any(is_heavy(arg) for arg in expr.args)
    return False


class RowFacts:
    """Names and buffers of one row kernel, and questions about its statements."""

    def __init__(self, program: Program, kernel: RowKernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.values = {
            v.name: v for v in (*program.inputs, *program.outputs, *program.intermediates)
        }
        self.weights = {w.name: w for w in program.weights}
        self.constants = {c.name: c for c in program.constants}
        self.temporaries = {t.name: t for t in kernel.temporaries}
        used = {load.buffer for s in kernel.body for load in self._all_loads(s)}
        used |= {store.buffer for s in kernel.body for store in stores(s)}
        self.names: dict[str, str] = {}
        for prefix, group in (("v", self.values), ("w", self.weights), ("t", self.temporaries)):
            for number, buffer in enumerate(n for n in group if n in used):
                self.names[buffer] = f"{prefix}{number}"
        self.used_constants = [c for c in self.constants if c in used]
        for number, buffer in enumerate(self.used_constants):
            self.names[buffer] = f"{name}_c{number}"
        self.arguments = tuple(
            buffer for buffer in self.names if buffer in self.values or buffer in self.weights
        )
        self.written = {store.buffer for s in kernel.body for store in stores(s)}

    @staticmethod
    def _all_loads(statement: Statement) -> list[Load]:
        found = list(loads(statement.expr))
        for store in stores(statement):
            found += [x for e in _index_loads(store) for x in loads(e)]
        return found

    def _work_items(self, s: Statement) -> int:
        """Return how many threads a statement can keep busy, each with one vector."""
        points = num_points(s.extents)
        if isinstance(s, Reduce):
            inner = num_points(s.reduce_extents)
            width = self._reduce_width(s)
            per_point = {"block": inner // self._vector_width(s), "warp": 32, "thread": 1}[width]
            return points * max(per_point, 1)
        if isinstance(s, Map) and not s.sequential:
            return max(points // self._vector_width(s), 1)
        return points * 32 if isinstance(s, TopK) else points

    def _vector_width(self, s: Map | Reduce) -> int:
        """Return how many neighbours along its last loop a thread of a statement takes at once."""
        if isinstance(s, Map) and (s.accumulate != "none" or s.sequential):
            return 1
        if is_heavy(s.expr):
            return 1
        axes = s.reduce_extents if isinstance(s, Reduce) else s.extents
        if not axes:
            return 1
        position = len(s.extents) + len(axes) - 1 if isinstance(s, Reduce) else len(axes) - 1
        lanes = 32 if isinstance(s, Reduce) and self._reduce_width(s) == "warp" else 1
        for width in (8, 4):
            fits = axes[-1] % width == 0 and num_points(axes) // width >= lanes
            if fits and self._mostly_contiguous(s, position, width):
                return width
        return 1

    def _mostly_contiguous(self, s: Map | Reduce, position: int, width: int) -> bool:
        moved: list[Load | Store] = list(loads(s.expr))
        moved += () if isinstance(s, Reduce) else s.stores
        accesses = [self._is_vector(x, position, width) for x in moved]
        known = [x for x in accesses if x is not None]
        return sum(known) * 2 > len(known)

    def _is_vector(self, x: Load | Store, position: int, width: int) -> bool | None:
        """Say whether an access moves neighbours as one vector; None where the loop does not move
        it."""
        row = x.row if isinstance(x, Load) else None
        if not mentions(x.index, position) and (row is None or not mentions(row, position)):
            return None
        if x.buffer in self.constants or (row is not None and mentions(row, position)):
            return False
        if x.buffer in self.values and self.values[x.buffer].size % width:
            return False
        if self._dtype(x.buffer) == "bool":
            return False
        return is_contiguous(x.index, position, width)

    def _dtype(self, buffer: str) -> str:
        """Return what a buffer is stored in."""
        for group in (self.values, self.weights, self.temporaries, self.constants):
            if buffer in group:
                return str(group[buffer].dtype)
        raise InternalError(f"row kernel {self.kernel.name} names an unknown buffer {buffer}")

    def _can_spread(self) -> bool:
        """Say whether statements are independent, so that blocks may share their points."""
        if self.temporaries:
            return False
        for s in self.kernel.body:
            if not isinstance(s, Map | Reduce) or (isinstance(s, Map) and s.sequential):
                return False
            if isinstance(s, Reduce) and self._reduce_width(s) == "block":
                return False
            if reads(s) & self.written:
                return False
        return not self._stores_meet()

    def _stores_meet(self) -> bool:
        """Say whether two statements write the same place, so that their order matters."""
        body = self.kernel.body
        return any(_meet(a, b) for i, b in enumerate(body) for a in body[:i])

    def _levels(self) -> list[list[Statement]]:
        """Group the statements so that those of one level do not touch each other's results."""
        body = self.kernel.body
        level: list[int] = []
        for i, late in enumerate(body):
            needs = -1
            for early, at in zip(body[:i], level, strict=True):
                touches = (reads(late) & writes(early)) | (writes(late) & reads(early))
                if touches or _meet(early, late):
                    needs = max(needs, at)
            level.append(needs + 1)
        return [
            [s for s, at in zip(body, level, strict=True) if at == n] for n in range(max(level) + 1)
        ]

    @staticmethod
    def _reduce_width(r: Reduce) -> str:
        points, inner = num_points(r.extents), num_points(r.reduce_extents)
        if inner >= 256 and points <= 8:
            return "block"
        return "warp" if inner >= 8 else "thread"


def _store_extents(s: Statement) -> tuple[int, ...]:
    """Return the extents of the loop variables that a statement's stores may use."""
    if isinstance(s, TopK):
        return (*s.extents, s.k)
    return (*s.extents, s.length) if isinstance(s, Scan) else s.extents


def _meet(a: Statement, b: Statement) -> bool:
    """Say whether two statements may write the same place."""
    for one in stores(a):
        for other in stores(b):
            if one.buffer != other.buffer:
                continue
            first = places(one.index, _store_extents(a))
            second = places(other.index, _store_extents(b))
            if first is None or second is None or np.intersect1d(first, second).size:
                return True
    return False


def _index_loads(store: Store) -> list[Expr]:
    return list(index_exprs(store.index))
