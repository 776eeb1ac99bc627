"""Row kernels of the Program IR as CUDA: one RowKernel -> source and launch facts of one kernel.

A row is one block. A kernel whose statements share nothing is spread over several blocks a row
instead. Elementwise loops go over threads; a reduction over the block, a warp or a thread,
whichever its sizes suit; a barrier stands only where a statement touches what an earlier one wrote
or read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blinkc.engine.cuda_row_facts import RowFacts, is_heavy, num_points
from blinkc.engine.print_c import CPrinter, dtype_of, print_number
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
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STORAGE = {"bf16": "bf16", "fp16": "fp16", "fp32": "float", "int32": "int32_t", "bool": "bool"}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "int32": 4, "bool": 1}
_SCALAR = {"bf16": "float", "fp16": "float", "fp32": "float", "int32": "int32_t", "bool": "bool"}
_HALF = ("bf16", "fp16")
MAX_SHARED_BYTES = 227 * 1024 - 1024
MAX_PREFETCH_BYTES = 64 * 1024  # of a weight that every row reads whole
MAX_RANKED = 1024  # candidates of a TopK: a warp keeps 32 a lane

_FUNCTIONS = {
    ("div", "int32"): "div_i32",
    ("mod", "fp32"): "mod_f32",
    ("mod", "int32"): "mod_i32",
    ("fmod", "fp32"): "fmodf",
    ("fmod", "int32"): "fmod_i32",
    ("pow", "fp32"): "powf",
    ("pow", "int32"): "pow_i32",
    ("min", "fp32"): "min_f32",
    ("min", "int32"): "min_i32",
    ("max", "fp32"): "max_f32",
    ("max", "int32"): "max_i32",
    ("abs", "fp32"): "fabsf",
    ("abs", "int32"): "abs",
    ("sqrt", "fp32"): "sqrtf",
    ("rsqrt", "fp32"): "rsqrt_f32",
    ("exp", "fp32"): "expf",
    ("log", "fp32"): "logf",
    ("sin", "fp32"): "sinf",
    ("cos", "fp32"): "cosf",
    ("tanh", "fp32"): "tanhf",
    ("erf", "fp32"): "erff",
    ("sigmoid", "fp32"): "sigmoid_f32",
    ("floor", "fp32"): "floorf",
    ("ceil", "fp32"): "ceilf",
    ("round", "fp32"): "rintf",
    ("sign", "fp32"): "sign_f32",
    ("sign", "int32"): "sign_i32",
}
_REDUCTIONS = {"sum": "Sum", "prod": "Product", "max": "Largest", "min": "Smallest"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaRowKernel:
    """A rendered row kernel and how to launch it.

    Grid: (rows, blocks_per_row). `arguments` are buffer names of the program, in the order of the
    kernel's parameters.
    """

    name: str
    source: str
    threads: int
    blocks_per_row: int
    shared_bytes: int
    arguments: tuple[str, ...]


def render_cuda_row_kernel(program: Program, kernel: RowKernel, name: str) -> CudaRowKernel:
    """Render one row kernel under the global name `name`.

    Raises:
        BlinkError: its temporaries exceed shared memory, or a TopK has too many candidates.
    """
    return _Renderer(program, kernel, name).render()


class _Printer(CPrinter):
    """The C printer, with half types rounded at casts."""

    def _cast(self, text: str, source: str, target: str) -> str:
        if target in _HALF and source != target:
            return f"rounded<{target}>({super()._cast(text, source, 'fp32')})"
        return super()._cast(text, source, target)


@dataclass(slots=True)
class _Vector:
    """Accesses of the statement being printed that move `width` neighbours of a loop variable at
    once."""

    position: int
    width: int
    loads: dict[str, str] = field(default_factory=dict)  # first element -> name
    stores: list[tuple[str, str, str]] = field(default_factory=list)  # name, first element, type


class _Renderer(RowFacts):
    def __init__(self, program: Program, kernel: RowKernel, name: str) -> None:
        super().__init__(program, kernel, name)
        self.printer = _Printer(self._load, _FUNCTIONS, _SCALAR)
        self.lines: list[str] = []
        self.vector: _Vector | None = None

    def render(self) -> CudaRowKernel:
        spread = self._can_spread()
        most = max(self._work_items(s) for s in self.kernel.body)
        if spread:
            threads = 128 if most <= 512 else 256
            blocks = max(1, math.ceil(most / threads))
        else:
            threads = min(1024, max(64, 1 << math.ceil(math.log2(max(most, 1)))))
            blocks = 1
        shared_bytes = self._place_temporaries()
        self._body(spread)
        return CudaRowKernel(
            name=self.name,
            source=self._source(threads),
            threads=threads,
            blocks_per_row=blocks,
            shared_bytes=shared_bytes,
            arguments=self.arguments,
        )

    def _place_temporaries(self) -> int:
        offset = 0
        for temporary in self.temporaries.values():
            if temporary.name not in self.names:
                continue
            kind = STORAGE[temporary.dtype]
            self.lines.append(
                f"{kind}* {self.names[temporary.name]} = "
                f"reinterpret_cast<{kind}*>(shared + {offset});"
            )
            offset += -(-temporary.size * BYTES[temporary.dtype] // 16) * 16
        if offset > MAX_SHARED_BYTES:
            raise BlinkError(
                f"row kernel {self.kernel.name} wants {offset} bytes of shared memory a row, "
                f"at most {MAX_SHARED_BYTES} are there",
                hint="compile with --dtype bf16 or report the model",
            )
        return offset

    def _source(self, threads: int) -> str:
        parameters = []
        for buffer in self.arguments:
            is_value = buffer in self.values
            dtype = (self.values[buffer] if is_value else self.weights[buffer]).dtype
            qualifier = "" if buffer in self.written else "const "
            restrict = " __restrict__" if buffer in self.written else ""
            parameters.append(f"{qualifier}{STORAGE[dtype]}*{restrict} {self.names[buffer]}")
        tables = []
        for buffer in self.used_constants:
            constant = self.constants[buffer]
            numbers = ", ".join(print_number(x.item(), constant.dtype) for x in constant.array)
            tables.append(
                f"__device__ const {STORAGE[constant.dtype]} {self.names[buffer]}[] = "
                f"{{{numbers}}};\n"
            )
        shared = (
            "  extern __shared__ __align__(128) unsigned char shared[];\n"
            if self.temporaries
            else ""
        )
        body = "\n".join(f"  {line}" for line in self.lines)
        early = "".join(
            f"  prefetch_weight({self.names[w.name]}, {math.prod(w.shape)});\n"
            for w in self.weights.values()
            if w.name in self.names and math.prod(w.shape) * BYTES[w.dtype] <= MAX_PREFETCH_BYTES
        )
        return (
            f"{''.join(tables)}__global__ __launch_bounds__({threads}) void {self.name}("
            f"{', '.join(parameters)}) {{\n{shared}  let_next_start();\n{early}"
            "  wait_for_previous();\n"
            f"  const int row = blockIdx.x;\n{body}\n}}\n"
        )

    def _body(self, spread: bool) -> None:
        if any(
            isinstance(s, Reduce) and self._reduce_width(s) == "block" for s in self.kernel.body
        ):
            self.lines.append("__shared__ float reduce_scratch[32];")
        for number, level in enumerate(self._levels()):
            if number > 0:
                self.lines.append("__syncthreads();")
            for statement in level:
                self._statement(statement, spread)

    def _statement(self, statement: Statement, spread: bool) -> None:
        if isinstance(statement, Map):
            self._map(statement, spread)
        elif isinstance(statement, Reduce):
            self._reduce(statement, spread)
        elif isinstance(statement, TopK):
            self._top_k(statement)
        else:
            self._scan(statement)

    def _place(self, buffer: str, index: str, row: str | None) -> str:
        """Print one element."""
        name = self.names[buffer]
        if buffer in self.values:
            at = "row" if row is None else f"({row})"
            return f"{name}[int64_t({at}) * {self.values[buffer].size} + {index}]"
        return f"{name}[{index}]"

    def _load(self, load: Load, index: str, row: str | None) -> str:
        place, dtype = self._place(load.buffer, index, row), self._dtype(load.buffer)
        vector = self.vector
        if vector is not None and self._is_vector(load, vector.position, vector.width):
            name = vector.loads.setdefault(place, f"x{len(vector.loads)}")
            place = f"{name}.v[j]"
        return f"to_float({place})" if dtype in _HALF else place

    def _store(self, store: Store, value: str) -> str:
        place = self._place(store.buffer, self.printer.index(store.index), None)
        dtype, vector = self._dtype(store.buffer), self.vector
        if dtype in _HALF:
            value = f"from_float<{dtype}>({value})"
        if vector is not None and self._is_vector(store, vector.position, vector.width):
            name = f"y{len(vector.stores)}"
            vector.stores.append((name, place, STORAGE[dtype]))
            place = f"{name}.v[j]"
        return f"{place} = {value};"

    def _vectorized(self, position: int, width: int, inner: Callable[[], list[str]]) -> list[str]:
        """Print `inner` for `width` neighbours of a loop variable, moving them as vectors where
        they lie so."""
        if width == 1:
            return inner()
        self.vector = vector = _Vector(position=position, width=width)
        lines = inner()
        self.vector = None
        var = f"i{position}"
        return [
            *(
                f"const auto {n} = load_vector<{width}>(&{place});"
                for place, n in vector.loads.items()
            ),
            *(f"Vector<{kind}, {width}> {n};" for n, _, kind in vector.stores),
            f"const int {var}_base = {var};",
            "#pragma unroll",
            f"for (int j = 0; j < {width}; ++j) {{",
            f"[[maybe_unused]] const int {var} = {var}_base + j;",
            *lines,
            "}",
            *(f"store_vector(&{place}, {n});" for n, place, _ in vector.stores),
        ]

    def _write(self, targets: Sequence[Store], value: str, dtype: str) -> list[str]:
        if len(targets) == 1:
            return [self._store(targets[0], value)]
        return [
            f"const {_SCALAR[dtype]} value = {value};",
            *(self._store(store, "value") for store in targets),
        ]

    def _variables(self, extents: Sequence[int], flat: str, first: int = 0) -> list[str]:
        """Decompose `flat` into the loop variables, last one fastest."""
        out, inner = [], num_points(extents)
        for position, extent in enumerate(extents):
            inner //= extent
            text = flat if inner == 1 else f"{flat} / {inner}"
            if position > 0 and extent > 1:
                text = f"({text}) % {extent}" if inner > 1 else f"{flat} % {extent}"
            out.append(
                f"[[maybe_unused]] const int i{first + position} = {text if extent > 1 else '0'};"
            )
        return out

    def _thread_loop(self, points: int, spread: bool) -> str:
        if spread:
            return (
                f"for (int p = blockIdx.y * blockDim.x + threadIdx.x; p < {points}; "
                "p += blockDim.x * gridDim.y) {"
            )
        return f"for (int p = threadIdx.x; p < {points}; p += blockDim.x) {{"

    def _map(self, m: Map, spread: bool) -> None:
        points, width = num_points(m.extents), self._vector_width(m)
        flat = "p" if width == 1 else f"(p * {width})"
        if m.sequential:
            self.lines += [f"if (threadIdx.x == 0) for (int p = 0; p < {points}; ++p) {{"]
        elif points == 1:
            first = "threadIdx.x == 0" + (" && blockIdx.y == 0" if spread else "")
            self.lines += [f"if ({first}) {{", "const int p = 0;"]
        else:
            unroll = 1 if is_heavy(m.expr) else 4
            self.lines.append(f"#pragma unroll {unroll}")
            self.lines.append(self._thread_loop(points // width, spread))
        self.lines += self._variables(m.extents, flat)
        self.lines += self._vectorized(len(m.extents) - 1, width, lambda: self._assign(m))
        self.lines.append("}")

    def _assign(self, m: Map) -> list[str]:
        value = self.printer.expr(m.expr)
        if m.accumulate == "none":
            return self._write(m.stores, value, dtype_of(m.expr))
        lines = []
        for store in m.stores:
            old = self._place(store.buffer, self.printer.index(store.index), None)
            if self._dtype(store.buffer) in _HALF:
                old = f"to_float({old})"
            kind = "i32" if store.dtype == "int32" else "f32"
            combined = {
                "add": f"{old} + {value}",
                "mul": f"{old} * {value}",
                "min": f"min_{kind}({old}, {value})",
                "max": f"max_{kind}({old}, {value})",
            }[m.accumulate]
            lines.append(self._store(store, combined))
        return lines

    def _reduce(self, r: Reduce, spread: bool) -> None:
        points, inner = num_points(r.extents), num_points(r.reduce_extents)
        scalar = "int32_t" if dtype_of(r.expr) in ("int32", "bool") else "float"
        op = f"{_REDUCTIONS[r.op]}<{scalar}>"
        width, vector = self._reduce_width(r), self._vector_width(r)
        warp_start = (
            "(blockIdx.y * blockDim.x + threadIdx.x) / 32" if spread else "threadIdx.x / 32"
        )
        warp_step = "blockDim.x * gridDim.y / 32" if spread else "blockDim.x / 32"
        start = {
            "block": f"for (int p = 0; p < {points}; ++p) {{",
            "thread": self._thread_loop(points, spread),
            "warp": f"for (int p = {warp_start}; p < {points}; p += {warp_step}) {{",
        }[width]
        groups = inner // vector
        loop = {
            "block": f"for (int q = threadIdx.x; q < {groups}; q += blockDim.x) {{",
            "warp": f"for (int q = threadIdx.x % 32; q < {groups}; q += 32) {{",
            "thread": f"for (int q = 0; q < {groups}; ++q) {{",
        }[width]
        self.lines.append(start)
        self.lines += self._variables(r.extents, "p")
        self.lines += [f"{scalar} sum = {op}::identity();", "#pragma unroll 4", loop]
        flat = "q" if vector == 1 else f"(q * {vector})"
        self.lines += self._variables(r.reduce_extents, flat, len(r.extents))
        last = len(r.extents) + len(r.reduce_extents) - 1
        self.lines += self._vectorized(
            last, vector, lambda: [f"sum = {op}::apply(sum, {self.printer.expr(r.expr)});"]
        )
        self.lines.append("}")
        if width == "block":
            self.lines.append(f"sum = reduce_block<{op}>(sum, reduce_scratch);")
        elif width == "warp":
            self.lines.append(f"sum = reduce_warp<{op}>(sum);")
        guard = {"block": "threadIdx.x == 0", "warp": "threadIdx.x % 32 == 0", "thread": ""}[width]
        if guard:
            self.lines.append(f"if ({guard}) {{")
        self.lines += self._write(r.stores, "sum", "int32" if scalar == "int32_t" else "fp32")
        self.lines += ["}", "}"] if guard else ["}"]

    def _top_k(self, k: TopK) -> None:
        if k.length > MAX_RANKED or dtype_of(k.expr) == "int32":
            raise BlinkError(
                f"row kernel {self.kernel.name}: TopK over {k.length} {dtype_of(k.expr)} values; "
                f"the cuda engine takes up to {MAX_RANKED} floating-point ones"
            )
        points, lanes = num_points(k.extents), -(-k.length // 32)
        var = f"i{len(k.extents)}"
        self.lines += [f"for (int p = threadIdx.x / 32; p < {points}; p += blockDim.x / 32) {{"]
        self.lines += self._variables(k.extents, "p")
        self.lines += [
            f"unsigned long long rank[{lanes}];",
            "#pragma unroll",
            f"for (int j = 0; j < {lanes}; ++j) {{",
            f"const int {var} = j * 32 + threadIdx.x % 32;",
            f"rank[j] = 0; if ({var} < {k.length}) "
            f"rank[j] = rank_key({self.printer.expr(k.expr)}, {var});",
            "}",
            f"for (int {var} = 0; {var} < {k.k}; ++{var}) {{",
            "unsigned long long best = 0;",
            "#pragma unroll",
            f"for (int j = 0; j < {lanes}; ++j) best = rank[j] > best ? rank[j] : best;",
            "best = warp_max(best);",
            "#pragma unroll",
            f"for (int j = 0; j < {lanes}; ++j) if (rank[j] == best) rank[j] = 0;",
            "if (threadIdx.x % 32 == 0) {",
        ]
        self.lines += [self._store(store, "ranked_value(best)") for store in k.values]
        self.lines += [self._store(store, "ranked_index(best)") for store in k.indices]
        self.lines += ["}", "}", "}"]

    def _scan(self, s: Scan) -> None:
        var = f"i{len(s.extents)}"
        scalar = "int32_t" if dtype_of(s.expr) in ("int32", "bool") else "float"
        at = f"{s.length - 1} - step" if s.reverse else "step"
        write = self._write(s.stores, "sum", "int32" if scalar == "int32_t" else "fp32")
        self.lines += [self._thread_loop(num_points(s.extents), False)]
        self.lines += self._variables(s.extents, "p")
        self.lines += [
            f"{scalar} sum = 0;",
            f"for (int step = 0; step < {s.length}; ++step) {{",
            f"const int {var} = {at};",
            f"const {scalar} element = {self.printer.expr(s.expr)};",
            *(write if s.exclusive else []),
            "sum += element;",
            *([] if s.exclusive else write),
            "}",
            "}",
        ]
