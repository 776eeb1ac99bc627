"""Penalties, logit bias, minimum length and logprobs of the CPU target, against slow definitions.

The references are numpy loops over the definition, and transformers' own processors where they mean
the same. The areas of the ring are arrays here, as the scheduler hands them over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkc import abi
from blinkc.codegen.compile_cpu import compile_cpu
from tests.engine.test_cpu_kernels import kept_tokens
from tests.reference.logits import adjusted, likeliest, log_softmax

PENALTIES, LOGIT_BIAS, MIN_TOKENS = 2, 4, 8  # BLINK_SAMPLE_* of step.h
MAX_VOCAB = 60


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    source = Path(__file__).with_name("cpu_kernels.cpp").read_text()
    out = tmp_path_factory.mktemp("kernels") / "kernels.so"
    compile_cpu({"cpu_kernels.cpp": source}, out=out)
    yield ctypes.CDLL(str(out))


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def adjust(
    kernels: ctypes.CDLL,
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    *,
    record_bytes: int = 8,
    flags: int = PENALTIES | LOGIT_BIAS | MIN_TOKENS,
    **fields: Any,
) -> np.ndarray:
    """Run adjust_logits for a request with these fields; checks that no count stays behind."""
    request = abi.structs()["blink_slot_request"]()
    request.repetition_penalty = 1.0
    request.num_prompt_tokens = len(prompt)
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(request, name)[: len(value)] = value
        else:
            setattr(request, name, value)
    records = np.zeros((max(len(output), 1), record_bytes // 4), np.uint32)
    records[:, 1:] = 0xFFFFFFFF  # what is not an id must not be read as one
    records[: len(output), 0] = output
    logits = np.ascontiguousarray(logits, np.float32)
    ids = np.array(prompt or [0], np.uint32)
    out = np.empty_like(logits)
    left = kernels.test_adjust(
        address(logits), ctypes.c_uint32(len(logits)), ctypes.byref(request), address(ids),
        address(records), ctypes.c_uint32(record_bytes), ctypes.c_uint32(len(output)),
        ctypes.c_uint32(flags), address(out),
    )  # fmt: skip
    assert left == 0, "counts of one row leak into the next"
    return out


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    vocab = draw(st.integers(2, MAX_VOCAB))
    ids = st.lists(st.integers(0, vocab - 1), max_size=30)
    penalty = st.floats(-2, 2, width=32)
    return {
        "logits": np.random.default_rng(draw(st.integers(0, 1000))).normal(0, 3, vocab),
        "prompt": draw(ids),
        "output": draw(ids),
        "presence": draw(penalty),
        "frequency": draw(penalty),
        "repetition": draw(st.floats(0.125, 4, width=32)),
        "bias": draw(
            st.dictionaries(st.integers(0, vocab - 1), st.floats(-100, 100, width=32), max_size=32)
        ),
        "min_tokens": draw(st.integers(0, 35)),
        "stops": draw(st.lists(st.integers(0, vocab - 1), max_size=16, unique=True)),
        "record_bytes": draw(st.sampled_from((8, 64))),
    }


@settings(max_examples=300)
@given(requests())
def test_all_of_them_in_order(kernels: ctypes.CDLL, r: dict[str, Any]) -> None:
    """Guards the order penalties, bias, minimum length, counts, and ids at both record sizes."""
    logits = r["logits"].astype(np.float32)
    got = adjust(
        kernels, logits, r["prompt"], r["output"], record_bytes=r["record_bytes"],
        presence_penalty=r["presence"], frequency_penalty=r["frequency"],
        repetition_penalty=r["repetition"], num_logit_bias=len(r["bias"]),
        logit_bias_ids=list(r["bias"]), logit_bias_values=list(r["bias"].values()),
        min_output_tokens=r["min_tokens"], num_stop_token_ids=len(r["stops"]),
        stop_token_ids=r["stops"],
    )  # fmt: skip
    names = ("presence", "frequency", "repetition", "bias", "min_tokens", "stops")
    expected = adjusted(logits, r["prompt"], r["output"], **{name: r[name] for name in names})
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


def test_what_is_off_changes_nothing(kernels: ctypes.CDLL) -> None:
    """Guards bitwise equality of untouched logits: only flagged changes may happen."""
    logits = np.random.default_rng(0).normal(0, 5, 40).astype(np.float32)
    spoiling: dict[str, Any] = {
        "presence_penalty": 1.5, "repetition_penalty": 2.0, "num_logit_bias": 1,
        "logit_bias_ids": [3], "logit_bias_values": [9.0], "min_output_tokens": 9,
        "num_stop_token_ids": 1, "stop_token_ids": [5],
    }  # fmt: skip
    assert (adjust(kernels, logits, [1, 2], [3], flags=0, **spoiling) == logits).all()
    neutral = adjust(kernels, logits, [1, 2], [3, 3])
    assert (neutral == logits).all()
    # Only repetition_penalty looks at the prompt.
    got = adjust(kernels, logits, [1, 2], [], presence_penalty=1.0, frequency_penalty=1.0)
    assert (got == logits).all()


def test_ids_past_the_vocabulary_are_harmless(kernels: ctypes.CDLL) -> None:
    """A front end may overwrite its prompt area after the check; nothing past the row changes."""
    logits = np.ones(10, np.float32)
    got = adjust(kernels, logits, [2**32 - 1, 10], [0xFFFFFFFF], repetition_penalty=2.0)
    assert got[:9].tolist() == [1.0] * 9
    got = adjust(
        kernels, logits, [1], [], num_logit_bias=1, logit_bias_ids=[10], logit_bias_values=[5.0],
        min_output_tokens=2, num_stop_token_ids=1, stop_token_ids=[2**31],
    )  # fmt: skip
    assert (got == logits).all()


def test_equals_the_processors_of_transformers(kernels: ctypes.CDLL) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    random = np.random.default_rng(1)
    for _ in range(20):
        logits = random.normal(0, 4, 50).astype(np.float32)
        prompt, output = random.integers(0, 50, 20).tolist(), random.integers(0, 50, 15).tolist()
        ids, scores = torch.tensor([prompt + output]), torch.from_numpy(logits)[None]
        repetition = transformers.RepetitionPenaltyLogitsProcessor(1.3)(ids, scores.clone())
        got = adjust(kernels, logits, prompt, output, repetition_penalty=1.3)
        np.testing.assert_allclose(got, repetition[0].numpy(), rtol=1e-6)
        bias = transformers.SequenceBiasLogitsProcessor([[[7], 2.5], [[11], -30.0]])
        got = adjust(
            kernels, logits, prompt, output, num_logit_bias=2, logit_bias_ids=[7, 11],
            logit_bias_values=[2.5, -30.0],
        )  # fmt: skip
        np.testing.assert_allclose(got, bias(ids, scores.clone())[0].numpy(), rtol=1e-6)
        at_least = transformers.MinNewTokensLengthLogitsProcessor(
            len(prompt), 16, [4, 9], device="cpu"
        )
        got = adjust(
            kernels, logits, prompt, output, min_output_tokens=16, num_stop_token_ids=2,
            stop_token_ids=[4, 9],
        )  # fmt: skip
        assert (got == at_least(ids, scores.clone())[0].numpy()).all()


def logprobs(
    kernels: ctypes.CDLL, logits: np.ndarray, chosen: int, num_top: int
) -> tuple[float, list[int], list[float]]:
    logits = np.ascontiguousarray(logits, np.float32)
    out = np.full(11, 77.0, np.float32)
    kernels.test_logprobs(
        address(logits), ctypes.c_uint32(len(logits)), ctypes.c_uint32(chosen),
        ctypes.c_uint32(num_top), address(out),
    )  # fmt: skip
    assert (out[1 + 2 * num_top :] == 77.0).all(), "written past what was asked for"
    pairs = out[1 : 1 + 2 * num_top].reshape(-1, 2)
    return float(out[0]), pairs[:, 0].astype(int).tolist(), pairs[:, 1].tolist()


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(5, 400),
    num_top=st.integers(0, 5),
    scale=st.sampled_from((0.0, 1.0, 30.0, 1e4)),
)
def test_logprobs_equal_log_softmax(
    kernels: ctypes.CDLL, seed: int, vocab: int, num_top: int, scale: float
) -> None:
    """Ties, by `scale` 0 and rounding, go to the lowest id; huge logits do not overflow."""
    random = np.random.default_rng(seed)
    logits = (random.normal(0, 1, vocab) * scale).round(1).astype(np.float32)
    chosen = int(random.integers(0, vocab))
    exact, order = log_softmax(logits), likeliest(logits, num_top)
    got, ids, values = logprobs(kernels, logits, chosen, num_top)
    assert got == pytest.approx(exact[chosen], rel=1e-5, abs=1e-5)
    assert ids == order
    assert values == pytest.approx(exact[order].tolist(), rel=1e-5, abs=1e-5)


def test_logprobs_of_masked_and_infinite_logits(kernels: ctypes.CDLL) -> None:
    masked = np.full(8, -np.inf, np.float32)
    masked[3] = 2.0
    assert logprobs(kernels, masked, 3, 2) == (0.0, [3, 0], [0.0, -np.inf])
    endless = np.where(np.arange(8) == 6, np.inf, 0.0)
    assert logprobs(kernels, endless, 6, 1) == (0.0, [6], [0.0])


def test_cuts_equal_the_warpers_of_transformers() -> None:
    """The order temperature, top_k, top_p, min_p; `kept_tokens` is what the sampler is held to."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    random = np.random.default_rng(3)
    for _ in range(200):
        logits = random.normal(0, 2, 60).astype(np.float32)
        temperature, top_p, min_p = random.uniform([0.3, 0.2, 0.0], [2.0, 0.99, 0.3])
        top_k = int(random.integers(1, 60))
        scores = torch.from_numpy(logits)[None]
        for warper in (
            transformers.TemperatureLogitsWarper(float(temperature)),
            transformers.TopKLogitsWarper(top_k),
            transformers.TopPLogitsWarper(float(top_p)),
            transformers.MinPLogitsWarper(float(min_p)),
        ):
            scores = warper(None, scores)
        theirs = torch.softmax(scores[0].double(), -1).numpy()
        ours = kept_tokens(logits, temperature, top_k, top_p, min_p)
        assert ((theirs > 0) == (ours > 0)).all()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
