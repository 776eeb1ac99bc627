"""What changes logits before sampling, and logprobs: the sampler's kernels against definitions."""

from __future__ import annotations

import pytest

from tests.gpu import logit_checks
from tests.gpu.harness import KernelHarness

pytestmark = pytest.mark.gpu


def test_each_rule_alone(kernels: KernelHarness) -> None:
    logit_checks.check_duels(kernels, 1500)


@pytest.mark.parametrize(("vocab", "record_bytes"), [(3000, 8), (40007, 64), (128256, 64)])
def test_changes_decide_what_is_sampled(
    kernels: KernelHarness, vocab: int, record_bytes: int
) -> None:
    logit_checks.check_changes_decide_what_is_sampled(kernels, vocab, 64, record_bytes)


def test_what_is_forbidden_is_never_drawn(kernels: KernelHarness) -> None:
    logit_checks.check_what_is_forbidden_is_never_drawn(kernels, 32000, 64)


@pytest.mark.parametrize("vocab", [4, 1023, 50257, 151936])
def test_logprobs(kernels: KernelHarness, vocab: int) -> None:
    logit_checks.check_logprobs(kernels, vocab, 64)


def test_logprobs_of_infinite_logits(kernels: KernelHarness) -> None:
    logit_checks.check_logprobs_of_infinite_logits(kernels, 1100)
