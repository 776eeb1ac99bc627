"""Checks of the kernels against float64 references: fresh inputs, poisoned outputs.

Each takes a harness and a case. tests/gpu runs them on a GPU, tests/emulation on the emulated
device.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from blink_runtime.cuda_experts import ExpertsShape
from blink_runtime.cuda_kernels import AttentionShape
from blinkc.engine.cuda_instances import GemvInstance, NarrowInstance
from tests.gpu.experts_step import ExpertsStep
from tests.gpu.harness import Harness, PagedStep, reference_attention, relative_error

# heads, KV heads, head size, window, softcap, sinks
AttentionCase = tuple[int, int, int, int, float, bool]


def takes(instance: GemvInstance, m: int, k: int) -> bool:
    """Say whether the instance is made for this many activations."""
    return m <= instance.max_rows and not (instance.input_shared and m * k > 50000)


def check_gemv(kernels: Harness, instance: GemvInstance, m: int, n: int, k: int) -> None:
    x, w, bias = kernels.of_previous(kernels.random(m, k)), kernels.random(n, k), kernels.random(n)
    out = kernels.poisoned(m, n)
    for b in (bias, None):
        item = kernels.kernels.gemv(
            x.data_ptr(),
            w.data_ptr(),
            b.data_ptr() if b is not None else 0,
            out.data_ptr(),
            m,
            n,
            k,
            instance,
        )
        kernels.run([item])
        want = x.double() @ w.double().T + (b.double() if b is not None else 0)
        assert relative_error(out, want) < 4e-3


def check_gemv_rows_do_not_depend_on_each_other(kernels: Harness, n: int, k: int) -> None:
    """A batch row that moves, or whose neighbours change, keeps its bits."""
    w, x = kernels.random(n, k), kernels.random(8, k)
    results = []
    for order in (range(8), reversed(range(8))):
        order = list(order)
        y = x[order].contiguous()
        y[order.index(3) - 1] = float("nan")
        y = kernels.of_previous(kernels.place(y))
        out = kernels.poisoned(8, n)
        item = kernels.kernels.gemv(y.data_ptr(), w.data_ptr(), 0, out.data_ptr(), 8, n, k)
        kernels.run([item])
        results.append(out[order.index(3)].clone())
    assert torch.equal(results[0], results[1])
    assert not torch.isnan(results[0]).any()


def narrow(
    kernels: Harness,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    instance: NarrowInstance | None = None,
) -> torch.Tensor:
    """Run the product over a poisoned output."""
    (m, k), n = x.shape, w.shape[0]
    out = kernels.poisoned(m, n)
    item = kernels.kernels.narrow(
        kernels.of_previous(x).data_ptr(),
        w.data_ptr(),
        bias.data_ptr() if bias is not None else 0,
        out.data_ptr(),
        m,
        n,
        k,
        instance,
    )
    kernels.run([item])
    return out


def check_narrow(kernels: Harness, instance: NarrowInstance | None, m: int, n: int, k: int) -> None:
    """An instance, or the one that is chosen; shares of k may be uneven or empty."""
    x, w, bias = kernels.random(m, k), kernels.random(n, k), kernels.random(n)
    for b in (bias, None):
        want = x.double() @ w.double().T + (b.double() if b is not None else 0)
        assert relative_error(narrow(kernels, x, w, b, instance), want) < 4e-3


def check_narrow_rows_do_not_depend_on_each_other(kernels: Harness, n: int, k: int) -> None:
    w, x = kernels.random(n, k), kernels.random(32, k)
    results = []
    for order in (range(32), reversed(range(32))):
        order = list(order)
        y = x[order].contiguous()
        y[order.index(3) - 1] = float("nan")
        results.append(narrow(kernels, kernels.place(y), w, None)[order.index(3)].clone())
    assert torch.equal(results[0], results[1])
    assert not torch.isnan(results[0]).any()


def check_decode_attention(
    kernels: Harness,
    case: AttentionCase,
    total: list[int],
    page_size: int,
    instance: int,
    seqlen: int = 1024,
) -> None:
    """`instance` counts those of the head size, modulo their number."""
    heads, kv_heads, dim, window, softcap, with_sinks = case
    step = PagedStep(
        kernels, [1] * len(total), total, kv_heads, dim, page_size, padding_rows=2, padding_tokens=2
    )
    shape = AttentionShape(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        window=window,
        softcap=softcap,
    )
    q = kernels.of_previous(kernels.random(step.batch, heads, dim))
    sinks = kernels.random(heads) if with_sinks else None
    partial_bytes = kernels.kernels.decode_partial_bytes(shape, step.batch, seqlen)
    partial = kernels.poisoned(partial_bytes // 4 + 1, dtype=torch.float32)
    arrivals = kernels.place(torch.zeros(step.batch * kv_heads, dtype=torch.int32))
    for _ in range(2):  # the second run proves that the arrival counters are back at zero
        out = kernels.poisoned(step.batch, heads, dim)
        kernels.run(
            kernels.kernels.decode_attention(
                step.addresses(),
                shape,
                q.data_ptr(),
                step.new_k.data_ptr(),
                step.new_v.data_ptr(),
                out.data_ptr(),
                step.kv.data_ptr(),
                sinks.data_ptr() if sinks is not None else 0,
                partial.data_ptr(),
                arrivals.data_ptr(),
                step.batch,
                seqlen,
                shape.decode_warps[instance % len(shape.decode_warps)],
            )
        )
        for row in range(step.num_rows):
            want = reference_attention(
                q[row : row + 1], step.k[row], step.v[row], shape.scale, window, softcap, sinks
            )
            assert relative_error(out[row : row + 1], want) < 8e-3, total[row]
        assert (out[step.num_rows :] == 0).all()
    step.check_pages()


def check_prefill_attention(
    kernels: Harness,
    case: AttentionCase,
    new: list[int],
    total: list[int],
    page_size: int = 16,
    query_scale: float = 1.0,
) -> None:
    heads, kv_heads, dim, window, softcap, with_sinks = case
    step = PagedStep(kernels, new, total, kv_heads, dim, page_size, 2, 14)
    shape = AttentionShape(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        window=window,
        softcap=softcap,
    )
    num_tokens = step.num_tokens + 14
    q = kernels.of_previous(kernels.random(num_tokens, heads, dim, scale=query_scale))
    sinks = kernels.random(heads) if with_sinks else None
    out = kernels.poisoned(num_tokens, heads, dim)
    kernels.run(
        kernels.kernels.prefill_attention(
            step.addresses(),
            shape,
            q.data_ptr(),
            step.new_k.data_ptr(),
            step.new_v.data_ptr(),
            out.data_ptr(),
            step.kv.data_ptr(),
            sinks.data_ptr() if sinks is not None else 0,
            step.batch,
            num_tokens,
        )
    )
    start = 0
    for row in range(step.num_rows):
        part = slice(start, start + new[row])
        want = reference_attention(
            q[part], step.k[row], step.v[row], shape.scale, window, softcap, sinks
        )
        assert relative_error(out[part], want) < 8e-3, (new[row], total[row])
        start += new[row]
    step.check_pages()


class SamplingParams(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("token_index", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_k", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        ("num_logprobs", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 6),
    )


def run_sampling(kernels: Harness, logits: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    """Sample each row of `logits`; rows and params correspond."""
    raw = b"".join(bytes(p) for p in params)
    device = kernels.place(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    ids = kernels.poisoned(len(params), dtype=torch.int32)
    kernels.of_previous(logits)
    step = PagedStep(kernels, [1], [1], 1, 64).addresses(device.data_ptr(), ids.data_ptr())
    counts = kernels.place(torch.zeros(logits.shape, dtype=torch.int32))
    kernels.run(kernels.kernels.sample(step, logits.data_ptr(), counts.data_ptr(), *logits.shape))
    return ids.tolist()


def params(
    temperature: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    index: int = 0,
) -> SamplingParams:
    """Parameters of an enabled row."""
    return SamplingParams(
        seed=seed,
        token_index=index,
        flags=1,
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
    )


def check_greedy_takes_the_lowest_of_equal_ids(kernels: Harness, vocab: int) -> None:
    logits = kernels.random(6, vocab, scale=3.0)
    logits[1, :] = 0.0
    logits[1, 5] = -0.0
    logits[2, vocab - 1] = 100.0
    logits[2, vocab // 2] = 100.0
    logits[3, vocab // 3] = float("nan")
    logits[4, vocab - 2] = float("inf")
    got = run_sampling(kernels, logits, [params(t) for t in (0, 1e-45, 0, 0, 0, 0)])
    assert got[3] == -1
    for row in (0, 1, 2, 4, 5):
        top = logits[row].max()
        assert got[row] == int((logits[row] == top).nonzero()[0, 0]), row


def reference_kept(logits: torch.Tensor, p: SamplingParams, slack: float = 0.0) -> torch.Tensor:
    """Which tokens may be drawn, and their probabilities; float64.

    `slack` moves top_p's threshold: where a sum of equal weights falls on it (12 of 20 at 0.6),
    rounding decides.
    """
    weights = torch.softmax(logits.double() / p.temperature, 0)
    # Stable: of equal logits the lower id comes first.
    kept = torch.sort(logits.double(), descending=True, stable=True).indices
    if p.top_k:
        kept = kept[: p.top_k]
    if p.top_p < 1.0:
        sums = weights[kept].cumsum(0)
        kept = kept[: int((sums < p.top_p * (1 + slack) * sums[-1]).sum()) + 1]
    kept = kept[weights[kept] >= p.min_p * weights.max()]
    result = torch.zeros_like(weights)
    result[kept] = weights[kept]
    return result / result.sum()


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.6},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 3, "top_p": 0.99, "min_p": 0.05},
]


def check_sampling_matches_its_distribution(
    kernels: Harness, setting: dict[str, Any], count: int = 4096, num_vocab: int = 300
) -> None:
    """Chi-square with fixed seeds; nothing outside the kept set is ever drawn. Ties are frequent in
    half types."""
    torch.manual_seed(5)
    row = kernels.random(num_vocab, scale=2.0)
    logits = kernels.place(row[None].repeat(count, 1).contiguous())
    got = run_sampling(
        kernels,
        logits,
        [params(seed=1234 + i // 64, index=i % 64, **setting) for i in range(count)],
    )
    want = reference_kept(row, params(**setting)).cpu()
    seen = torch.bincount(torch.tensor(got), minlength=num_vocab).double()
    assert float(seen[want == 0].sum()) == 0
    expected = want * count
    big = expected >= 5
    chi = float((((seen - expected) ** 2) / expected)[big].sum())
    freedom = max(int(big.sum()) - 1, 1)
    assert chi < freedom + 5 * (2 * freedom) ** 0.5 + 10
    again = run_sampling(
        kernels,
        logits,
        [params(seed=1234 + i // 64, index=i % 64, **setting) for i in range(count)],
    )
    assert again == got


def philox_uniform(seed: int, counter: int) -> float:
    """The first word of Philox4x32-10 for the block (counter, 0, 0, 0), in (0, 1)."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter, 0, 0, 0
    k0, k1 = seed & mask, seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return ((c0 >> 8) + 0.5) / 16777216.0


def check_sampling_inverts_the_sums(
    kernels: Harness, setting: dict[str, Any], num_rows: int, num_vocab: int
) -> None:
    """The token is where the seed's number falls among the kept weights, added in order of id.
    Every other row has a few values alone, so that thresholds fall among equals."""
    logits = kernels.random(num_rows, num_vocab, scale=2.0)
    logits[1::2] = logits[1::2].round()
    seeds = [0x1234_5678_9ABC + 0x1_0000_0001 * row for row in range(num_rows)]
    given = [params(seed=seed, index=3 * row, **setting) for row, seed in enumerate(seeds)]
    disabled = params(temperature=1.0)
    disabled.flags = 0
    got = run_sampling(kernels, logits, [*given[:-1], disabled])
    assert got[-1] == 0
    for row, token in enumerate(got[:-1]):
        at = philox_uniform(seeds[row], 3 * row)
        assert any(
            _is_drawn(reference_kept(logits[row], given[row], slack), token, at)
            for slack in (0.0, -1e-6, 1e-6)
        ), row


def _is_drawn(kept: torch.Tensor, token: int, at: float) -> bool:
    """Tell whether `at`, in (0, 1), falls on the token."""
    end = float(kept[: token + 1].sum())
    return bool(kept[token] > 0) and end - float(kept[token]) - 1e-5 < at < end + 1e-5


def check_sampling_of_wide_rows(
    kernels: Harness, num_rows: int = 8, num_vocab: int = 128256, draws: int = 4
) -> None:
    torch.manual_seed(9)
    logits = kernels.random(num_rows, num_vocab, scale=4.0)
    settings = [
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
        {"temperature": 0.8, "top_p": 0.95},
    ]
    for setting in settings:
        wanted = [reference_kept(row, params(**setting)) > 0 for row in logits]
        for index in range(draws):
            got = run_sampling(kernels, logits, [params(seed=7, index=index, **setting)] * num_rows)
            for r in range(num_rows):
                near = logits[r][got[r]] >= logits[r][wanted[r]].min()
                assert 0 <= got[r] < num_vocab
                assert bool(near), (setting, r)


def check_experts(kernels: Harness, num_tokens: int, sizes: tuple[int, int, int, int]) -> None:
    experts, choices, hidden, intermediate = sizes
    shape = ExpertsShape(
        num_experts=experts, num_choices=choices, hidden_size=hidden, intermediate_size=intermediate
    )
    padding = num_tokens // 3
    step = ExpertsStep(kernels, shape, num_tokens, padding)
    gate_up = kernels.random(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
    down = kernels.random(experts, hidden, intermediate, scale=intermediate**-0.5)
    for _ in range(2):
        kernels.run(step.launches(kernels.kernels, gate_up, down))
        want = torch.zeros(num_tokens, hidden, device=kernels.device, dtype=torch.float64)
        for t in range(num_tokens - padding):
            for c in range(choices):
                e = int(step.ids[t, c])
                both = gate_up[e].double() @ step.x[t].double()
                act = torch.nn.functional.silu(both[:intermediate]) * both[intermediate:]
                want[t] += step.weights[t, c].double() * (down[e].double() @ act)
        assert relative_error(step.out, want) < 1e-2
        assert (step.out[num_tokens - padding :] == 0).all()
