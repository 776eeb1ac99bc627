"""Greedy tokens of the served SmolLM2 equal those of transformers in fp32, whatever goes on.

Sampled ones equal themselves.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI

from tests.e2e.server import DEMO_BUNDLE, MODEL, Server, make_bundle
from tests.e2e.test_sampling import complete as sample

NUM_TOKENS = 64
ABORTS = 'blink_requests_total{finish_reason="abort"}'
STORY = "The old lighthouse keeper counted the ships that passed in the night. "
PROMPTS = (
    "Hello",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village far away from the sea, there lived",
    "List three reasons why people like to travel by train:\n1.",
    STORY * 3,
    STORY * 8 + "What did he count?",
    STORY * 14 + "Summarize the text above in one sentence.",
)


@pytest.fixture(scope="session")
def expected() -> list[tuple[list[int], list[int]]]:
    """Prompt and output token ids of transformers, fp32, greedy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # as ignore_eos: it neither ends nor is suppressed
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    with torch.inference_mode():
        output = model.generate(**batch, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    padded = batch["input_ids"]
    prompts = [
        row[mask.bool()].tolist() for row, mask in zip(padded, batch["attention_mask"], strict=True)
    ]
    return list(zip(prompts, output[:, padded.shape[1] :].tolist(), strict=True))


@pytest.fixture(scope="session")
def tokenizer():  # type: ignore[no-untyped-def]
    """HuggingFace's tokenizer of the model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def roomy() -> Server:
    """A server with room for all prompts at once."""
    with Server(DEMO_BUNDLE) as server:
        yield server


@pytest.fixture(scope="module")
def tight() -> Server:
    """Few pages and small prefill steps: requests wait, pause, resume and prefill in chunks."""
    bundle = make_bundle(
        "--shapes", "auto", "--max-batch", "8", "--max-seqlen", "512",
        "--max-prefill-tokens", "48", "--num-kv-pages", "44",
    )  # fmt: skip
    with Server(bundle) as server:
        yield server


def complete(
    client: OpenAI, model: str, prompt_token_ids: list[int], num_tokens: int = NUM_TOKENS
) -> str:
    answer = client.completions.create(
        model=model,
        prompt=prompt_token_ids,
        max_tokens=num_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt_token_ids)
    assert answer.usage.completion_tokens == num_tokens
    assert answer.choices[0].finish_reason == "length"
    return answer.choices[0].text


def visible(tokenizer: object, token_ids: list[int]) -> str:
    """Return the text that a client sees: special tokens have none."""
    return tokenizer.decode(token_ids, skip_special_tokens=True)  # type: ignore[attr-defined]


def test_alone(roomy, expected, tokenizer) -> None:  # type: ignore[no-untyped-def]
    client, model = roomy.client(), roomy.model_name()
    for prompt_token_ids, output_token_ids in expected:
        assert complete(client, model, prompt_token_ids) == visible(tokenizer, output_token_ids)


def test_in_a_full_batch(roomy, expected, tokenizer) -> None:  # type: ignore[no-untyped-def]
    check_together(roomy, expected, tokenizer)
    assert roomy.metric("blink_off_cache_steps_total") == 0


def test_batches_step_over_every_size(roomy, expected, tokenizer) -> None:  # type: ignore[no-untyped-def]
    """Guards each number of rows on the key that it takes: requests end one after the other."""
    client, model = roomy.client(), roomy.model_name()
    counts = [NUM_TOKENS * (i + 1) // len(expected) for i in range(len(expected))]
    with ThreadPoolExecutor(len(expected)) as pool:
        answers = pool.map(
            lambda pair, count: complete(client, model, pair[0], count), expected, counts
        )
        for answer, (_, output_token_ids), count in zip(answers, expected, counts, strict=True):
            assert answer == visible(tokenizer, output_token_ids[:count])
    assert roomy.metric("blink_off_cache_steps_total") == 0


def test_out_of_pages_and_in_chunks(tight, expected, tokenizer) -> None:  # type: ignore[no-untyped-def]
    """Guards resuming: a paused request prefills prompt and output again and repeats nothing."""
    for _ in range(5):  # again where the clients were so slow that the requests were not together
        check_together(tight, expected, tokenizer)
        if tight.metric("blink_scheduler_resumed_total") > 0:
            break
    assert tight.metric("blink_scheduler_paused_total") > 0
    assert tight.metric("blink_scheduler_resumed_total") > 0
    # However many chunks prompts come in: one prefill step at most between two decode steps.
    assert tight.metric("blink_max_wait_steps") == 1


def test_neighbours_that_abort(tight, expected, tokenizer) -> None:  # type: ignore[no-untyped-def]
    """Requests that leave in the middle of their stream change nobody else's tokens."""
    stop = threading.Event()
    before = tight.metric(ABORTS)

    def disturb() -> int:
        client, model = tight.client(strict=False), tight.model_name()
        aborted = 0
        while not stop.is_set():
            stream = client.completions.create(
                model=model, prompt=STORY, max_tokens=200, temperature=1.0, stream=True
            )
            for _ in zip(range(3), stream, strict=False):
                pass
            stream.close()
            aborted += 1
        return aborted

    with ThreadPoolExecutor(1) as pool:
        aborted = pool.submit(disturb)
        try:
            check_together(tight, expected, tokenizer)
            # A stream that was left is an abort a moment later.
            tight.wait_for(lambda: aborted.done() or tight.metric(ABORTS) > before, "an abort")
        finally:
            stop.set()
        assert aborted.result(600) > 0
    assert tight.metric(ABORTS) > before


def test_up_to_the_last_place(roomy, tight, tokenizer) -> None:  # type: ignore[no-untyped-def]
    """Guards the end of the page table: `tight` has no place after these tokens, `roomy` has."""
    ids = tokenizer(STORY * 40)["input_ids"][: 512 - 3]
    answers = [sample(server, ids, max_tokens=3) for server in (roomy, tight)]
    assert answers[1].usage.total_tokens == 512
    assert answers[0].choices[0].text == answers[1].choices[0].text
    with pytest.raises(BadRequestError, match="512"):
        sample(tight, ids, max_tokens=4)


def test_sampling_is_the_same_after_pauses(roomy, tight) -> None:  # type: ignore[no-untyped-def]
    """Guards counts and logprobs across preemption: what was generated is read from the ring."""
    requests = [
        {
            "prompt": STORY * (2 + i % 3), "seed": i, "temperature": 1.0, "logprobs": 3,
            "max_tokens": 80, "presence_penalty": 0.5, "frequency_penalty": 0.4,
            "repetition_penalty": 1.2, "logit_bias": {str(100 + i): 3},
        }
        for i in range(8)
    ]  # fmt: skip
    expected = [sample(roomy, **dict(request)).choices[0] for request in requests]
    paused = tight.metric("blink_scheduler_paused_total")
    for _ in range(5):  # as in test_out_of_pages_and_in_chunks
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda request: sample(tight, **dict(request)), requests))
        if tight.metric("blink_scheduler_paused_total") > paused:
            break
    assert tight.metric("blink_scheduler_paused_total") > paused
    for answer, alone in zip(answers, expected, strict=True):
        choice = answer.choices[0]
        assert choice.text == alone.text
        assert choice.logprobs.token_logprobs == alone.logprobs.token_logprobs


def check_together(
    server: Server, expected: list[tuple[list[int], list[int]]], tokenizer: object
) -> None:
    """Send all prompts at once and compare every answer."""
    client, model = server.client(), server.model_name()
    with ThreadPoolExecutor(len(expected)) as pool:
        answers = pool.map(lambda pair: complete(client, model, pair[0]), expected)
        for answer, (_, output_token_ids) in zip(answers, expected, strict=True):
            assert answer == visible(tokenizer, output_token_ids)


def test_bundle_is_the_demo() -> None:
    assert Path(DEMO_BUNDLE / "manifest.json").exists(), "run `make demo` or `make test` first"
