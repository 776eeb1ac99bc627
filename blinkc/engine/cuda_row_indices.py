"""Questions about the IR's indices that decide how CUDA threads may share out a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blinkc.engine.program import Expr, FloorDiv, Gathered, Index, IndexValue, Load, Var

if TYPE_CHECKING:
    from collections.abc import Sequence


def mentions(index: Index, position: int) -> bool:
    """Say whether an index depends on loop variable `position`."""
    for atom, _ in index.terms:
        if isinstance(atom, Var):
            if atom.position == position:
                return True
        elif isinstance(atom, Gathered):
            if _expr_mentions(atom.expr, position):
                return True
        elif mentions(atom.index, position):
            return True
    return False


def _expr_mentions(expr: Expr, position: int) -> bool:
    if isinstance(expr, Load):
        return mentions(expr.index, position) or (
            expr.row is not None and mentions(expr.row, position)
        )
    if isinstance(expr, IndexValue):
        return mentions(expr.index, position)
    return any(_expr_mentions(arg, position) for arg in getattr(expr, "args", ()))


def is_contiguous(index: Index, position: int, width: int) -> bool:
    """Say whether `width` neighbours of a loop variable are neighbours in memory, on a boundary of
    `width`.

    The variable is taken at multiples of `width`.
    """
    if index.const % width:
        return False
    found = False
    for atom, coefficient in index.terms:
        if isinstance(atom, Var) and atom.position == position:
            if coefficient != 1:
                return False
            found = True
        elif coefficient % width or mentions(Index(terms=((atom, 1),)), position):
            return False
    return found


def places(index: Index, extents: Sequence[int]) -> np.ndarray | None:
    """Return every value of an index over its loops; None where data decides it."""
    grid = np.indices(tuple(extents) or (1,))

    def value(part: Index) -> np.ndarray | None:
        total = np.full(grid.shape[1:], part.const)
        for atom, coefficient in part.terms:
            if isinstance(atom, Gathered):
                return None
            if isinstance(atom, Var):
                total = total + coefficient * grid[atom.position]
                continue
            inner = value(atom.index)
            if inner is None:
                return None
            inner = inner // atom.divisor if isinstance(atom, FloorDiv) else inner % atom.divisor
            total = total + coefficient * inner
        return total

    result = value(index)
    return None if result is None else result.ravel()
