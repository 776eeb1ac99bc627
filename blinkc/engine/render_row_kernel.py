"""Prints one row kernel as a C++ function over rows [begin, end)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blinkc.engine.print_c import CPrinter, print_number
from blinkc.engine.program import (
    Load,
    Map,
    Program,
    Reduce,
    RowKernel,
    Scan,
    Statement,
    Store,
    TopK,
)
from blinkc.errors import BlinkError, InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

C_TYPES = {"fp32": "float", "int32": "int32_t", "bool": "bool"}

FUNCTIONS = {
    ("div", "int32"): "div_i32",
    ("mod", "fp32"): "mod_f32",
    ("mod", "int32"): "mod_i32",
    ("fmod", "fp32"): "std::fmod",
    ("fmod", "int32"): "fmod_i32",
    ("pow", "fp32"): "std::pow",
    ("pow", "int32"): "pow_i32",
    ("min", "fp32"): "min_f32",
    ("min", "int32"): "min_i32",
    ("max", "fp32"): "max_f32",
    ("max", "int32"): "max_i32",
    ("abs", "fp32"): "std::fabs",
    ("abs", "int32"): "std::abs",
    ("sqrt", "fp32"): "std::sqrt",
    ("rsqrt", "fp32"): "rsqrt_f32",
    ("exp", "fp32"): "exp_f32",
    ("log", "fp32"): "std::log",
    ("sin", "fp32"): "std::sin",
    ("cos", "fp32"): "std::cos",
    ("tanh", "fp32"): "tanh_f32",
    ("erf", "fp32"): "erf_f32",
    ("sigmoid", "fp32"): "sigmoid_f32",
    ("floor", "fp32"): "std::floor",
    ("ceil", "fp32"): "std::ceil",
    ("round", "fp32"): "std::nearbyint",
    ("sign", "fp32"): "sign_f32",
    ("sign", "int32"): "sign_i32",
}

MAX_STACK_BYTES = 1 << 20  # temporaries of one kernel; threads have 8 MiB


def render_row_kernel(program: Program, kernel: RowKernel, names: dict[str, str]) -> list[str]:
    """Return the body's lines, for inside `for (row ...)`.

    `names` gives the C++ name of every value, weight and constant: values and weights are members
    of `a`.
    """
    return _indent(_Renderer(program, kernel, names).lines())


def _indent(lines: list[str]) -> list[str]:
    """Indent by open braces."""
    result, depth = [], 0
    for line in lines:
        if line.startswith("}"):
            depth -= 1
        result.append("  " * depth + line)
        if line.endswith("{"):
            depth += 1
    return result


class _Renderer:
    def __init__(self, program: Program, kernel: RowKernel, names: dict[str, str]) -> None:
        self.program = program
        self.kernel = kernel
        self.names = names
        self.temporaries = {x.name: x for x in kernel.temporaries}
        self.values = {
            v.name: v for v in (*program.inputs, *program.outputs, *program.intermediates)
        }
        self.weights = {w.name: w for w in program.weights}
        self.constants = {c.name for c in program.constants}
        self.printer = CPrinter(self._load, FUNCTIONS, C_TYPES)
        self.out: list[str] = []

    def lines(self) -> list[str]:
        for name in (*self.kernel.inputs, *self.kernel.outputs):
            value = self.values[name]
            const = "" if name in self.kernel.outputs else "const "
            c_name = self.names[name]
            offset = f"row * {value.size}" if value.size != 1 else "row"
            self.out.append(
                f"[[maybe_unused]] {const}{self._c_type(value.dtype)}* __restrict {c_name} = "
                f"a.{c_name} + {offset};"
            )
        total = sum(4 * x.size for x in self.kernel.temporaries)
        for temporary in self.kernel.temporaries:
            c_type = self._c_type(temporary.dtype)
            if total <= MAX_STACK_BYTES:
                self.out.append(f"alignas(32) {c_type} {temporary.name}[{temporary.size}];")
            else:
                self.out.append(
                    f"const auto {temporary.name}_owner = "
                    f"std::make_unique_for_overwrite<{c_type}[]>({temporary.size});"
                )
                owner = f"{temporary.name}_owner.get()"
                self.out.append(f"{c_type}* __restrict {temporary.name} = {owner};")
        for statement in self.kernel.body:
            self._statement(statement)
        return self.out

    def _c_type(self, dtype: str) -> str:
        if dtype not in C_TYPES:
            raise BlinkError(
                f"{self.program.name}: the cpu target computes in fp32, a value is {dtype}",
                hint="compile with --dtype fp32",
            )
        return C_TYPES[dtype]

    def _load(self, load: Load, index: str, row: str | None) -> str:
        name = load.buffer
        if name in self.temporaries:
            return f"{name}[{index}]"
        if name in self.constants:
            return f"{self.names[name]}[{index}]"
        if name in self.weights:
            element = f"a.{self.names[name]}[{index}]"
            if load.dtype == "fp32":
                return element
            return f"static_cast<{self._c_type(load.dtype)}>({element})"
        value = self.values[name]
        if row is None:
            return f"{self.names[name]}[{index}]"
        return f"a.{self.names[name]}[int64_t{{{row}}} * {value.size} + {index}]"

    def _target(self, store: Store) -> str:
        name = store.buffer if store.buffer in self.temporaries else self.names[store.buffer]
        return f"{name}[{self.printer.index(store.index)}]"

    def _write(self, stores: Sequence[Store], value: str) -> str:
        """Return assignments of one value to every store."""
        if len(stores) == 1:
            return f"{self._target(stores[0])} = {value};"
        writes = " ".join(f"{self._target(store)} = value;" for store in stores)
        return f"const {self._c_type(stores[0].dtype)} value = {value}; {writes}"

    def _open_loops(self, extents: Sequence[int], first: int = 0) -> None:
        for position, extent in enumerate(extents, first):
            name = f"i{position}"
            self.out.append(f"for (int32_t {name} = 0; {name} < {extent}; ++{name}) {{")

    def _close_loops(self, count: int) -> None:
        self.out += ["}"] * count

    def _statement(self, statement: Statement) -> None:
        if isinstance(statement, Map):
            self._map(statement)
        elif isinstance(statement, Reduce):
            self._reduce(statement)
        elif isinstance(statement, TopK):
            self._top_k(statement)
        else:
            self._scan(statement)

    def _map(self, m: Map) -> None:
        self._open_loops(m.extents)
        value = self.printer.expr(m.expr)
        if m.accumulate == "none":
            self.out.append(self._write(m.stores, value))
        for store in m.stores if m.accumulate != "none" else ():
            target = self._target(store)
            suffix = "i32" if store.dtype == "int32" else "f32"
            combined = {
                "add": f"{target} + {value}",
                "mul": f"{target} * {value}",
                "min": f"min_{suffix}({target}, {value})",
                "max": f"max_{suffix}({target}, {value})",
            }[m.accumulate]
            self.out.append(f"{target} = {combined};")
        self._close_loops(len(m.extents))

    def _reduce(self, r: Reduce) -> None:
        dtype = r.stores[0].dtype
        self._open_loops(r.extents)
        self.out.append("{")
        self.out.append(f"{_accumulator(r.op, dtype)};")
        inner = r.reduce_extents or (1,)
        first = len(r.extents)
        self._open_loops(inner[:-1], first)
        last = first + len(inner) - 1
        self.out.append(
            f"acc.add({inner[-1]}, [&]([[maybe_unused]] int32_t i{last}) "
            f"{{ return {self.printer.expr(r.expr)}; }});"
        )
        self._close_loops(len(inner) - 1)
        self.out.append(self._write(r.stores, "acc.result()"))
        self.out.append("}")
        self._close_loops(len(r.extents))

    def _top_k(self, k: TopK) -> None:
        dtype = (k.values or k.indices)[0].dtype if k.values else _dtype(k)
        self._open_loops(k.extents)
        var = f"i{len(k.extents)}"
        writes = [f"{self._target(s)} = value;" for s in k.values]
        writes += [f"{self._target(s)} = index;" for s in k.indices]
        self.out += [
            f"top_k<{k.k}, {self._c_type(dtype)}>(",
            f"{k.length}, [&]([[maybe_unused]] int32_t {var}) "
            f"{{ return {self.printer.expr(k.expr)}; }},",
            f"[&]([[maybe_unused]] int32_t {var}, [[maybe_unused]] {self._c_type(dtype)} value,",
            f"[[maybe_unused]] int32_t index) {{ {' '.join(writes)} }});",
        ]
        self._close_loops(len(k.extents))

    def _scan(self, s: Scan) -> None:
        self._open_loops(s.extents)
        var, c_type = f"i{len(s.extents)}", self._c_type(s.stores[0].dtype)
        step = f"int32_t {var} = {s.length - 1}; {var} >= 0; --{var}"
        if not s.reverse:
            step = f"int32_t {var} = 0; {var} < {s.length}; ++{var}"
        add = f"sum += {self.printer.expr(s.expr)};"
        write = self._write(s.stores, "sum")
        self.out.append("{")
        self.out.append(f"{c_type} sum = 0;")
        self.out.append(f"for ({step}) {{")
        if s.exclusive:
            self.out += [f"const {c_type} element = {self.printer.expr(s.expr)};", write]
            self.out.append("sum += element;")
        else:
            self.out += [add, write]
        self.out += ["}", "}"]
        self._close_loops(len(s.extents))


def _dtype(k: TopK) -> str:
    from blinkc.engine.print_c import dtype_of

    return dtype_of(k.expr)


def _accumulator(op: str, dtype: str) -> str:
    """Return the declaration of a reduction's accumulator `acc`."""
    if op == "sum" and dtype == "fp32":
        return "SumLanes acc"
    if op not in ("sum", "prod", "min", "max"):
        raise InternalError(f"reduction {op}")
    c_type = "float" if dtype == "fp32" else "int32_t"
    suffix = "f32" if dtype == "fp32" else "i32"
    worst = {"fp32": ("INFINITY", "-INFINITY"), "int32": ("INT32_MAX", "INT32_MIN")}
    start, combine = {
        "sum": (print_number(0, dtype), f"[]({c_type} x, {c_type} y) {{ return x + y; }}"),
        "prod": (print_number(1, dtype), f"[]({c_type} x, {c_type} y) {{ return x * y; }}"),
        "min": (worst[dtype][0], f"min_{suffix}"),
        "max": (worst[dtype][1], f"max_{suffix}"),
    }[op]
    if op in ("min", "max"):
        combine = f"[]({c_type} x, {c_type} y) {{ return {combine}(x, y); }}"
    return f"Fold acc({c_type}{{{start}}}, {combine})"
