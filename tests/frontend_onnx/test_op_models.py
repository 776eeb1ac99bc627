"""Attention ops of com.microsoft and of opset 23, against onnxruntime on the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frontend_onnx.compare import assert_same_logits
from tests.frontend_onnx.op_models import VOCAB, build_op_model

GROUP_QUERY: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"packed": True, "qkv_bias": True},
    "interleaved": {"interleaved": True},
    "rotary_node": {"rotary": "node"},
    "rotary_node_interleaved": {"rotary": "node", "interleaved": True},
    "no_rotary": {"rotary": "none"},
    "partial_rotary": {"head_dim": 32, "rotary_fraction": 0.5},
    "window": {"window": 5},
    "softcap": {"softcap": 3.0, "scale": 0.9, "logit_softcap": 2.0},
    "sinks": {"head_sink": True},
    "smooth_softmax": {"smooth_softmax": True},
    "int4": {"bits": 4},
    "int4_zero_points": {"bits": 4, "zero_points": True, "hidden": 40},
    "int8": {"bits": 8},
    "unfused_norm": {"fused_norm": False, "opset": 23},
    "external_data": {"external_data": True},
}
STANDARD: dict[str, dict[str, Any]] = {
    "apart": {"attention": "standard"},
    "flat": {"attention": "standard_flat"},
    "flat_masked": {"attention": "standard_flat", "is_causal": False},
    "flat_window": {"attention": "standard_flat", "is_causal": False, "window": 6},
    "apart_masked": {"attention": "standard", "is_causal": False},
    "softcap": {"attention": "standard_flat", "softcap": 4.0, "scale": 0.7},
    "interleaved": {"attention": "standard_flat", "interleaved": True},
    "opset24": {"attention": "standard", "opset": 24},
}


@pytest.mark.parametrize("name", GROUP_QUERY)
def test_group_query_attention(tmp_path: Path, name: str) -> None:
    path = build_op_model(tmp_path / "model.onnx", **GROUP_QUERY[name])
    graph = assert_same_logits(path, vocab_size=VOCAB)
    assert len(graph.spec.attention) == 2
    assert graph.spec.attention[0].window == max(GROUP_QUERY[name].get("window", 0), 0)


def test_group_query_attention_fp16(tmp_path: Path) -> None:
    """fp16 weights become fp32 for the CPU target; only the file's own rounding differs."""
    path = build_op_model(tmp_path / "model.onnx", fp16=True)
    graph = assert_same_logits(path, vocab_size=VOCAB, tolerance=3e-2)
    assert {ref.dtype for ref in graph.weights.values()} == {"fp32"}


@pytest.mark.parametrize("name", STANDARD)
def test_standard_attention(tmp_path: Path, name: str) -> None:
    options = {"rotary": "node", "fused_norm": False, **STANDARD[name]}
    path = build_op_model(tmp_path / "model.onnx", **options)
    assert_same_logits(path, vocab_size=VOCAB)


def test_multi_head_attention(tmp_path: Path) -> None:
    options = {"attention": "mha", "rotary": "node", "kv_heads": 4}
    path = build_op_model(tmp_path / "model.onnx", **options)
    assert_same_logits(path, vocab_size=VOCAB)
