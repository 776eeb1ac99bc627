"""The kernels by warpgroup products against float64: products of few rows, prefill attention,
experts in tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blink_runtime.cuda_kernels import AttentionShape
from blinkc.engine.cuda_instances import NARROW_INSTANCES, NarrowInstance
from tests.gpu.harness import KernelHarness, PagedStep, reference_attention, relative_error

pytestmark = pytest.mark.gpu


def narrow(
    kernels: KernelHarness,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    instance: NarrowInstance | None = None,
) -> torch.Tensor:
    """Run the product over a poisoned output."""
    (m, k), n = x.shape, w.shape[0]
    out = kernels.poisoned(m, n)
    item = kernels.kernels.narrow(
        x.data_ptr(),
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


@pytest.mark.parametrize("instance", NARROW_INSTANCES, ids=lambda i: i.name)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1000, 64), (137, 1984), (8, 576), (300, 3136)])
def test_narrow(kernels: KernelHarness, instance: NarrowInstance, n: int, k: int) -> None:
    """Every instance at its full and at an odd number of rows; shares of k may be uneven or
    empty."""
    for m in (instance.columns, instance.columns // 2 + 3):
        x, w, bias = kernels.random(m, k), kernels.random(n, k), kernels.random(n)
        for b in (bias, None):
            want = x.double() @ w.double().T + (b.double() if b is not None else 0)
            assert relative_error(narrow(kernels, x, w, b, instance), want) < 4e-3


@pytest.mark.parametrize("m", [1, 9, 16, 17, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(28672, 1024), (128256, 256), (6144, 4096), (128, 2048)])
def test_narrow_as_chosen(kernels: KernelHarness, m: int, n: int, k: int) -> None:
    x, w = kernels.random(m, k), kernels.random(n, k)
    want = x.double() @ w.double().T
    assert relative_error(narrow(kernels, x, w, None), want) < 4e-3


def test_narrow_rows_do_not_depend_on_each_other(kernels: KernelHarness) -> None:
    w, x = kernels.random(1024, 4096), kernels.random(32, 4096)
    results = []
    for order in (range(32), reversed(range(32))):
        order = list(order)
        y = x[order].contiguous()
        y[order.index(3) - 1] = float("nan")
        results.append(narrow(kernels, y, w, None)[order.index(3)].clone())
    assert torch.equal(results[0], results[1])
    assert not torch.isnan(results[0]).any()


PREFILL = [
    # heads, KV heads, head size, window, softcap, sinks
    (32, 8, 128, 0, 0.0, False),
    (32, 4, 128, 0, 0.0, True),
    (4, 4, 64, 0, 30.0, False),
    (14, 2, 64, 200, 0.0, False),
    (10, 5, 80, 0, 0.0, False),
    (6, 2, 96, 130, 0.0, True),
    (8, 4, 256, 0, 50.0, False),
    (16, 1, 256, 64, 0.0, False),
]


@pytest.mark.parametrize("case", PREFILL, ids=str)
@pytest.mark.parametrize("page_size", [16, 128])
def test_long_prefill(kernels: KernelHarness, case: tuple[Any, ...], page_size: int) -> None:
    """Several tiles of keys and of pairs, chunks behind a history, rows of one token."""
    heads, kv_heads, dim, window, softcap, with_sinks = case
    new, total = [300, 1, 513, 64, 77], [300, 900, 513, 1088, 1000]
    step = PagedStep(kernels, new, total, kv_heads, dim, page_size, 3, 21)
    shape = AttentionShape(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        window=window,
        softcap=softcap,
    )
    num_tokens = step.num_tokens + 21
    q = kernels.random(num_tokens, heads, dim, scale=2.0)
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
