"""The kernels by warpgroup products against float64: products of few rows, prefill attention,
experts in tiles."""

from __future__ import annotations

import pytest

from blinkc.engine.cuda_instances import NARROW_INSTANCES, NarrowInstance
from tests.gpu import kernel_checks
from tests.gpu.harness import KernelHarness
from tests.gpu.kernel_checks import AttentionCase

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("instance", NARROW_INSTANCES, ids=lambda i: i.name)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1000, 64), (137, 1984), (8, 576), (300, 3136)])
def test_narrow(kernels: KernelHarness, instance: NarrowInstance, n: int, k: int) -> None:
    """Every instance at its full and at an odd number of rows."""
    for m in (instance.columns, instance.columns // 2 + 3):
        kernel_checks.check_narrow(kernels, instance, m, n, k)


@pytest.mark.parametrize("m", [1, 9, 16, 17, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(28672, 1024), (128256, 256), (6144, 4096), (128, 2048)])
def test_narrow_as_chosen(kernels: KernelHarness, m: int, n: int, k: int) -> None:
    kernel_checks.check_narrow(kernels, None, m, n, k)


def test_narrow_rows_do_not_depend_on_each_other(kernels: KernelHarness) -> None:
    kernel_checks.check_narrow_rows_do_not_depend_on_each_other(kernels, 1024, 4096)


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
def test_long_prefill(kernels: KernelHarness, case: AttentionCase, page_size: int) -> None:
    """Several tiles of keys and of pairs, chunks behind a history, rows of one token."""
    new, total = [300, 1, 513, 64, 77], [300, 900, 513, 1088, 1000]
    kernel_checks.check_prefill_attention(kernels, case, new, total, page_size, query_scale=2.0)
