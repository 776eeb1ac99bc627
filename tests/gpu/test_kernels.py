"""Every kernel against a float64 reference: fresh inputs, poisoned outputs, odd sizes."""

from __future__ import annotations

import ctypes

import pytest
import torch

from blink_runtime.cuda_experts import ExpertsShape, expert_launches, experts_scratch
from blink_runtime.cuda_kernels import AttentionShape
from blinkc.engine.cuda_instances import GEMV_INSTANCES, GemvInstance
from tests.gpu.harness import KernelHarness, PagedStep, reference_attention, relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("instance", GEMV_INSTANCES, ids=lambda i: i.name)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 4096, 4096),
        (1, 1000, 14336),
        (3, 6144, 2048),
        (8, 137, 96),
        (5, 8, 32),
        (16, 4096, 4096),
        (11, 2056, 14336),
        (16, 128256, 512),
    ],
)
def test_gemv(kernels: KernelHarness, instance: GemvInstance, m: int, n: int, k: int) -> None:
    if m > instance.max_rows or (instance.input_shared and m * k > 50000):
        pytest.skip("this instance takes fewer rows")
    x, w, bias = kernels.random(m, k), kernels.random(n, k), kernels.random(n)
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


def test_gemv_rows_do_not_depend_on_each_other(kernels: KernelHarness) -> None:
    """A batch row that moves, or whose neighbours change, keeps its bits."""
    w, x = kernels.random(1024, 4096), kernels.random(8, 4096)
    results = []
    for order in (range(8), reversed(range(8))):
        order = list(order)
        y = x[order].contiguous()
        y[order.index(3) - 1] = float("nan")
        out = kernels.poisoned(8, 1024)
        item = kernels.kernels.gemv(y.data_ptr(), w.data_ptr(), 0, out.data_ptr(), 8, 1024, 4096)
        kernels.run([item])
        results.append(out[order.index(3)].clone())
    assert torch.equal(results[0], results[1])
    assert not torch.isnan(results[0]).any()


ATTENTION = [
    # heads, KV heads, head size, window, softcap, sinks
    (32, 8, 128, 0, 0.0, False),
    (8, 8, 64, 0, 0.0, False),
    (14, 2, 64, 0, 0.0, True),
    (16, 1, 80, 0, 0.0, False),
    (12, 4, 96, 33, 0.0, False),
    (16, 4, 256, 100, 50.0, False),
    (32, 2, 128, 0, 0.0, False),
]


@pytest.mark.parametrize("case", ATTENTION, ids=str)
@pytest.mark.parametrize(("page_size", "many"), [(16, False), (64, False), (16, True)])
def test_decode_attention(kernels: KernelHarness, case: tuple, page_size: int, many: bool) -> None:
    heads, kv_heads, dim, window, softcap, with_sinks = case
    total = [1, 15, 16, 17, 64, 65, 333, 1023, 1024]
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
    q = kernels.random(step.batch, heads, dim)
    sinks = kernels.random(heads) if with_sinks else None
    seqlen = 1024
    partial_bytes = kernels.kernels.decode_partial_bytes(shape, step.batch, seqlen)
    partial = kernels.poisoned(partial_bytes // 4 + 1, dtype=torch.float32)
    arrivals = torch.zeros(step.batch * kv_heads, dtype=torch.int32, device="cuda")
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
                many,
            )
        )
        for row in range(step.num_rows):
            want = reference_attention(
                q[row : row + 1], step.k[row], step.v[row], shape.scale, window, softcap, sinks
            )
            assert relative_error(out[row : row + 1], want) < 8e-3, total[row]
        assert (out[step.num_rows :] == 0).all()
    step.check_pages()


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_prefill_attention(kernels: KernelHarness, case: tuple) -> None:
    heads, kv_heads, dim, window, softcap, with_sinks = case
    new, total = [1, 64, 33, 200, 129, 7], [1, 64, 97, 200, 1025, 7]
    step = PagedStep(kernels, new, total, kv_heads, dim, padding_rows=2, padding_tokens=14)
    shape = AttentionShape(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        window=window,
        softcap=softcap,
    )
    num_tokens = step.num_tokens + 14
    q = kernels.random(num_tokens, heads, dim)
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


def run_sampling(
    kernels: KernelHarness, logits: torch.Tensor, params: list[SamplingParams]
) -> list[int]:
    """Sample each row of `logits`; rows and params correspond."""
    raw = b"".join(bytes(p) for p in params)
    device = torch.frombuffer(bytearray(raw), dtype=torch.uint8).cuda()
    ids = kernels.poisoned(len(params), dtype=torch.int32)
    step = PagedStep(kernels, [1], [1], 1, 64).addresses(device.data_ptr(), ids.data_ptr())
    kernels.run(kernels.kernels.sample(step, logits.data_ptr(), len(params), logits.shape[1]))
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


@pytest.mark.parametrize("vocab", [7, 1000, 32000, 50257, 128256, 151936])
def test_greedy_takes_the_lowest_of_equal_ids(kernels: KernelHarness, vocab: int) -> None:
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


def reference_kept(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Which tokens may be drawn, and their probabilities; float64."""
    weights = torch.softmax(logits.double() / p.temperature, 0)
    # Stable: of equal logits the lower id comes first.
    kept = torch.sort(logits.double(), descending=True, stable=True).indices
    if p.top_k:
        kept = kept[: p.top_k]
    if p.top_p < 1.0:
        sums = weights[kept].cumsum(0)
        kept = kept[: int((sums < p.top_p * sums[-1]).sum()) + 1]
    kept = kept[weights[kept] >= p.min_p * weights.max()]
    result = torch.zeros_like(weights)
    result[kept] = weights[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.6},
        {"temperature": 0.9, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 3, "top_p": 0.99, "min_p": 0.05},
    ],
    ids=str,
)
def test_sampling_matches_its_distribution(kernels: KernelHarness, setting: dict) -> None:
    """Chi-square with fixed seeds; nothing outside the kept set is ever drawn. Ties are frequent in
    half types."""
    torch.manual_seed(5)
    row = kernels.random(300, scale=2.0)
    count = 4096
    logits = row[None].repeat(count, 1).contiguous()
    got = run_sampling(
        kernels,
        logits,
        [params(seed=1234 + i // 64, index=i % 64, **setting) for i in range(count)],
    )
    want = reference_kept(row, params(**setting)).cpu()
    seen = torch.bincount(torch.tensor(got), minlength=300).double()
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


def test_sampling_of_wide_rows(kernels: KernelHarness) -> None:
    torch.manual_seed(9)
    logits = kernels.random(8, 128256, scale=4.0)
    settings = [
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
        {"temperature": 0.8, "top_p": 0.95},
    ]
    for setting in settings:
        wanted = [reference_kept(row, params(**setting)) > 0 for row in logits]
        for index in range(4):
            got = run_sampling(kernels, logits, [params(seed=7, index=index, **setting)] * 8)
            for r in range(8):
                near = logits[r][got[r]] >= logits[r][wanted[r]].min()
                assert 0 <= got[r] < 128256
                assert bool(near), (setting, r)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 64, 333])
@pytest.mark.parametrize(
    "sizes", [(128, 8, 2048, 768), (8, 2, 512, 1408), (64, 4, 160, 96)], ids=str
)
def test_experts(kernels: KernelHarness, num_tokens: int, sizes: tuple) -> None:
    experts, choices, hidden, intermediate = sizes
    shape = ExpertsShape(
        num_experts=experts, num_choices=choices, hidden_size=hidden, intermediate_size=intermediate
    )
    x = kernels.random(num_tokens, hidden)
    ids = torch.stack([torch.randperm(experts)[:choices] for _ in range(num_tokens)])
    ids = ids.to(torch.int32).cuda()
    weights = torch.softmax(torch.randn(num_tokens, choices, device="cuda"), -1).to(kernels.dtype)
    gate_up = kernels.random(experts, 2 * intermediate, hidden, scale=hidden**-0.5)
    down = kernels.random(experts, hidden, intermediate, scale=intermediate**-0.5)
    out = kernels.poisoned(num_tokens, hidden)
    scratch = {
        name: kernels.poisoned(size // 4 + 4, dtype=torch.int32)
        for name, size in experts_scratch(shape, num_tokens).items()
    }
    padding = num_tokens // 3
    paged = PagedStep(
        kernels, [num_tokens - padding], [num_tokens - padding], 1, 64, padding_tokens=padding
    )
    step = paged.addresses()  # the buffers belong to `paged`
    for _ in range(2):
        kernels.run(
            expert_launches(
                kernels.kernels,
                step,
                shape,
                x.data_ptr(),
                ids.data_ptr(),
                weights.data_ptr(),
                gate_up.data_ptr(),
                down.data_ptr(),
                out.data_ptr(),
                {n: t.data_ptr() for n, t in scratch.items()},
                num_tokens,
            )
        )
        want = torch.zeros(num_tokens, hidden, device="cuda", dtype=torch.float64)
        for t in range(num_tokens - padding):
            for c in range(choices):
                e = int(ids[t, c])
                both = gate_up[e].double() @ x[t].double()
                act = torch.nn.functional.silu(both[:intermediate]) * both[intermediate:]
                want[t] += weights[t, c].double() * (down[e].double() @ act)
        assert relative_error(out, want) < 1e-2
        assert (out[num_tokens - padding :] == 0).all()
