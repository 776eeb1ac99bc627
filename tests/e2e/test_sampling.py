"""Penalties, bias, logprobs and n of the served SmolLM2 against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import DEMO_BUNDLE, MODEL, Server

PROMPT = "The old lighthouse keeper counted the ships that passed in the night. He"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def roomy() -> Iterator[Server]:
    with Server(DEMO_BUNDLE) as server:
        yield server


@pytest.fixture(scope="module")
def model() -> Any:
    """The checkpoint in transformers, fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def complete(server: Server, prompt: Any = PROMPT, **fields: Any) -> Any:
    """Ask for choices; unknown to the client's signature is what `extra_body` is for."""
    known = ("seed", "n", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty")
    standard = {name: fields.pop(name) for name in known if name in fields}
    return server.client().completions.create(
        model=server.model_name(),
        prompt=prompt,
        max_tokens=fields.pop("max_tokens", NUM_TOKENS),
        temperature=fields.pop("temperature", 0),
        extra_body={"ignore_eos": True, **fields},
        **standard,
    )


def test_repetition_penalty_equals_transformers(roomy: Server, model: Any, tokenizer: Any) -> None:
    """Guards the history: prompt and output, each token once, before and after it grows."""
    import torch

    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    for penalty in (1.3, 0.8):
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS,
                do_sample=False, repetition_penalty=penalty, pad_token_id=0,
            )  # fmt: skip
        expected = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        answer = complete(roomy, repetition_penalty=penalty)
        assert answer.choices[0].text == expected
    assert complete(roomy).choices[0].text != expected


def test_logprobs_equal_transformers(roomy: Server, model: Any, tokenizer: Any) -> None:
    """Guards which logits they are of: the model's own, whatever temperature and penalties do."""
    import torch

    answer = complete(
        roomy, logprobs=5, temperature=1.3, seed=11, frequency_penalty=0.7, presence_penalty=0.3
    )
    logprobs = answer.choices[0].logprobs
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in logprobs.tokens]
    prompt = tokenizer(PROMPT)["input_ids"]
    assert "".join(logprobs.tokens) == answer.choices[0].text
    if any(len(ids) != 1 for ids in tokens):
        pytest.fail(f"not tokens of this vocabulary: {logprobs.tokens}")
    output = [ids[0] for ids in tokens]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    exact = torch.log_softmax(logits.double(), dim=-1)
    for i, token in enumerate(output):
        assert logprobs.token_logprobs[i] == pytest.approx(float(exact[i, token]), abs=2e-3)
        values, ids = exact[i].topk(5)
        found = dict(logprobs.top_logprobs[i])
        for value, token_id in zip(values.tolist(), ids.tolist(), strict=True):
            assert found[tokenizer.decode([token_id])] == pytest.approx(value, abs=2e-3)
    offset = 0
    for text, at in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert at == offset
        offset += len(text)


def test_logit_bias_bans_and_forces(roomy: Server, tokenizer: Any) -> None:
    (forced,) = tokenizer.encode(" moon", add_special_tokens=False)
    answer = complete(roomy, max_tokens=4, logit_bias={str(forced): 100})
    assert answer.choices[0].text == " moon" * 4
    first = complete(roomy, max_tokens=1, logprobs=1).choices[0].logprobs.tokens[0]
    (banned,) = tokenizer.encode(first, add_special_tokens=False)
    answer = complete(roomy, max_tokens=1, logit_bias={str(banned): -100})
    assert answer.choices[0].text != first


def test_min_tokens_holds_the_end_back(roomy: Server) -> None:
    """ "Paris." ends at once without it; the end token must not be sampled before."""
    question = [{"role": "user", "content": "What is the capital of France? One word."}]

    def ask(**extra: Any) -> Any:
        return roomy.client().chat.completions.create(
            model=roomy.model_name(), messages=question, temperature=0, max_tokens=40,
            extra_body=extra,
        )  # fmt: skip

    short = ask().usage.completion_tokens
    assert short < 30
    assert ask(min_tokens=30).usage.completion_tokens >= 30


def test_choices_are_those_of_their_seeds(roomy: Server) -> None:
    answer = complete(roomy, n=3, seed=5, temperature=1.0)
    alone = [complete(roomy, seed=5 + i, temperature=1.0).choices[0].text for i in range(3)]
    assert [choice.text for choice in answer.choices] == alone
    assert len(set(alone)) == 3
    assert answer.usage.completion_tokens == 3 * NUM_TOKENS


def test_temperatures_of_almost_zero_are_greedy(roomy: Server) -> None:
    """Guards the whole way of a number that a 32-bit float hardly holds, and cuts beside it."""
    greedy = complete(roomy).choices[0].text
    for fields in ({"temperature": 1e-45}, {"temperature": 1e-300}, {"top_p": 0.9}, {"top_k": 40}):
        assert complete(roomy, **fields, seed=3).choices[0].text == greedy
    assert complete(roomy, temperature=1.0, seed=3).choices[0].text != greedy


@pytest.mark.parametrize("edge", [64, 256, 1024])
def test_sequences_step_over_bucket_edges(
    roomy: Server, model: Any, tokenizer: Any, edge: int
) -> None:
    """Guards lengths n - 1, n and n + 1 of each bucket."""
    import torch

    text = "The ships of the year {} carried salt, tea and {} letters. "
    ids = tokenizer("".join(text.format(1500 + i, i * i) for i in range(120)))["input_ids"]
    count = 3
    ids = ids[: edge - count + 1]
    assert len(ids) == edge - count + 1
    with torch.inference_mode():
        inputs = torch.tensor([ids])
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    answer = complete(roomy, ids, max_tokens=count)
    expected = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    assert answer.choices[0].text == expected
    assert answer.usage.total_tokens == len(ids) + count
    assert roomy.metric("blink_off_cache_steps_total") == 0


def test_prompts_step_over_bucket_edges(roomy: Server, model: Any, tokenizer: Any) -> None:
    """Guards prompts of n - 1, n and n + 1 tokens for each bucket of prefill, the largest one too,
    past which a prompt comes in pieces."""
    import torch

    keys = json.loads((DEMO_BUNDLE / "plan.json").read_text())["keys"]
    edges = sorted({seqlen for kind, _, seqlen in keys if kind == "prefill"})
    text = "The ships of the year {} carried salt, tea and {} letters. "
    ids = tokenizer("".join(text.format(1600 + i, i * i) for i in range(60)))["input_ids"]
    ids = ids[: edges[-1] + 1]
    assert len(edges) > 1 and len(ids) == edges[-1] + 1
    with torch.inference_mode():
        best = model(torch.tensor([ids])).logits[0].argmax(dim=-1).tolist()
    for length in (edge + step for edge in edges for step in (-1, 0, 1)):
        answer = complete(roomy, ids[:length], max_tokens=1)
        expected = tokenizer.decode([best[length - 1]], skip_special_tokens=True)
        assert answer.choices[0].text == expected, length
        assert answer.usage.prompt_tokens == length
    assert roomy.metric("blink_off_cache_steps_total") == 0


def test_a_client_that_leaves_frees_lane_and_pages(roomy: Server) -> None:
    """Guards the way of an abort to the scheduler: its steps end, not only the stream."""
    roomy.wait_until_idle()
    for max_tokens in (8, 2000):
        before = roomy.metric("blink_steps_total")
        body = {
            "model": roomy.model_name(), "prompt": PROMPT, "max_tokens": max_tokens,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
        with httpx.stream("POST", roomy.url + "/v1/completions", json=body, timeout=600) as answer:
            assert next(answer.iter_lines()).startswith("data: {")
        roomy.wait_until_idle()
        assert roomy.metric("blink_steps_total") - before < min(max_tokens + 1, 500)
