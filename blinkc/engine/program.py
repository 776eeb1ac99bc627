"""The Program: what a segment lowers to, and what the renderers (C++ and CUDA) print.

A program is a list of kernels over values `[rows, size]`. Matrix products with a weight are
`GemmKernel`s. Everything between two of them is one `RowKernel`: for each row independently, a
straight-line list of statements over small arrays. Lowering has already done the thinking: views
(reshape, transpose, slice, expand, concat) are index arithmetic inside loads, single-use
elementwise operations are nested expressions, and what must be stored is a temporary of the row. A
renderer prints loops.

How each statement runs, for a renderer to print:

- `Map`: for every point of `extents`, evaluate `expr` once and write it through every `Store`.
  Points are independent (any order, any thread) unless `sequential`, when they run in row-major
  order on one thread.
- `Reduce`: for every point of `extents`, combine `expr` over all points of `reduce_extents`; then
  write.
- `TopK`: for every point of `extents`, order the `length` candidates by value, largest first and
  lowest index first among equals (a NaN counts as largest), and write the first `k`.
- `Scan`: for every point of `extents`, running sum of `expr` along one axis of `length`.

Loop variables are numbered: `extents` first, then `reduce_extents` (or the scanned, ranked axis). A
statement may read what an earlier one wrote; `reads()` and `writes()` say where a block needs a
barrier. No statement reads what it writes itself, except a sequential `Map` with `accumulate`.

Number types: "fp32", "fp16", "bf16", "int32", "bool" (one byte). There is no int64: ids, positions
and expert ids fit, and buffers of integer values are int32 everywhere. Half types are storage
types: a renderer computes in fp32 and rounds where a value is stored (and at an explicit "cast").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


# Index arithmetic. All index values are non-negative int32 at run time.


@dataclass(frozen=True, slots=True)
class Var:
    """Loop variable number `position`, in `[0, extent)`."""

    position: int
    extent: int


@dataclass(frozen=True, slots=True)
class FloorDiv:
    """`index / divisor`, both non-negative."""

    index: Index
    divisor: int


@dataclass(frozen=True, slots=True)
class Mod:
    """`index % divisor`, both non-negative."""

    index: Index
    divisor: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """An index read from data: an int32 expression.

    Negative values count from `limit`; the renderer clamps the result to `[0, limit)`, so that a
    bad id cannot read outside its table. `limit` 0: not known at compile time (a row number), no
    clamp.
    """

    expr: Expr
    limit: int


@dataclass(frozen=True, slots=True)
class Index:
    """`const + sum(coefficient * atom)`; blinkc.engine.indexing builds it, simplified."""

    const: int = 0
    terms: tuple[tuple[Var | FloorDiv | Mod | Gathered, int], ...] = ()


# Scalar expressions.


@dataclass(frozen=True, slots=True)
class Const:
    """A number. `value` may be inf or nan."""

    value: float | int | bool
    dtype: str


@dataclass(frozen=True, slots=True)
class Load:
    """One element of a buffer, by name.

    A row buffer (a value of the program): element `index` of the kernel's own row, or of row `row`
    where that is given (`h[rows]`: a kernel over samples reads a value of tokens). A weight,
    constant or temporary: element `index` of its flat array; then `row` is None.
    """

    buffer: str
    index: Index
    dtype: str
    row: Index | None = None


@dataclass(frozen=True, slots=True)
class IndexValue:
    """An index used as a number (int32)."""

    index: Index


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation of `OPS` on scalars; arguments have one dtype except where's first (bool)."""

    op: str
    args: tuple[Expr, ...]
    dtype: str


Expr = Const | Load | IndexValue | Apply

# op -> number of arguments. Meanings are C's, element by element, except as noted.
OPS: dict[str, int] = {
    "add": 2,
    "sub": 2,
    "mul": 2,
    "div": 2,  # int32: truncates towards zero
    "mod": 2,  # result has the sign of the divisor (numpy's %)
    "fmod": 2,  # result has the sign of the dividend (C's fmod, %)
    "pow": 2,
    "min": 2,  # b < a ? b : a   (a NaN in `a` survives)
    "max": 2,  # a < b ? b : a
    "neg": 1,
    "abs": 1,
    "sqrt": 1,
    "rsqrt": 1,  # 1 / sqrt(x)
    "reciprocal": 1,
    "exp": 1,
    "log": 1,
    "sin": 1,
    "cos": 1,
    "tanh": 1,
    "erf": 1,
    "sigmoid": 1,
    "floor": 1,
    "ceil": 1,
    "round": 1,  # half to even
    "sign": 1,
    "isnan": 1,  # -> bool
    "eq": 2,  # comparisons -> bool
    "ne": 2,
    "lt": 2,
    "le": 2,
    "gt": 2,
    "ge": 2,
    "and": 2,
    "or": 2,
    "not": 1,
    "where": 3,
    "cast": 1,  # to `dtype`; float to int32 truncates, to bool is x != 0
}


# Statements of a row kernel.


@dataclass(frozen=True, slots=True)
class Store:
    """Where a result goes: element `index` of the own row of a row buffer, or of a temporary."""

    buffer: str
    index: Index
    dtype: str  # of the buffer; the expression's value is cast to it


@dataclass(frozen=True, slots=True)
class Map:
    """Elementwise loop. Stores of different points never meet unless `sequential` (scatter)."""

    extents: tuple[int, ...]
    expr: Expr
    stores: tuple[Store, ...]
    sequential: bool = False
    accumulate: str = (
        "none"  # "none", "add", "mul", "min", "max": combine with what is stored (scatter)
    )


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduction, in fp32 for every float type. op: "sum", "prod", "max" or "min"."""

    extents: tuple[int, ...]
    reduce_extents: tuple[int, ...]
    op: str
    expr: Expr
    stores: tuple[Store, ...]  # indices use the variables of `extents` only


@dataclass(frozen=True, slots=True)
class TopK:
    """The `k` largest of `length` candidates, in order.

    `expr` uses variable `len(extents)` for the candidate; the stores use it for the rank, in `[0,
    k)`. `values` and `indices` (int32) may each be empty.
    """

    extents: tuple[int, ...]
    length: int
    k: int
    expr: Expr
    values: tuple[Store, ...]
    indices: tuple[Store, ...]


@dataclass(frozen=True, slots=True)
class Scan:
    """Running sum along variable `len(extents)`; `exclusive` leaves the element itself out."""

    extents: tuple[int, ...]
    length: int
    expr: Expr
    stores: tuple[Store, ...]
    exclusive: bool = False
    reverse: bool = False


Statement = Map | Reduce | TopK | Scan


# Kernels and programs.


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A buffer `[rows, size]`, contiguous. rows: "tokens" or "samples"."""

    name: str
    rows: str
    size: int
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A weight input of the segment; `shape` as given, flat row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Constant:
    """A small computed table, printed into the source. `array` is 1-D, fp32, int32 or bool."""

    name: str
    dtype: str
    array: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Temporary:
    """An array that lives for one row of one kernel (C++: a local array; CUDA: shared memory)."""

    name: str
    size: int
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmKernel:
    """`out[rows, n] = x[rows, k] @ W^T (+ bias)`, accumulated in fp32.

    `weight_layout` "nk": the weight is `[n, k]`; "kn": `[k, n]`. `bias` names a weight of shape
    `[n]`.
    """

    rows: str
    x: str
    weight: str
    bias: str | None
    out: str
    n: int
    k: int
    weight_layout: str = "nk"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKernel:
    """Statements run for each row by itself; see the module's text."""

    name: str
    rows: str
    inputs: tuple[str, ...]  # row buffers read
    outputs: tuple[str, ...]  # row buffers written
    params: tuple[str, ...]  # weights and constants read
    temporaries: tuple[Temporary, ...]
    body: tuple[Statement, ...]


Kernel = GemmKernel | RowKernel


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One lowered segment.

    Buffers by name: `inputs`, `outputs` and `intermediates` are row buffers (names distinct from
    each other); `weights` and `constants` are shared by all rows. Kernels run in order. An output
    is never an input.
    """

    name: str
    inputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    outputs: tuple[Value, ...]
    intermediates: tuple[Value, ...]
    constants: tuple[Constant, ...]
    kernels: tuple[Kernel, ...]

    def value(self, name: str) -> Value:
        """Look a row buffer up by name; KeyError when there is none."""
        for value in (*self.inputs, *self.outputs, *self.intermediates):
            if value.name == name:
                return value
        raise KeyError(name)


# Walking.


def index_exprs(index: Index) -> Iterator[Expr]:
    """Yield the expressions an index reads its data from."""
    for atom, _ in index.terms:
        if isinstance(atom, Gathered):
            yield atom.expr
        elif isinstance(atom, FloorDiv | Mod):
            yield from index_exprs(atom.index)


def loads(expr: Expr) -> Iterator[Load]:
    """Yield every load below `expr`, those inside indices included."""
    if isinstance(expr, Load):
        yield expr
        indices = (expr.index,) if expr.row is None else (expr.index, expr.row)
        for index in indices:
            for inner in index_exprs(index):
                yield from loads(inner)
    elif isinstance(expr, IndexValue):
        for inner in index_exprs(expr.index):
            yield from loads(inner)
    elif isinstance(expr, Apply):
        for arg in expr.args:
            yield from loads(arg)


def stores(statement: Statement) -> tuple[Store, ...]:
    """Return everything a statement writes."""
    if isinstance(statement, TopK):
        return (*statement.values, *statement.indices)
    return statement.stores


def reads(statement: Statement) -> set[str]:
    """Return the names of the buffers a statement reads."""
    found = {load.buffer for load in loads(statement.expr)}
    for store in stores(statement):
        for inner in index_exprs(store.index):
            found |= {load.buffer for load in loads(inner)}
    return found


def writes(statement: Statement) -> set[str]:
    """Return the names of the buffers a statement writes."""
    return {store.buffer for store in stores(statement)}
