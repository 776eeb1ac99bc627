"""Experts of a mixture on the emulated device, against float64."""

from __future__ import annotations

import pytest

from tests.emulation.conftest import MakeHarness
from tests.gpu import kernel_checks

SIZES = [(16, 4, 256, 96), (8, 2, 128, 160), (64, 4, 160, 96)]  # experts, choices, hidden, inner


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts(
    emulated: MakeHarness, dtype: str, num_tokens: int, sizes: tuple[int, int, int, int]
) -> None:
    """A single token, and few: weights are streamed."""
    kernel_checks.check_experts(emulated(dtype), num_tokens, sizes)


@pytest.mark.parametrize(("dtype", "target"), [("bf16", "sm_90a"), ("fp16", "sm_100a")])
@pytest.mark.parametrize("num_tokens", [300, 520])
@pytest.mark.parametrize("sizes", [(4, 2, 160, 96), (16, 4, 128, 160)], ids=str)
def test_experts_in_tiles(
    emulated: MakeHarness, dtype: str, target: str, num_tokens: int, sizes: tuple[int, ...]
) -> None:
    """Many tokens: tiles of 128 assignments."""
    kernel_checks.check_experts(emulated(dtype, target), num_tokens, sizes)
