"""Attention in primitive ops, as torch exports it, against onnxruntime and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from tests.frontend_onnx.compare import assert_same_logits
from tests.frontend_onnx.evaluate import DecoderRun
from tests.frontend_onnx.exports import VOCAB, export_model, random_model

# The TorchScript exporter writes shape arithmetic op by op; this is also how optimum exports.
TORCHSCRIPT: dict[str, dict[str, Any]] = {
    "llama_sdpa": {"kind": "llama", "opset": 17},
    "llama_eager": {"kind": "llama", "attention": "eager", "opset": 14},
    "llama_no_positions": {"kind": "llama", "takes_positions": False},
    "llama3_rope": {"kind": "llama3_rope", "opset": 16},
    "qwen2": {"kind": "qwen2"},
    "qwen3": {"kind": "qwen3", "attention": "eager"},
    "gpt2": {"kind": "gpt2", "attention": "eager"},
    "gpt2_sdpa": {"kind": "gpt2"},
    "gpt2_no_positions": {"kind": "gpt2", "takes_positions": False},
    "phi": {"kind": "phi"},
    "phi_eager": {"kind": "phi", "attention": "eager", "opset": 13},
    "phi3": {"kind": "phi3"},
    "gpt_neox": {"kind": "gpt_neox", "attention": "eager"},
    "gptj": {"kind": "gptj", "attention": "eager"},
    "opt": {"kind": "opt", "attention": "eager"},
    "mistral_window": {"kind": "mistral"},
    "gemma2_window_softcap": {"kind": "gemma2", "attention": "eager"},
}
MORE_TORCHSCRIPT = {
    "llama_eager",
    "llama3_rope",
    "gpt2_sdpa",
    "phi_eager",
    "phi3",
    "gpt_neox",
    "opt",
    "mistral_window",
}
DYNAMO: dict[str, dict[str, Any]] = {
    "qwen3_18": {"kind": "qwen3", "opset": 18},
    "llama_18": {"kind": "llama", "opset": 18},
    "llama_eager_18": {"kind": "llama", "attention": "eager", "opset": 18},
    "llama_no_positions_18": {"kind": "llama", "takes_positions": False, "opset": 18},
    "llama_23": {"kind": "llama", "opset": 23},
    "qwen2_24": {"kind": "qwen2", "opset": 24},
    "gpt2_18": {"kind": "gpt2", "opset": 18},
    "gpt2_23": {"kind": "gpt2", "opset": 23},
    "phi_20": {"kind": "phi", "opset": 20},
    "phi3_18": {"kind": "phi3", "opset": 18},
}
_SLOW = pytest.mark.slow  # torch.export takes ten seconds a model; many models add up


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=_SLOW if n in MORE_TORCHSCRIPT else ()) for n in TORCHSCRIPT]
)
def test_torchscript_export(tmp_path: Path, name: str) -> None:
    path = export_model(tmp_path / "model.onnx", dynamo=False, **TORCHSCRIPT[name])
    assert_same_logits(path, vocab_size=VOCAB)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "qwen3_18" else _SLOW) for n in DYNAMO]
)
def test_dynamo_export(tmp_path: Path, name: str) -> None:
    path = export_model(tmp_path / "model.onnx", dynamo=True, **DYNAMO[name])
    assert_same_logits(path, vocab_size=VOCAB)


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        "gpt2",
        "phi",
        *(pytest.param(kind, marks=_SLOW) for kind in ("llama", "mistral", "gemma2")),
    ],
)
def test_equals_transformers(tmp_path: Path, kind: str) -> None:
    """The compiled graph gives the logits of the PyTorch model, not only those of the export."""
    import torch

    from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx

    path = export_model(tmp_path / "model.onnx", kind, dynamo=False, attention="eager")
    graph = decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=64)
    ids = np.random.default_rng(3).integers(0, VOCAB, size=17).tolist()
    with torch.no_grad():
        wanted = random_model(kind, "eager")(torch.tensor([ids])).logits[0].numpy()
    run = DecoderRun(graph)
    got = np.concatenate([run.step([("a", ids[:11])])["a"], run.step([("a", ids[11:])])["a"]])
    np.testing.assert_allclose(got, wanted, atol=3e-4, rtol=3e-4)
