"""Penalties, logit bias, minimum length and logprobs on the emulated device."""

from __future__ import annotations

import pytest

from tests.emulation.conftest import MakeHarness
from tests.gpu import logit_checks


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_each_rule_alone(emulated: MakeHarness, dtype: str) -> None:
    logit_checks.check_duels(emulated(dtype), 1500)


@pytest.mark.parametrize(
    ("dtype", "vocab", "record_bytes"), [("bf16", 3000, 8), ("fp16", 40007, 64)]
)
def test_changes_decide_what_is_sampled(
    emulated: MakeHarness, dtype: str, vocab: int, record_bytes: int
) -> None:
    logit_checks.check_changes_decide_what_is_sampled(emulated(dtype), vocab, 12, record_bytes)


def test_what_is_forbidden_is_never_drawn(emulated: MakeHarness) -> None:
    logit_checks.check_what_is_forbidden_is_never_drawn(emulated("bf16"), 1000, 6)


@pytest.mark.parametrize(("dtype", "vocab"), [("bf16", 4), ("fp16", 1023), ("bf16", 50257)])
def test_logprobs(emulated: MakeHarness, dtype: str, vocab: int) -> None:
    logit_checks.check_logprobs(emulated(dtype), vocab, 8)


def test_logprobs_of_infinite_logits(emulated: MakeHarness) -> None:
    logit_checks.check_logprobs_of_infinite_logits(emulated("bf16"), 1100)


@pytest.mark.parametrize("target", ["sm_80"])
def test_logprobs_without_clusters(emulated: MakeHarness, target: str) -> None:
    """Penalties are not offered there; logprobs are."""
    logit_checks.check_logprobs(emulated("bf16", target), 1023, 8, changes_logits=False)
