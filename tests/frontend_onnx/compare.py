"""Compare a `DecoderGraph` with the ONNX file it came from, on packed and chunked requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from blinkc.frontend.decoder_graph import DecoderGraph
from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from tests.frontend_onnx.evaluate import DecoderRun
from tests.frontend_onnx.original import OriginalRun

# Two requests share steps; one has a prompt in chunks, both decode.
STEPS: list[list[tuple[str, int]]] = [
    [("a", 9)],
    [("b", 4), ("a", 5)],
    [("a", 1), ("b", 6)],
    [("a", 1), ("b", 1)],
]


def assert_same_logits(
    path: Path,
    *,
    vocab_size: int,
    tolerance: float = 2e-4,
    max_seqlen: int = 64,
    dtype: str = "fp32",
) -> DecoderGraph:
    """Compile `path` and compare all logits of `STEPS` with onnxruntime on the file itself."""
    graph = decoder_graph_from_onnx(path, dtype=dtype, max_seqlen=max_seqlen)
    assert graph.spec.vocab_size == vocab_size
    random = np.random.default_rng(1)
    ours = DecoderRun(graph)
    originals = {name: OriginalRun(path) for name in ("a", "b")}
    for step in STEPS:
        requests = [(n, random.integers(0, vocab_size, size=count).tolist()) for n, count in step]
        got = ours.step(requests)
        for name, ids in requests:
            wanted = originals[name].step(ids)
            np.testing.assert_allclose(got[name], wanted, atol=tolerance, rtol=tolerance)
    return graph
