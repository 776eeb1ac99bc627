"""cuBLASLt through its C interface: matrix products with measured algorithms that can be captured.

Row-major out[m, n] = x[m, k] w[n, k]^T is column-major out^T = w x^T, so the weight is the first
operand.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import sysconfig
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blink_runtime.cuda_driver import DeviceBuffer, Event
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blink_runtime.cuda_driver import Stream

WORKSPACE_BYTES = 64 << 20
_CANDIDATES = 12
_CANDIDATES_MANY_ROWS = 32  # large products are worth a longer search
_FINALISTS = 4
# cublasLt.h, library_types.h
_TYPES = {"fp32": 0, "fp16": 2, "bf16": 14}
_COMPUTE_32F = 68
_DESC_TRANSA, _DESC_TRANSB, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 4, 7, 8
_EPILOGUE_BIAS = 4
_PREFERENCE_MAX_WORKSPACE = 1


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductShape:
    """One matrix product as cuBLASLt sees it; `transposed` weights are [k, n]."""

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    bias: bool = False
    transposed: bool = False

    @property
    def key(self) -> str:
        """Return the shape as a name for the cache of algorithms."""
        marks = ("b" if self.bias else "") + ("t" if self.transposed else "")
        return f"{self.m}x{self.n}x{self.k}_{self.dtype}_{self.out_dtype}{marks}"


class _Plan:
    """Descriptors of one shape, and its algorithm once chosen."""

    def __init__(self, lib: ctypes.CDLL, shape: ProductShape) -> None:
        self.desc, self.a, self.b, self.d = c_void_p(), c_void_p(), c_void_p(), c_void_p()
        _check(lib.cublasLtMatmulDescCreate(byref(self.desc), _COMPUTE_32F, 0), "descriptor")
        self._set(lib, _DESC_TRANSA, c_int32(0 if shape.transposed else 1))
        self._set(lib, _DESC_TRANSB, c_int32(0))
        if shape.bias:
            self._set(lib, _DESC_EPILOGUE, c_int32(_EPILOGUE_BIAS))
        rows, columns = (shape.n, shape.k) if shape.transposed else (shape.k, shape.n)
        for layout, dtype, r, c in (
            (self.a, shape.dtype, rows, columns),
            (self.b, shape.dtype, shape.k, shape.m),
            (self.d, shape.out_dtype, shape.n, shape.m),
        ):
            _check(
                lib.cublasLtMatrixLayoutCreate(
                    byref(layout), _TYPES[dtype], c_uint64(r), c_uint64(c), c_int64(r)
                ),
                "layout",
            )
        self.algo: _Heuristic | None = None

    def _set(self, lib: ctypes.CDLL, name: int, value: ctypes._SimpleCData[int]) -> None:
        _check(
            lib.cublasLtMatmulDescSetAttribute(
                self.desc, name, byref(value), c_size_t(ctypes.sizeof(value))
            ),
            "descriptor attribute",
        )

    def set_bias(self, lib: ctypes.CDLL, address: int) -> None:
        self._set(lib, _DESC_BIAS_POINTER, c_uint64(address))


def _check(status: int, what: str) -> None:
    if status != 0:
        raise BlinkError(f"cuBLASLt {what}: status {status}")


def load_library() -> ctypes.CDLL:
    """Open libcublasLt from the nvidia-cublas wheel, a toolkit or the system.

    Raises:
        BlinkError: it is nowhere.
    """
    site = sysconfig.get_paths()["purelib"]
    patterns = (
        f"{site}/nvidia/cu13/lib/libcublasLt.so.13",
        f"{site}/nvidia/cublas/lib/libcublasLt.so.1*",
        "/usr/local/cuda/lib64/libcublasLt.so.13",
    )
    for path in (match for pattern in patterns for match in sorted(glob.glob(pattern))):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    try:
        return ctypes.CDLL("libcublasLt.so.13")
    except OSError as error:
        raise BlinkError(
            f"libcublasLt.so.13 cannot be opened: {error}", hint="pip install nvidia-cublas"
        ) from None


def library_version() -> int:
    """Return cuBLASLt's version, e.g. 130100."""
    library = load_library()
    library.cublasLtGetVersion.restype = c_size_t
    return int(library.cublasLtGetVersion())


class CublasLt:
    """A handle, one workspace and the plans made so far.

    `algorithms` maps `ProductShape.key` to the 8 words of a measured algorithm; give it what an
    earlier run returned and nothing is measured again.
    """

    def __init__(self, algorithms: dict[str, list[int]] | None = None) -> None:
        self._lib = load_library()
        self._handle = c_void_p()
        _check(self._lib.cublasLtCreate(byref(self._handle)), "handle")
        self.workspace = DeviceBuffer(WORKSPACE_BYTES, "the workspace of cuBLASLt")
        self.algorithms = dict(algorithms or {})
        self._plans: dict[ProductShape, _Plan] = {}
        self.num_measured = 0

    def product(
        self, shape: ProductShape, x: int, weight: int, bias: int, out: int, stream: Stream
    ) -> None:
        """Put a product into the stream (or the graph being captured); its algorithm must be
        chosen."""
        plan = self._plan(shape)
        if plan.algo is None:
            raise BlinkError(f"product {shape.key} has no algorithm yet")
        _check(self._run(plan, plan.algo, x, weight, bias, out, stream), f"product {shape.key}")

    def choose(
        self,
        shape: ProductShape,
        x: int,
        weights: Sequence[int],
        bias: int,
        out: int,
        stream: Stream,
    ) -> None:
        """Pick the fastest of the heuristic's candidates, on the real buffers; outside any capture.

        `weights` are several matrices of the shape (layers), taken in turn so that no cache holds
        them.
        """
        plan = self._plan(shape)
        if plan.algo is not None:
            return
        known = self.algorithms.get(shape.key)
        if known is not None:
            algo = _Heuristic()
            algo.algo[:] = known
            if self._run(plan, algo, x, weights[0], bias, out, stream) == 0:
                plan.algo = algo
                return
        able = [
            candidate
            for candidate in self._candidates(plan, shape)
            if self._run(plan, candidate, x, weights[0], bias, out, stream) == 0
        ]
        if not able:
            raise BlinkError(f"cuBLASLt has no algorithm for product {shape.key}")

        def milliseconds(candidate: _Heuristic, first_weight: int, repeats: int) -> float:
            start, end = Event(), Event()
            start.record(stream)
            for i in range(repeats):
                weight = weights[(first_weight + i) % len(weights)]
                self._run(plan, candidate, x, weight, bias, out, stream)
            end.record(stream)
            return end.milliseconds_since(start)

        def ranked(candidates: list[_Heuristic], passes: int, repeats: int) -> list[_Heuristic]:
            """Sort by the best time over several passes: clocks and caches drift."""
            best = [float("inf")] * len(candidates)
            for turn in range(passes * len(candidates)):
                at = turn % len(candidates)
                best[at] = min(best[at], milliseconds(candidates[at], turn, repeats))
            order = sorted(range(len(candidates)), key=lambda i: best[i])
            return [candidates[i] for i in order]

        is_large = shape.m * shape.n * shape.k >= 1 << 34
        able = ranked(able, 2, 2 if is_large else 6)
        plan.algo = ranked(able[:_FINALISTS], 3, 4)[0] if is_large else able[0]
        self.algorithms[shape.key] = list(plan.algo.algo)
        self.num_measured += 1

    def _plan(self, shape: ProductShape) -> _Plan:
        if shape not in self._plans:
            self._plans[shape] = _Plan(self._lib, shape)
        return self._plans[shape]

    def _candidates(self, plan: _Plan, shape: ProductShape) -> list[_Heuristic]:
        preference = c_void_p()
        _check(self._lib.cublasLtMatmulPreferenceCreate(byref(preference)), "preference")
        limit = c_uint64(WORKSPACE_BYTES)
        _check(
            self._lib.cublasLtMatmulPreferenceSetAttribute(
                preference, _PREFERENCE_MAX_WORKSPACE, byref(limit), c_size_t(8)
            ),
            "preference attribute",
        )
        count = _CANDIDATES if shape.m < 256 else _CANDIDATES_MANY_ROWS
        results = (_Heuristic * count)()
        found = c_int()
        status = self._lib.cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            plan.desc,
            plan.a,
            plan.b,
            plan.d,
            plan.d,
            preference,
            count,
            results,
            byref(found),
        )
        self._lib.cublasLtMatmulPreferenceDestroy(preference)
        _check(status, f"heuristic for product {shape.key}")
        return [results[i] for i in range(found.value) if results[i].state == 0]

    def _run(
        self,
        plan: _Plan,
        algo: _Heuristic,
        x: int,
        weight: int,
        bias: int,
        out: int,
        stream: Stream,
    ) -> int:
        if bias:
            plan.set_bias(self._lib, bias)
        one, zero = c_float(1.0), c_float(0.0)
        return int(
            self._lib.cublasLtMatmul(
                self._handle,
                plan.desc,
                byref(one),
                c_void_p(weight),
                plan.a,
                c_void_p(x),
                plan.b,
                byref(zero),
                c_void_p(out),
                plan.d,
                c_void_p(out),
                plan.d,
                byref(algo),
                c_void_p(self.workspace.address),
                c_size_t(WORKSPACE_BYTES),
                c_void_p(int(stream.handle)),
            )
        )

    def close(self) -> None:
        """Destroy handle and workspace."""
        if self._handle:
            self._lib.cublasLtDestroy(self._handle)
            self._handle = c_void_p()
            self.workspace.close()
