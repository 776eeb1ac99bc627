"""SmolLM2-135M-Instruct with its real weights over HTTP on a GPU, against transformers in fp32."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from blink_runtime.cuda_bundle import load_cuda_target, read_plan
from blink_runtime.cuda_driver import MappedBuffer
from blink_runtime.ring_memory import RingMemory
from blinkc.bundle.reader import open_bundle
from tests.gpu.serving import GpuServer
from tests.gpu.test_models import TIE_STD, judge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blink_runtime.cuda_driver import Context

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

NUM_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "In 1969, the first human being to walk on the Moon",
    "A recipe for bread needs flour, water,",
    "The quick brown fox jumps over the lazy dog. " * 12,
)


@pytest.fixture(scope="module")
def bundle() -> Path:
    """Made by `blinkc compile .demo/SmolLM2-135M-Instruct --target sm_90` and `blinkc bundle`."""
    path = Path(os.environ.get("BLINK_GPU_BUNDLE", ".demo/bundle_sm_90"))
    if not (path / "manifest.json").exists():
        pytest.skip(f"{path} is not there: compile SmolLM2 for this GPU")
    return path


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    path = Path(os.environ.get("BLINK_GPU_CHECKPOINT", ".demo/SmolLM2-135M-Instruct"))
    if not (path / "model.safetensors").exists():
        pytest.skip(f"{path} is not there: make demo fetches it")
    return path


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[GpuServer]:
    with GpuServer(bundle, "--drain", "0") as running:
        yield running


def ring_tokens(bundle_path: Path, context: Context, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of each prompt, one after the other, without the front end."""
    with open_bundle(bundle_path, check_hashes=False) as bundle:
        ring = RingMemory(read_plan(bundle), lambda size: MappedBuffer(size, "the ring"))
        target = load_cuda_target(bundle, context, ring.memory)
    answers = []
    with target:
        target.start()
        for slot, prompt in enumerate(prompts):
            ring.submit(slot, prompt, NUM_TOKENS)
            ring.wait([slot], timeout_s=10.0)
            answers.append(ring.tokens(slot, NUM_TOKENS))
        ring.stop()
    ring.memory.close()
    return answers


def until_eos(tokens: list[int], tokenizer: Any) -> list[int]:
    end = tokenizer.eos_token_id
    return tokens[: tokens.index(end)] if end in tokens else tokens


def test_tokens_over_http_are_those_of_transformers(
    server: GpuServer, bundle: Path, checkpoint: Path, tokenizer: Any, context: Context
) -> None:
    """Guards the whole way: text to ids, ring, GPU, ids to text; streamed and not."""
    alone = [server.complete(prompt, NUM_TOKENS) for prompt in PROMPTS]
    streamed = [server.stream(prompt, NUM_TOKENS) for prompt in PROMPTS]
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    answers = ring_tokens(bundle, context, ids)
    num_equal, worst = 0, 0.0
    for number, prompt in enumerate(ids):
        assert alone[number]["usage"]["prompt_tokens"] == len(prompt)
        text = tokenizer.decode(until_eos(answers[number], tokenizer))
        assert alone[number]["choices"][0]["text"] == text  # the same keys: the same bits
        assert streamed[number] == text
        found = [verdict.gap for verdict in judge(checkpoint, prompt, answers[number])]
        num_equal += sum(gap == 0 for gap in found)
        worst = max(worst, *found)
        ties = [(place, round(gap, 3)) for place, gap in enumerate(found) if gap > 0]
        print(f"prompt {number}: ties (position, margin in std): {ties}")
    print(f"{num_equal} of {len(PROMPTS) * NUM_TOKENS} tokens equal, worst margin {worst:.3f} std")
    assert worst <= TIE_STD


def test_eight_at_once(server: GpuServer, checkpoint: Path, tokenizer: Any) -> None:
    """Guards batches of requests that come and go: every stream is right by itself."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(lambda prompt: server.stream(prompt, NUM_TOKENS), PROMPTS))
    num_checked = 0
    for prompt, text in zip(PROMPTS, texts, strict=True):
        whole, start = tokenizer(prompt + text)["input_ids"], tokenizer(prompt)["input_ids"]
        if whole[: len(start)] != start or not text:
            continue  # the text does not say where its tokens end
        found = [verdict.gap for verdict in judge(checkpoint, start, whole[len(start) :])]
        num_checked += sum(gap <= TIE_STD for gap in found) == len(found)
    print(f"{num_checked} of {len(PROMPTS)} texts are teacher-forced greedy")
    assert num_checked >= len(PROMPTS) - 2


def test_what_changes_logits_is_honoured_or_refused(server: GpuServer, tokenizer: Any) -> None:
    """Guards that no parameter is silently ignored: a bias decides, logprobs had no room."""
    wanted = tokenizer.encode(" blue")[0]
    answer = server.complete(PROMPTS[0], 3, logit_bias={str(wanted): 100})
    assert answer["choices"][0]["text"] == tokenizer.decode([wanted] * 3)
    answer = server.complete(PROMPTS[0], 3, logit_bias={str(wanted): 100}, stop=[" blue"])
    assert answer["choices"][0]["text"] == ""
    assert "logprobs" in server.complete("Hello", 4, logprobs=2)["error"]["message"]


@pytest.mark.parametrize("state", ["idle", "prefilling", "decoding"])
@pytest.mark.parametrize("scheduler", ["chained", "persistent", "host"])
def test_it_stops_within_a_second(bundle: Path, scheduler: str, state: str) -> None:
    """Guards that no state keeps the scheduler, and so the process, from ending."""
    with GpuServer(bundle, "--drain", "0", "--scheduler", scheduler) as server:
        if state == "decoding":
            server.open_stream(PROMPTS[0], 1500)
        elif state == "prefilling":
            for _ in range(6):  # 1,500 tokens each; the first bytes come before the prefills end
                pool = ThreadPoolExecutor(1)
                pool.submit(server.complete, PROMPTS[-1] * 13, 200)
        status, seconds = server.stop()
        print(f"{scheduler}, {state}: status {status}, process gone after {seconds:.2f} s")
        assert status == 0, server.output
