"""The CPU kernels against numpy: products, paged attention, experts, sampling, threads."""

from __future__ import annotations

import ctypes
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blinkc.codegen.compile_cpu import compile_cpu

U32 = ctypes.c_uint32
F32 = ctypes.c_float


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    source = Path(__file__).with_name("cpu_kernels.cpp").read_text()
    out = tmp_path_factory.mktemp("kernels") / "kernels.so"
    compile_cpu({"cpu_kernels.cpp": source}, out=out)
    yield ctypes.CDLL(str(out))


def pointer(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def to_bf16(array: np.ndarray) -> np.ndarray:
    """Cut fp32 numbers to what bfloat16 holds."""
    return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)


def gemm(
    kernels: ctypes.CDLL, w: np.ndarray, x: np.ndarray, bias: np.ndarray | None = None,
    *, transposed: bool = False, threads: int = 2,
) -> tuple[np.ndarray, bool]:  # fmt: skip
    n, k = w.shape[::-1] if transposed else w.shape
    out = np.full((len(x), n), np.nan, np.float32)
    half = kernels.test_gemm(
        pointer(w), U32(n), U32(k), int(transposed), pointer(x), U32(len(x)), pointer(bias),
        U32(threads), pointer(out),
    )  # fmt: skip
    return out, bool(half)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (16, 8), (37, 65), (200, 257), (49, 2100)])
def test_gemm_equals_numpy(kernels: ctypes.CDLL, n: int, k: int, half: bool) -> None:
    rng = np.random.default_rng(n + k)
    w = rng.standard_normal((n, k)).astype(np.float32)
    w = to_bf16(w) if half else w
    bias = rng.standard_normal(n).astype(np.float32)
    for rows in (1, 2, 3, 5, 6, 7, 8, 13, 24, 61, 95, 96, 100):
        x = rng.standard_normal((rows, k)).astype(np.float32)
        got, packed_half = gemm(kernels, w, x, bias)
        assert packed_half == half
        expected = x.astype(np.float64) @ w.T.astype(np.float64) + bias
        np.testing.assert_allclose(got, expected, atol=1e-6 * k + 1e-5)
        turned = np.ascontiguousarray(w.T)
        again, _ = gemm(kernels, turned, x, bias, transposed=True)
        assert again.tobytes() == got.tobytes()


@pytest.mark.parametrize("half", [False, True])
def test_gemm_is_bitwise_independent_of_rows_and_threads(kernels: ctypes.CDLL, half: bool) -> None:
    # Guards every tile shape, both paths and blocks of k: a request's logits may not depend on who
    # else is in the batch.
    rng = np.random.default_rng(5)
    w = rng.standard_normal((83, 2305)).astype(np.float32)
    w = to_bf16(w) if half else w
    x = rng.standard_normal((200, 2305)).astype(np.float32)
    whole, _ = gemm(kernels, w, x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 24, 64, 95, 96, 193):
        part, _ = gemm(kernels, w, x[:rows], threads=1 + rows % 3)
        assert part.tobytes() == whole[:rows].tobytes(), rows


def test_bf16_packing_changes_no_bit(kernels: ctypes.CDLL) -> None:
    rng = np.random.default_rng(6)
    w = to_bf16(rng.standard_normal((40, 75)).astype(np.float32))
    x = rng.standard_normal((9, 75)).astype(np.float32)
    half, is_half = gemm(kernels, w, x)
    spoiled = np.vstack([w, np.full((1, 75), 0.1, np.float32)])  # one number more: fp32 panels
    wide, is_wide = gemm(kernels, spoiled, x)
    assert is_half and not is_wide
    assert np.ascontiguousarray(wide[:, :40]).tobytes() == half.tobytes()


class Sizes(ctypes.Structure):
    """AttentionSizes."""

    _fields_ = [
        (name, U32)
        for name in (
            "num_tokens",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "page_size",
            "max_pages",
            "num_pages",
            "window",
        )
    ] + [("scale", F32), ("softcap", F32)]


class Attention:
    """A paged cache with scattered pages, and the same sequences as plain arrays."""

    def __init__(self, kernels: ctypes.CDLL, *, lanes: int, heads: tuple[int, int], d: int,
                 page: int = 16, pages: int = 8, window: int = 0, softcap: float = 0.0,
                 sinks: bool = False, seed: int = 0) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.kernels, self.d, self.heads = kernels, d, heads
        self.page, self.pages, self.window, self.softcap = page, pages, window, softcap
        total = 1 + lanes * pages
        self.cache = np.full((total, 2, heads[1], page, d), np.nan, np.float32)
        order = rng.permutation(np.arange(1, total)).astype(np.int32)
        self.table = np.vstack([order.reshape(lanes, pages), np.zeros((1, pages), np.int32)])
        self.sinks = rng.standard_normal(heads[0]).astype(np.float32) if sinks else None
        self.scale = 1.0 / math.sqrt(d)
        shape = (lanes, page * pages)
        self.q = rng.standard_normal((*shape, heads[0], d)).astype(np.float32) * 2
        self.k = rng.standard_normal((*shape, heads[1], d)).astype(np.float32)
        self.v = rng.standard_normal((*shape, heads[1], d)).astype(np.float32)

    def step(self, spans: list[tuple[int, int, int]], *, threads: int = 2,
             padding: int = 0) -> list[np.ndarray]:  # fmt: skip
        """Run tokens [start, end) of each lane in one step; returns one output per span."""
        q, k, v, positions, rows = [], [], [], [], []
        for row, (lane, start, end) in enumerate(spans):
            q.append(self.q[lane, start:end])
            k.append(self.k[lane, start:end])
            v.append(self.v[lane, start:end])
            positions += range(start, end)
            rows += [row] * (end - start)
        for _ in range(padding):
            for part, source in ((q, self.q), (k, self.k), (v, self.v)):
                part.append(np.full_like(source[0, :1], np.nan))
            positions.append(0)
            rows.append(-1)
        arrays = [np.ascontiguousarray(np.concatenate(part)) for part in (q, k, v)]
        lanes = np.array([lane for lane, _, _ in spans], np.int32)
        out = np.full_like(arrays[0], np.nan)
        sizes = Sizes(len(rows), *self.heads, self.d, self.page, self.pages, len(self.cache),
                      self.window, self.scale, self.softcap)  # fmt: skip
        as_int = [np.array(values, np.int32) for values in (positions, rows)]
        self.kernels.test_attention(
            ctypes.byref(sizes), *map(pointer, arrays), pointer(self.sinks), pointer(self.cache),
            pointer(as_int[0]), pointer(as_int[1]), pointer(lanes), pointer(self.table),
            U32(threads), pointer(out),
        )  # fmt: skip
        counts = np.cumsum([end - start for _, start, end in spans])
        return np.split(out, counts)[: len(spans)]

    def expected(self, lane: int, start: int, end: int) -> np.ndarray:
        """Attention in float64, straight from the definition."""
        result = []
        group = self.heads[0] // self.heads[1]
        for position in range(start, end):
            first = max(0, position + 1 - self.window) if self.window else 0
            for head in range(self.heads[0]):
                k = self.k[lane, first : position + 1, head // group].astype(np.float64)
                v = self.v[lane, first : position + 1, head // group].astype(np.float64)
                s = k @ self.q[lane, position, head].astype(np.float64) * self.scale
                if self.softcap:
                    s = self.softcap * np.tanh(s / self.softcap)
                if self.sinks is not None:
                    s = np.append(s, self.sinks[head])
                p = np.exp(s - s.max())
                p /= p.sum()
                result.append(p[: len(v)] @ v)
        return np.array(result).reshape(end - start, self.heads[0], self.d)


@pytest.mark.parametrize("d", [8, 20, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 4)])
def test_attention_equals_definition(kernels: ctypes.CDLL, d: int, heads: tuple[int, int]) -> None:
    a = Attention(kernels, lanes=3, heads=heads, d=d)
    for spans in ([(0, 0, 17), (2, 0, 1), (1, 0, 33)], [(0, 17, 18), (1, 33, 34), (2, 1, 2)],
                  [(1, 34, 50), (0, 18, 47)]):  # fmt: skip
        for span, got in zip(spans, a.step(spans), strict=True):
            np.testing.assert_allclose(got, a.expected(*span), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"window": 5}, {"window": 16}, {"window": 1}, {"softcap": 3.0}, {"sinks": True},
     {"window": 7, "softcap": 2.0, "sinks": True}, {"page": 4}, {"page": 1, "pages": 60}],
)  # fmt: skip
def test_attention_options(kernels: ctypes.CDLL, options: dict[str, object]) -> None:
    a = Attention(kernels, lanes=2, heads=(4, 2), d=16, **{"pages": 16, **options})  # type: ignore[arg-type]
    for spans in ([(0, 0, 15), (1, 0, 18)], [(0, 15, 16), (1, 18, 19)], [(0, 16, 40)]):
        for span, got in zip(spans, a.step(spans), strict=True):
            np.testing.assert_allclose(got, a.expected(*span), atol=2e-6, rtol=1e-5)


def test_attention_is_bitwise_independent_of_the_step(kernels: ctypes.CDLL) -> None:
    # The same tokens: alone, in chunks, beside others, with padding, with more threads.
    alone = Attention(kernels, lanes=2, heads=(6, 2), d=64)
    whole = alone.step([(0, 0, 50)], threads=1)[0]
    mixed = Attention(kernels, lanes=2, heads=(6, 2), d=64)
    parts = [
        mixed.step([(1, 0, 9), (0, 0, 21)], threads=3, padding=5)[1],
        mixed.step([(0, 21, 49), (1, 9, 10)], threads=2)[0],
        mixed.step([(1, 10, 11), (0, 49, 50)], padding=2)[1],
    ]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_padding_touches_no_page(kernels: ctypes.CDLL) -> None:
    a = Attention(kernels, lanes=1, heads=(2, 1), d=8)
    a.step([(0, 0, 3)])
    before = a.cache.copy()
    out = a.step([(0, 3, 4)], padding=6)[0]
    assert np.isfinite(out).all()
    changed = np.argwhere(~((a.cache == before) | (np.isnan(a.cache) & np.isnan(before))))
    assert {tuple(c[:4]) for c in changed} == {(a.table[0, 0], part, 0, 3) for part in (0, 1)}


@pytest.mark.parametrize("activation", [0, 1, 2])
def test_experts_equal_numpy(kernels: ctypes.CDLL, activation: int) -> None:
    rng = np.random.default_rng(activation)
    tokens, hidden, middle, experts, per_token = 11, 24, 20, 5, 2
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    ids = np.array([rng.choice(experts, per_token, replace=False) for _ in range(tokens)], np.int32)
    ids[4] = experts + 3  # a padding row: no expert
    weights = rng.random((tokens, per_token)).astype(np.float32)
    gate_up = rng.standard_normal((experts, 2 * middle, hidden)).astype(np.float32)
    down = rng.standard_normal((experts, hidden, middle)).astype(np.float32)

    def run(rows: slice, threads: int) -> np.ndarray:
        part = [np.ascontiguousarray(a[rows]) for a in (x, ids, weights)]
        out = np.full_like(part[0], np.nan)
        kernels.test_experts(
            *map(pointer, part), pointer(gate_up), pointer(down), U32(len(part[0])), U32(hidden),
            U32(middle), U32(experts), U32(per_token), U32(activation), U32(threads), pointer(out),
        )  # fmt: skip
        return out

    gelu = np.vectorize(lambda g: 0.5 * g * (1 + math.erf(g / math.sqrt(2))))
    gelu_tanh = lambda g: 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))  # noqa: E731
    act = [lambda g: g / (1 + np.exp(-g)), gelu, gelu_tanh][activation]
    expected = np.zeros((tokens, hidden))
    for t in range(tokens):
        for j in range(per_token):
            if ids[t, j] < experts:
                both = gate_up[ids[t, j]].astype(np.float64) @ x[t]
                inner = act(both[:middle]) * both[middle:]
                expected[t] += weights[t, j] * (down[ids[t, j]].astype(np.float64) @ inner)
    whole = run(slice(None), 2)
    np.testing.assert_allclose(whole, expected, atol=2e-4, rtol=1e-4)
    for t in range(tokens):
        assert run(slice(t, t + 1), 1).tobytes() == whole[t].tobytes()


def sample(
    kernels: ctypes.CDLL, logits: np.ndarray, count: int, *, seed: int = 1,
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
) -> np.ndarray:  # fmt: skip
    out = np.zeros(count, np.int32)
    logits = np.ascontiguousarray(logits, dtype=np.float32)
    kernels.test_sample(
        pointer(logits), U32(len(logits)), ctypes.c_uint64(seed), F32(temperature), U32(top_k),
        F32(top_p), F32(min_p), U32(count), pointer(out),
    )  # fmt: skip
    return out


def kept_tokens(logits: np.ndarray, temperature: float, top_k: int, top_p: float,
                min_p: float) -> np.ndarray:  # fmt: skip
    """Probabilities after the cuts, from the definition."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    p = np.exp(scaled)
    order = np.lexsort((np.arange(len(p)), -logits))
    keep = np.zeros(len(p), bool)
    order = order[: top_k or len(p)]
    total = np.cumsum(p[order]) / p[order].sum()
    size = int(np.searchsorted(total, top_p) + 1) if top_p < 1 else len(order)
    keep[order[:size]] = True
    keep &= p >= min_p * p.max()
    return np.where(keep, p, 0) / p[keep].sum()


CUTS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.6},
    {"top_p": 0.9, "top_k": 12, "temperature": 1.3},
    {"min_p": 0.1},
    {"min_p": 0.05, "top_p": 0.95, "top_k": 20},
    {"top_k": 1},
    {"top_p": 1e-6},
]


@pytest.mark.parametrize("cuts", CUTS)
def test_frequencies_match_the_distribution(kernels: ctypes.CDLL, cuts: dict[str, float]) -> None:
    logits = np.random.default_rng(3).standard_normal(60).astype(np.float32) * 2
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | cuts
    p = kept_tokens(logits, **options)  # type: ignore[arg-type]
    count = 40_000
    got = np.bincount(sample(kernels, logits, count, seed=99, **options), minlength=60)  # type: ignore[arg-type]
    assert got[p == 0].sum() == 0, "a token outside the kept set was emitted"
    common = p * count >= 5
    expected = np.append(p[common], p[~common].sum()) * count
    observed = np.append(got[common], got[~common].sum())
    chi_square = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = max(len(expected) - 1, 1)
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # about one seed in ten thousand


def test_nucleus_in_a_large_vocabulary(kernels: ctypes.CDLL) -> None:
    # Wide nuclei need several rounds of partial sorting; no token outside the prefix may come.
    logits = (np.random.default_rng(4).standard_normal(20_000)).astype(np.float32)
    for top_p in (0.05, 0.5, 0.99):
        p = kept_tokens(logits, 1.0, 0, top_p, 0.0)
        got = sample(kernels, logits, 400, top_p=top_p)
        assert (p[got] > 0).all()
        assert len(set(got.tolist())) > 1


def test_ties_are_broken_by_id(kernels: ctypes.CDLL) -> None:
    logits = np.zeros(50, np.float32)
    assert sample(kernels, logits, 3, temperature=0.0).tolist() == [0, 0, 0]
    assert set(sample(kernels, logits, 500, top_k=3).tolist()) == {0, 1, 2}
    assert set(sample(kernels, logits[:40], 500, top_p=0.125).tolist()) == set(range(5))
    logits[[17, 31]] = 2.0
    assert sample(kernels, logits, 1, temperature=0.0)[0] == 17
    assert set(sample(kernels, logits, 200, top_k=1).tolist()) == {17}


def test_greedy_temperatures_and_nan(kernels: ctypes.CDLL) -> None:
    logits = np.random.default_rng(8).standard_normal(97).astype(np.float32)
    best = int(logits.argmax())
    every_cut: list[dict[str, Any]] = [
        {}, {"top_p": 0.9}, {"top_p": 0.0}, {"top_k": 5}, {"min_p": 0.3},
        {"top_p": 0.9, "top_k": 40},
    ]  # fmt: skip
    for temperature in (0.0, 1e-45, 1e-6, -1.0, math.nan):
        for cuts in every_cut:
            assert set(sample(kernels, logits, 5, temperature=temperature, **cuts)) == {best}
    for at in (0, 50, 96):
        spoiled = logits.copy()
        spoiled[at] = np.nan
        for temperature in (0.0, 1.0):
            assert sample(kernels, spoiled, 1, temperature=temperature)[0] == -1
    masked = np.full(97, -np.inf, np.float32)
    masked[5] = 1.0
    assert set(sample(kernels, masked, 50).tolist()) == {5}
    assert sample(kernels, np.full(9, -np.inf), 1)[0] == 0
    assert sample(kernels, np.where(np.arange(9) == 4, np.inf, 0.0), 1)[0] == 4


def test_same_seed_same_tokens(kernels: ctypes.CDLL) -> None:
    logits = np.random.default_rng(9).standard_normal(97).astype(np.float32)
    first = sample(kernels, logits, 64, seed=7)
    assert (first == sample(kernels, logits, 64, seed=7)).all()
    assert (first != sample(kernels, logits, 64, seed=8)).any()
    assert (first != sample(kernels, logits, 64, seed=7 + (1 << 32))).any()  # the high half counts


def test_philox_known_answer(kernels: ctypes.CDLL) -> None:
    # Random123's known answers for philox4x32-10, counter and key zero; and key only.
    kernels.test_philox.restype = U32
    assert kernels.test_philox(ctypes.c_uint64(0), U32(0)) == 0x6627E8D5


def test_team_runs_every_chunk_once(kernels: ctypes.CDLL) -> None:
    # Some chunks stall; threads come late, miss phases and whole runs, and must do nothing twice.
    for threads in (1, 2, 5):
        for joined in (0, 1):
            assert kernels.test_team(U32(threads), U32(150), U32(23), U32(7), joined) == 0
            assert kernels.test_team(U32(threads), U32(10), U32(200), U32(3), joined) == 0


def test_threads_follow_the_affinity_mask(kernels: ctypes.CDLL) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert kernels.test_usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 1 <= kernels.test_usable_cpus() <= len(allowed)


START_MANY_THREADS = """
import ctypes, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
kernels = ctypes.CDLL(sys.argv[1])
error = ctypes.create_string_buffer(200)
code = kernels.test_start_team(ctypes.c_uint32(4096), error, 200)
print(code, error.value.decode())
"""


def test_threads_that_the_system_does_not_give_are_an_error(kernels: ctypes.CDLL) -> None:
    """The bug: the process was aborted, "terminate called without an active exception"."""
    done = subprocess.run(
        [sys.executable, "-c", START_MANY_THREADS, kernels._name],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    assert re.match(r"1 [0-9]+ of 4096 threads started: .+", done.stdout)
