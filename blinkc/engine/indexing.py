"""Index arithmetic of the Program IR: builds `Index` values and keeps them simplified."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

from blinkc.engine.program import (
    Expr,
    FloorDiv,
    Gathered,
    Index,
    Load,
    Mod,
    Var,
    index_exprs,
    loads,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Atom = Var | FloorDiv | Mod | Gathered

UNBOUNDED = 2**31 - 1


def constant(value: int) -> Index:
    """Return the index that is always `value`."""
    return Index(const=value)


def var(position: int, extent: int) -> Index:
    """Return loop variable `position`; a loop of one step is the constant 0."""
    return Index() if extent == 1 else Index(terms=((Var(position, extent), 1),))


def gathered(expr: Expr, limit: int) -> Index:
    """Return an index read from data."""
    return Index(terms=((Gathered(expr, limit), 1),))


def add(*parts: Index) -> Index:
    """Return the sum."""
    total: dict[Atom, int] = {}
    for part in parts:
        for atom, coefficient in part.terms:
            total[atom] = total.get(atom, 0) + coefficient
    terms = tuple((atom, coefficient) for atom, coefficient in total.items() if coefficient)
    return Index(sum(part.const for part in parts), terms)


def scale(index: Index, factor: int) -> Index:
    """Return `index * factor`."""
    if factor == 0:
        return Index()
    return Index(index.const * factor, tuple((a, c * factor) for a, c in index.terms))


def bounds(index: Index) -> tuple[int, int]:
    """Return the least and largest value an index can take."""
    low = high = index.const
    for atom, coefficient in index.terms:
        reach = [coefficient * bound for bound in _atom_bounds(atom)]
        low += min(reach)
        high += max(reach)
    return low, high


def _atom_bounds(atom: Atom) -> tuple[int, int]:
    if isinstance(atom, Var):
        return 0, atom.extent - 1
    if isinstance(atom, Gathered):
        return 0, atom.limit - 1 if atom.limit else UNBOUNDED
    low, high = bounds(atom.index)
    if isinstance(atom, FloorDiv):
        return low // atom.divisor, high // atom.divisor
    return 0, min(high, atom.divisor - 1)


def _divide(index: Index, divisor: int) -> tuple[Index, Index]:
    """Split `index` as `quotient * divisor + rest`, the rest as small as its terms allow."""
    whole = tuple((a, c // divisor) for a, c in index.terms if c % divisor == 0)
    rest = tuple((a, c) for a, c in index.terms if c % divisor)
    return Index(index.const // divisor, whole), Index(index.const % divisor, rest)


def floordiv(index: Index, divisor: int) -> Index:
    """Return `index / divisor`."""
    if divisor == 1:
        return index
    quotient, rest = _divide(index, divisor)
    low, high = bounds(rest)
    if low >= 0 and high < divisor:
        return quotient
    common = gcd(divisor, *(c for _, c in rest.terms))
    if common > 1:
        shrunk = Index(rest.const // common, tuple((a, c // common) for a, c in rest.terms))
        return add(quotient, floordiv(shrunk, divisor // common))
    return add(quotient, Index(terms=((FloorDiv(rest, divisor), 1),)))


def mod(index: Index, divisor: int) -> Index:
    """Return `index % divisor`."""
    if divisor == 1:
        return Index()
    _, rest = _divide(index, divisor)
    low, high = bounds(rest)
    if low >= 0 and high < divisor:
        return rest
    common = gcd(divisor, rest.const, *(c for _, c in rest.terms))
    if common > 1:
        shrunk = Index(rest.const // common, tuple((a, c // common) for a, c in rest.terms))
        return scale(mod(shrunk, divisor // common), common)
    return Index(terms=((Mod(rest, divisor), 1),))


def linearize(point: Sequence[Index], shape: Sequence[int]) -> Index:
    """Return the row-major flat index of `point` in an array of `shape`."""
    flat = Index()
    for index, extent in zip(point, shape, strict=True):
        flat = add(scale(flat, extent), index)
    return flat


def delinearize(flat: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """Return the point of an array of `shape` at row-major flat index `flat`."""
    point: list[Index] = []
    stride = prod(shape)
    for axis, extent in enumerate(shape):
        stride //= extent
        index = floordiv(flat, stride)
        point.append(Index() if extent == 1 else index if axis == 0 else mod(index, extent))
    return tuple(point)


def substitute(index: Index, values: Mapping[int, Index]) -> Index:
    """Replace loop variables by indices; used where no index is read from data."""
    parts = [constant(index.const)]
    for atom, coefficient in index.terms:
        if isinstance(atom, Var):
            new = values.get(atom.position, Index(terms=((atom, 1),)))
        elif isinstance(atom, FloorDiv):
            new = floordiv(substitute(atom.index, values), atom.divisor)
        elif isinstance(atom, Mod):
            new = mod(substitute(atom.index, values), atom.divisor)
        else:
            raise TypeError("substitute: index read from data")
        parts.append(scale(new, coefficient))
    return add(*parts)


@dataclass(frozen=True, slots=True)
class Domain:
    """The points a statement runs over.

    `extents` are the loops; `point` is where in the value's shape each loop point lies.
    """

    extents: tuple[int, ...]
    point: tuple[Index, ...]

    @staticmethod
    def over(shape: Sequence[int], first: int = 0) -> Domain:
        """Return the domain of all points of `shape`, loops of one step left out."""
        extents: list[int] = []
        point: list[Index] = []
        for extent in shape:
            point.append(var(first + len(extents), extent))
            if extent != 1:
                extents.append(extent)
        return Domain(tuple(extents), tuple(point))

    def split(self, position: int, at: int) -> tuple[Domain, Domain]:
        """Cut loop `position` into `[0, at)` and `[at, extent)`."""
        halves = []
        for start, extent in ((0, at), (at, self.extents[position] - at)):
            values = {position: add(constant(start), var(position, extent))}
            extents = (*self.extents[:position], extent, *self.extents[position + 1 :])
            halves.append(Domain(extents, tuple(substitute(i, values) for i in self.point)))
        return halves[0], halves[1]

    def tile(self, position: int, factor: int) -> Domain:
        """Replace loop `position` by two: `extent / factor` outer and `factor` inner steps."""
        extent = self.extents[position]
        outer = extent // factor
        extents = (*self.extents[:position], outer, factor, *self.extents[position + 1 :])
        values = {position: add(scale(var(position, outer), factor), var(position + 1, factor))}
        for later in range(position + 1, len(self.extents)):
            values[later] = var(later + 1, self.extents[later])
        return Domain(extents, tuple(substitute(i, values) for i in self.point))


def find_tile(expr: Expr) -> tuple[int, int] | None:
    """Return a loop position and a factor that would remove a division from `expr`'s indices."""
    for load in loads(expr):
        for index in (load.index, load.row):
            found = _tile_in(index) if index is not None else None
            if found:
                return found
    return None


def _tile_in(index: Index) -> tuple[int, int] | None:
    for atom, _ in index.terms:
        if not isinstance(atom, FloorDiv | Mod):
            continue
        for inner, coefficient in atom.index.terms:
            if isinstance(inner, Var) and coefficient > 0 and atom.divisor % coefficient == 0:
                factor = atom.divisor // coefficient
                if 1 < factor < inner.extent and inner.extent % factor == 0:
                    return inner.position, factor
        found = _tile_in(atom.index)
        if found:
            return found
    return None


def reads_data(index: Index) -> bool:
    """Say whether an index depends on data."""
    return any(True for _ in index_exprs(index))


__all__ = [
    "Domain",
    "Load",
    "add",
    "bounds",
    "constant",
    "delinearize",
    "find_tile",
    "floordiv",
    "gathered",
    "linearize",
    "mod",
    "reads_data",
    "scale",
    "substitute",
    "var",
]
