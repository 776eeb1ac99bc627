"""Sampling on the emulated device: clusters of eight blocks a row, and one block without them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulation.conftest import MakeHarness
from tests.gpu import kernel_checks
from tests.gpu.kernel_checks import SETTINGS

TARGETS = ("sm_90a", "sm_80")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "vocab"), [("bf16", 7), ("fp16", 1000), ("bf16", 50257)])
def test_greedy_takes_the_lowest_of_equal_ids(
    emulated: MakeHarness, target: str, dtype: str, vocab: int
) -> None:
    kernel_checks.check_greedy_takes_the_lowest_of_equal_ids(emulated(dtype, target), vocab)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(("dtype", "vocab"), [("bf16", 300), ("fp16", 2500)])
def test_sampling_inverts_the_sums(
    emulated: MakeHarness, target: str, setting: dict[str, Any], dtype: str, vocab: int
) -> None:
    kernels = emulated(dtype, target)
    kernel_checks.check_sampling_inverts_the_sums(kernels, setting, 9, vocab)


@pytest.mark.parametrize(("target", "dtype"), [("sm_90a", "bf16"), ("sm_80", "fp16")])
def test_sampling_of_wide_rows(emulated: MakeHarness, target: str, dtype: str) -> None:
    kernel_checks.check_sampling_of_wide_rows(emulated(dtype, target), 2, 40000, 2)
