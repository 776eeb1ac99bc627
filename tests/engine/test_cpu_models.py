"""Whole models on the CPU target against transformers, driven by hand through the step buffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blinkc.capture.grid import GraphKey
from blinkc.codegen.compile_cpu import compile_cpu
from blinkc.engine.cpu import CpuModel, render_cpu_model
from blinkc.frontend.hf import decoder_graph_from_hf
from blinkc.frontend.weights import read_weight
from blinkc.surgery import segment_decoder
from tests.engine.step_driver import Request, StepDriver
from tests.frontend.hf_models import CONFIGS, eager_logits, make_config, save_tiny_model

FIRST = [5, 9, 31, 7, 64, 2, 11, 90, 3, 8, 12]
SECOND = [44, 1, 17, 29, 6, 50, 13]
QUICK = ("llama-tied-bias", "qwen3-moe", "gemma2", "gpt2", "phi4-partial-rope", "cohere")
MAX_BATCH = 4


def small_plan() -> Any:
    """Return the part of a capture plan that rendering reads: pages of 4 tokens, two keys."""
    keys = (GraphKey("prefill", MAX_BATCH, 32), GraphKey("decode", MAX_BATCH, 64))
    return SimpleNamespace(
        max_step_tokens=32,
        max_batch=MAX_BATCH,
        max_pages_per_lane=16,
        page_size_tokens=4,
        keys=keys,
    )


def compile_model(folder: Path, max_seqlen: int = 64) -> tuple[Path, list[np.ndarray], int]:
    """Compile a checkpoint; returns the shared object, the weights and the vocabulary's size."""
    graph = decoder_graph_from_hf(str(folder), dtype="fp32", max_seqlen=max_seqlen)
    segmented = segment_decoder(graph)
    source = render_cpu_model(segmented, small_plan())
    library = folder / "target.so"
    compile_cpu({"segments.cpp": source}, out=library, flags={"segments.cpp": ["-O1"]})
    weights = [read_weight(reference) for reference in segmented.weights.values()]
    return library, weights, graph.spec.vocab_size


def load(library: Path, weights: list[np.ndarray], threads: int = 2) -> CpuModel:
    return CpuModel(library, weights, num_kv_pages=MAX_BATCH * 16 + 1, num_threads=threads)


MATRIX = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("name", MATRIX)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = save_tiny_model(make_config(name), tmp_path)
    expected = [eager_logits(reference, tokens) for tokens in (FIRST, SECOND)]
    library, weights, vocab = compile_model(tmp_path)
    with load(library, weights) as model:
        driver = StepDriver(model)
        first, second = Request(FIRST[:4], 2), Request(SECOND[:5], 0)
        # A chunk alone, its rest packed with another request, then single tokens of both.
        steps = [
            ([first], [4]),
            ([first, second], [9, 5]),
            ([second, first], [6, 10]),
            ([first, second], [11, 7]),
        ]
        for requests, ends in steps:
            for request, end in zip(requests, ends, strict=True):
                tokens = FIRST if request is first else SECOND
                request.tokens = tokens[:end]
            driver.step(requests)
            logits = model.logits(len(requests), vocab)
            for row, (request, end) in enumerate(zip(requests, ends, strict=True)):
                wanted = expected[request is second][end - 1]
                np.testing.assert_allclose(logits[row], wanted, rtol=3e-4, atol=3e-5)
                assert model.sampled_ids[row] == wanted.argmax()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[np.ndarray], int]]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(make_config("qwen3-moe"), folder)
    yield compile_model(folder)


def generate(
    model: CpuModel, prompts: list[list[int]], count: int, **options: Any
) -> list[list[int]]:
    """Generate in one batch; returns what each prompt got."""
    driver = StepDriver(model)
    requests = [Request(list(p), lane, **options) for lane, p in enumerate(prompts)]
    for _ in range(count):
        driver.step(requests)
    return [r.tokens[r.num_prompt :] for r in requests]


def test_tokens_do_not_depend_on_the_batch(tiny: tuple[Path, list[np.ndarray], int]) -> None:
    library, weights, _ = tiny
    prompts = [FIRST, SECOND, FIRST[3:5], [7]]
    with load(library, weights, threads=1) as model:
        alone = [generate(model, [p], 20)[0] for p in prompts]
    with load(library, weights, threads=3) as model:
        together = generate(model, prompts, 20)
        assert together == alone
        assert generate(model, prompts[::-1], 20) == alone[::-1]
        hot = generate(model, prompts, 12, temperature=1.5, top_p=0.9, seed=3)
        assert hot == [
            generate(model, [p], 12, temperature=1.5, top_p=0.9, seed=3)[0] for p in prompts
        ]


def test_logits_are_bitwise_equal_in_any_chunks(tiny: tuple[Path, list[np.ndarray], int]) -> None:
    library, weights, vocab = tiny
    seen = []
    for chunk in (1, 3, 11):
        with load(library, weights) as model:
            driver, request = StepDriver(model), Request(list(FIRST), 1)
            while request.done < len(FIRST):
                driver.step([request], chunk)
            seen.append(model.logits(1, vocab).tobytes())
    assert len(set(seen)) == 1


def test_padding_to_the_full_key_changes_nothing(
    tiny: tuple[Path, list[np.ndarray], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three rows run on the key for four, with NaN left in the caches of the sink page.
    library, weights, _ = tiny
    prompts = [FIRST, SECOND, [7, 8]]
    with load(library, weights) as model:
        plain = generate(model, prompts, 16)
    monkeypatch.setenv("BLINK_CPU_PAD", "1")
    with load(library, weights) as model:
        assert generate(model, prompts, 16) == plain


@pytest.mark.parametrize("left_out", range(MAX_BATCH))
def test_a_lane_that_sits_out_keeps_its_pages(
    tiny: tuple[Path, list[np.ndarray], int], monkeypatch: pytest.MonkeyPatch, left_out: int
) -> None:
    """Guards each place of the empty row on the key for four, with anything in it: the three others
    get the same tokens at any row, and so does the fourth when it comes back."""
    library, weights, vocab = tiny
    prompts = [FIRST, SECOND, FIRST[3:5], [7]]
    options: dict[str, Any] = {"temperature": 0.9, "seed": 5}
    monkeypatch.setenv("BLINK_CPU_PAD", "1")
    with load(library, weights) as model:
        whole = generate(model, prompts, 12, **options)
    table = next(i for i, w in enumerate(weights) if w.shape == (vocab, 32))
    spoiled = [w.copy() for w in weights]
    spoiled[table][77] = np.nan  # the embedding of an id that padding has and nobody else
    assert not any(77 in tokens for tokens in (*prompts, *whole))
    with load(library, spoiled) as model:
        driver = StepDriver(model, padding_ids=(77, -1, vocab, 2**31 - 1, 5))
        requests = [Request(list(p), lane, **options) for lane, p in enumerate(prompts)]
        driver.step(requests)
        live = [r for r in requests if r.lane != left_out]
        for _ in range(11):
            live.append(live.pop(0))
            driver.step(live)
        for _ in range(11):
            driver.step([requests[left_out]])
        assert [r.tokens[r.num_prompt :] for r in requests] == whole


def test_a_row_of_nan_fails_alone(tiny: tuple[Path, list[np.ndarray], int]) -> None:
    library, weights, vocab = tiny
    table = next(i for i, w in enumerate(weights) if w.shape == (vocab, 32))
    spoiled = [w.copy() for w in weights]
    spoiled[table][77] = np.nan  # the embedding of one id
    with load(library, weights) as model:
        expected = generate(model, [FIRST, SECOND], 6)
    with load(library, spoiled) as model:
        driver = StepDriver(model)
        good, bad = Request(list(FIRST), 0), Request([3, 77, 5], 1)
        assert driver.step([good, bad])[1] == -1
        bad.tokens = [3, 77, 5, 1]
        for _ in range(5):
            driver.step([good])
        assert 77 not in expected[0]  # or the spoiled embedding is this one's too
        assert good.tokens[good.num_prompt :] == expected[0]


def test_an_empty_step_completes(tiny: tuple[Path, list[np.ndarray], int]) -> None:
    library, weights, _ = tiny
    with load(library, weights) as model:
        model.state["num_tokens"] = model.state["num_rows"] = 0
        model.state["launch"] = 5
        model.launch(0)
        assert model.state["completion"][0] == 5


def test_bad_inputs_are_refused(tiny: tuple[Path, list[np.ndarray], int]) -> None:
    from blinkc.errors import BlinkError

    library, weights, _ = tiny
    with pytest.raises(BlinkError, match="weights, not"):
        load(library, weights[:-1])
    with pytest.raises(BlinkError, match="num_kv_pages"):
        CpuModel(library, weights, num_kv_pages=1)
    with load(library, weights) as model:
        with pytest.raises(BlinkError, match="does not fit"):
            model.launch(99)
        model.state["num_tokens"] = 33
        with pytest.raises(BlinkError, match="does not fit"):
            model.launch(0)
