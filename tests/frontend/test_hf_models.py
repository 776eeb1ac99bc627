"""The architecture matrix: export and surgery keep what transformers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blinkc.frontend.hf import decoder_graph_from_hf
from blinkc.surgery import segment_decoder
from tests.frontend.hf_models import CONFIGS, eager_logits, make_config, save_tiny_model
from tests.reference.compose_segments import ComposedModel, Request

_FIRST = [5, 9, 31, 7, 64, 2, 11, 90, 3, 8, 12]
_SECOND = [44, 1, 17, 29, 6, 50, 13]


# One of each kind; the others differ from these in few lines and run in the slow job.
_EVERY_TIME = {
    *("llama", "llama-tied-bias", "phi3", "phi4-partial-rope", "qwen2", "qwen3", "qwen3-moe"),
    *("mixtral", "glm4-moe", "mistral-window", "gemma2", "gemma3", "gpt2", "gpt-neox", "gptj"),
    *("phi", "olmo2", "starcoder2", "granite", "cohere", "smollm3", "opt"),
}


@pytest.mark.parametrize(
    "name",
    [n if n in _EVERY_TIME else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS],
)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    # Guards every silent loss: a bias, scale, window, cap, rope variant, tied head or fused
    # projection.
    config = make_config(name)
    model = save_tiny_model(config, tmp_path)
    graph = decoder_graph_from_hf(str(tmp_path), dtype="fp32", max_seqlen=64)
    composed = ComposedModel(segment_decoder(graph))
    expected = [eager_logits(model, tokens) for tokens in (_FIRST, _SECOND)]
    assert np.abs(expected[0]).max() > 0.05
    first, second = Request(), Request()
    # A chunk alone, then its rest packed with another request, then single tokens of both.
    steps = [
        [(first, _FIRST[:4])],
        [(first, _FIRST[4:9]), (second, _SECOND[:5])],
        [(second, _SECOND[5:6]), (first, _FIRST[9:10])],
        [(first, _FIRST[10:]), (second, _SECOND[6:])],
    ]
    for work in steps:
        logits = composed.step(work)
        for row, (request, _tokens) in enumerate(work):
            wanted = expected[request is second][request.num_tokens - 1]
            np.testing.assert_allclose(logits[row], wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_half_precision_stays_close(name: str, tmp_path: Path) -> None:
    # Guards: casts of the norms lost or doubled, or a weight left in the checkpoint's type.
    model = save_tiny_model(make_config(name), tmp_path)
    graph = decoder_graph_from_hf(str(tmp_path), dtype="fp16", max_seqlen=64)
    segmented = segment_decoder(graph)
    dtypes = {spec.dtype for name, spec in segmented.values.items() if name != "logits"}
    assert dtypes == {"fp16", "int64"}
    assert segmented.values["logits"].dtype == "fp32"
    logits = ComposedModel(segmented).step([(Request(), _FIRST)])
    wanted = eager_logits(model, _FIRST)[-1]
    assert np.abs(logits[0] - wanted).max() < 0.02 * np.abs(wanted).max()


def test_a_graph_says_what_its_config_says(tmp_path: Path) -> None:
    config = make_config("gemma2")
    config.save_pretrained(tmp_path)
    graph = decoder_graph_from_hf(str(tmp_path), dtype="bf16", max_seqlen=64, random_weights_seed=0)
    spec = graph.spec
    assert (spec.vocab_size, spec.hidden_size, spec.dtype) == (96, 32, "bf16")
    assert [(a.layer, a.num_q_heads, a.num_kv_heads, a.head_dim) for a in spec.attention] == [
        (0, 4, 2, 16),
        (1, 4, 2, 16),
        (2, 4, 2, 16),
    ]
    assert [a.window for a in spec.attention] == [4, 0, 4]
    assert {a.softcap for a in spec.attention} == {5.0}
    assert spec.attention[0].scale == pytest.approx(24**-0.5)
    assert spec.eos_token_ids == (2,)
    assert len(segment_decoder(graph).segments) == 3
