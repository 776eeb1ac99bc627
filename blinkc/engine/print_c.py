"""Prints the Program's indices and expressions as C; loops and buffers are each renderer's own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from blinkc.engine.program import (
    Apply,
    Const,
    Expr,
    FloorDiv,
    Gathered,
    Index,
    IndexValue,
    Load,
    Mod,
    Var,
)

if TYPE_CHECKING:
    from collections.abc import Callable

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&&",
    "or": "||",
}


class CPrinter:
    """Expression printer.

    Args:
        load: prints the load of one element; gets the load, its printed index and printed row (or
        None). functions: (op, "fp32" or "int32") -> name of the C function that computes it.
        casts: dtype -> C type.
    """

    def __init__(
        self,
        load: Callable[[Load, str, str | None], str],
        functions: dict[tuple[str, str], str],
        casts: dict[str, str],
    ) -> None:
        self._load = load
        self._functions = functions
        self._casts = casts

    def index(self, index: Index) -> str:
        """Print an index; products with a number read from data are computed in 64 bits."""
        parts: list[str] = []
        for atom, coefficient in index.terms:
            text = self._atom(atom)
            if isinstance(atom, Gathered) and coefficient != 1:
                text = f"int64_t{{{text}}}"
            parts.append(text if coefficient == 1 else f"{text} * {coefficient}")
        if index.const or not parts:
            parts.append(str(index.const))
        return " + ".join(parts).replace("+ -", "- ")

    def _atom(self, atom: Var | FloorDiv | Mod | Gathered) -> str:
        if isinstance(atom, Var):
            return f"i{atom.position}"
        if isinstance(atom, FloorDiv):
            return f"(({self.index(atom.index)}) / {atom.divisor})"
        if isinstance(atom, Mod):
            return f"(({self.index(atom.index)}) % {atom.divisor})"
        text = self.expr(atom.expr)
        return f"index_i32({text}, {atom.limit})" if atom.limit else text

    def expr(self, expr: Expr) -> str:
        """Print an expression."""
        if isinstance(expr, Const):
            return print_number(expr.value, expr.dtype)
        if isinstance(expr, Load):
            row = None if expr.row is None else self.index(expr.row)
            return self._load(expr, self.index(expr.index), row)
        if isinstance(expr, IndexValue):
            return f"({self.index(expr.index)})"
        return self._apply(expr)

    def _apply(self, expr: Apply) -> str:
        args = [self.expr(arg) for arg in expr.args]
        op = expr.op
        kind = "int32" if dtype_of(expr.args[0]) in ("int32", "bool") else "fp32"
        if op == "where":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        if op == "cast":
            return self._cast(args[0], dtype_of(expr.args[0]), expr.dtype)
        if op == "neg":
            return f"(-{args[0]})"
        if op == "not":
            return f"(!{args[0]})"
        if op == "isnan":
            return f"({args[0]} != {args[0]})"
        if op in INFIX:
            return f"({args[0]} {INFIX[op]} {args[1]})"
        if op == "div" and kind == "fp32":
            return f"({args[0]} / {args[1]})"
        if op == "reciprocal":
            return f"(1.0f / {args[0]})"
        return f"{self._functions[op, kind]}({', '.join(args)})"

    def _cast(self, text: str, source: str, target: str) -> str:
        if target == "bool":
            return f"({text} != 0)"
        if self._casts[source] == self._casts[target]:
            return text
        return f"static_cast<{self._casts[target]}>({text})"


def dtype_of(expr: Expr) -> str:
    """Return an expression's number type."""
    return "int32" if isinstance(expr, IndexValue) else expr.dtype


def print_number(value: float | int | bool, dtype: str) -> str:
    """Print a literal; floats as fp32, shortest form that reads back equal."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "int32":
        clipped = min(max(int(value), -(2**31)), 2**31 - 1)
        return f"({clipped})" if clipped > -(2**31) else "(-2147483647 - 1)"
    if math.isnan(value):
        return "NAN"
    with np.errstate(over="ignore"):
        number = np.float32(value)
    if np.isinf(number):
        return "INFINITY" if number > 0 else "(-INFINITY)"
    text = np.format_float_scientific(number, unique=True, trim="0")
    return f"{text}f" if number >= 0 and not text.startswith("-") else f"({text}f)"
