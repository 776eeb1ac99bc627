"""Whole models on a GPU: served greedy tokens against transformers in fp32, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from blink_runtime.cuda_bundle import load_cuda_target, read_plan
from blink_runtime.cuda_driver import MappedBuffer
from blink_runtime.ring_memory import RingMemory
from blinkc.bundle.reader import open_bundle
from tests.gpu.models import CASES, VOCAB_SIZE, TinyModel, tiny_model

if TYPE_CHECKING:
    from blink_runtime.cuda_driver import Context

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

# A token is right when the reference's logit for it lies no further below the best than rounding to
# 16 bits may move it; in standard deviations of the row's logits.
TIE_STD = 0.15
# One token, several pages, more than a window, and more than one prefill step takes.
PROMPT_LENGTHS = (1, 17, 40, 64, 127, 300)
NUM_TOKENS = 24


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


def served(
    model: TinyModel, context: Context, placement: str
) -> tuple[list[list[int]], list[tuple[Any, ...]]]:
    """Return each prompt's tokens and the steps that were run, all requests being there at once."""
    with open_bundle(model.bundle) as bundle:
        plan = read_plan(bundle)
        ring = RingMemory(plan, lambda size: MappedBuffer(size, "the ring"))
        target = load_cuda_target(
            bundle,
            context,
            ring.memory,
            placement=placement,
            weights_from=[model.checkpoint],
        )
    with target:
        for slot, prompt in enumerate(prompts()):
            ring.submit(slot, prompt, NUM_TOKENS)
        target.start()
        ring.wait(range(len(PROMPT_LENGTHS)), timeout_s=30.0)
        tokens = [ring.tokens(slot, NUM_TOKENS) for slot in range(len(PROMPT_LENGTHS))]
        steps = ring.steps()
        ring.stop()
    ring.memory.close()
    return tokens, steps


def gaps(checkpoint: Path, prompt: list[int], tokens: list[int]) -> list[float]:
    """Return how far each token lies below transformers' choice, the answer being fed as given."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model.eval().cuda()
    ids = torch.tensor([prompt + tokens[:-1]], device="cuda")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
    found: list[float] = ((logits.max(-1).values - chosen) / logits.std(-1)).tolist()
    return found


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value))
def test_greedy_tokens_are_those_of_transformers(context: Context, name: str, dtype: str) -> None:
    """Guards every operator and cut op of an architecture: packed, chunked and lone prefill, decode
    at every batch, windows, soft caps, experts."""
    model = tiny_model(name, dtype)
    answers, _ = served(model, context, "chained")
    found = [
        gap
        for prompt, tokens in zip(prompts(), answers, strict=True)
        for gap in gaps(model.checkpoint, prompt, tokens)
    ]
    ties = [gap for gap in found if gap > 0]
    print(f"{name} {dtype}: {len(ties)} of {len(found)} differ, worst gap {max(found):.3f} std")
    assert max(found) <= TIE_STD


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bf16"), ("qwen3-moe", "fp16")])
def test_placements_give_the_same_tokens(context: Context, name: str, dtype: str) -> None:
    """Guards that who launches changes neither which steps are run nor a bit of what comes out."""
    model = tiny_model(name, dtype)
    first = served(model, context, "host")
    assert served(model, context, "chained") == first
    assert served(model, context, "persistent") == first
