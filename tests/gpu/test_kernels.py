"""Every kernel against a float64 reference: fresh inputs, poisoned outputs, odd sizes."""

from __future__ import annotations

from typing import Any

import pytest

from blinkc.engine.cuda_instances import GEMV_INSTANCES, GemvInstance
from tests.gpu import kernel_checks
from tests.gpu.harness import KernelHarness
from tests.gpu.kernel_checks import SETTINGS, AttentionCase

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
    if not kernel_checks.takes(instance, m, k):
        pytest.skip("this instance takes fewer rows")
    kernel_checks.check_gemv(kernels, instance, m, n, k)


def test_gemv_rows_do_not_depend_on_each_other(kernels: KernelHarness) -> None:
    kernel_checks.check_gemv_rows_do_not_depend_on_each_other(kernels, 1024, 4096)


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
@pytest.mark.parametrize(("page_size", "instance"), [(16, 0), (64, 0), (16, 1), (16, 2)])
def test_decode_attention(
    kernels: KernelHarness, case: AttentionCase, page_size: int, instance: int
) -> None:
    total = [1, 15, 16, 17, 64, 65, 333, 1023, 1024]
    kernel_checks.check_decode_attention(kernels, case, total, page_size, instance)


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_prefill_attention(kernels: KernelHarness, case: AttentionCase) -> None:
    new, total = [1, 64, 33, 200, 129, 7], [1, 64, 97, 200, 1025, 7]
    kernel_checks.check_prefill_attention(kernels, case, new, total)


@pytest.mark.parametrize("vocab", [7, 1000, 32000, 50257, 128256, 151936])
def test_greedy_takes_the_lowest_of_equal_ids(kernels: KernelHarness, vocab: int) -> None:
    kernel_checks.check_greedy_takes_the_lowest_of_equal_ids(kernels, vocab)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sampling_matches_its_distribution(kernels: KernelHarness, setting: dict[str, Any]) -> None:
    kernel_checks.check_sampling_matches_its_distribution(kernels, setting)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [300, 32000])
def test_sampling_inverts_the_sums(
    kernels: KernelHarness, setting: dict[str, Any], vocab: int
) -> None:
    kernel_checks.check_sampling_inverts_the_sums(kernels, setting, 64, vocab)


def test_sampling_of_wide_rows(kernels: KernelHarness) -> None:
    kernel_checks.check_sampling_of_wide_rows(kernels)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 64, 333])
@pytest.mark.parametrize(
    "sizes", [(128, 8, 2048, 768), (8, 2, 512, 1408), (64, 4, 160, 96)], ids=str
)
def test_experts(kernels: KernelHarness, num_tokens: int, sizes: tuple[int, int, int, int]) -> None:
    kernel_checks.check_experts(kernels, num_tokens, sizes)
