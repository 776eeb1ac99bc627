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


@pytest.mark.parametrize("name", CONFIGS)
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
