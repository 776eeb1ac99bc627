"""Attention on the emulated device, against float64."""

from __future__ import annotations

import pytest

from tests.emulation.conftest import MakeHarness
from tests.gpu import kernel_checks
from tests.gpu.kernel_checks import AttentionCase

DECODE = [
    # heads, KV heads, head size, window, softcap, sinks
    (8, 2, 128, 0, 0.0, False),
    (4, 4, 64, 0, 0.0, False),
    (14, 2, 64, 0, 0.0, True),
    (16, 1, 80, 0, 0.0, True),
    (6, 2, 80, 0, 20.0, False),
    (6, 2, 96, 33, 0.0, False),
    (24, 2, 96, 0, 0.0, False),
    (8, 2, 256, 100, 50.0, False),
    (16, 1, 256, 0, 0.0, True),
    (16, 1, 128, 0, 0.0, False),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("case", DECODE, ids=str)
@pytest.mark.parametrize(("page_size", "instance"), [(16, 0), (64, 1), (16, 2)])
def test_decode_attention(
    emulated: MakeHarness, dtype: str, case: AttentionCase, page_size: int, instance: int
) -> None:
    """Rows of one to three splits, whose last one ends in every part of a chunk."""
    total = [1, 15, 16, 17, 64, 333, 1023, 1024]
    kernels = emulated(dtype, num_multiprocessors=60)
    kernel_checks.check_decode_attention(kernels, case, total, page_size, instance)


PREFILL = [
    (8, 2, 128, 0, 0.0, False),
    (2, 2, 64, 0, 30.0, False),
    (14, 2, 64, 70, 0.0, True),
    (10, 5, 80, 0, 0.0, False),
    (6, 2, 96, 130, 0.0, True),
    (4, 2, 256, 0, 50.0, False),
    (16, 1, 256, 64, 0.0, False),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("case", PREFILL, ids=str)
@pytest.mark.parametrize(
    ("target", "page_size"), [("sm_90a", 16), ("sm_90a", 128), ("sm_100a", 32)]
)
def test_prefill_attention(
    emulated: MakeHarness, dtype: str, case: AttentionCase, target: str, page_size: int
) -> None:
    """Several tiles of keys and of pairs, chunks behind a history, rows of one token."""
    new, total = [70, 1, 33, 64, 7], [70, 130, 97, 64, 200]
    kernels = emulated(dtype, target)
    kernel_checks.check_prefill_attention(kernels, case, new, total, page_size, query_scale=2.0)
