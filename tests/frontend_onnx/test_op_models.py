"""Attention ops of com.microsoft and of opset 23, against onnxruntime on the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from tests.frontend_onnx.compare import assert_same_logits
from tests.frontend_onnx.evaluate import DecoderRun
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
    "open_head_dim": {"open_head_dim": True, "packed": True},
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


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "mha", "kv_heads": 4},
        {"attention": "mha_joined"},
        {"attention": "mha_joined", "window": 6, "open_head_dim": True},
    ],
    ids=["own_cache", "joined_cache", "joined_window"],
)
def test_multi_head_attention(tmp_path: Path, options: dict[str, Any]) -> None:
    path = build_op_model(tmp_path / "model.onnx", rotary="node", **options)
    assert_same_logits(path, vocab_size=VOCAB)


def test_norms_inside_attention(tmp_path: Path) -> None:
    """onnxruntime's CPU kernel lacks them: compare with norms before the op, heads as tokens."""
    fused = build_op_model(tmp_path / "fused.onnx", qk_norm=True)
    model = onnx.load(str(fused))
    for node in [n for n in model.graph.node if n.op_type == "GroupQueryAttention"]:
        for index, heads in ((0, 4), (1, 2)):
            name, scale = node.input[index], node.input[14 + index]
            shapes = {"apart": [0, -1, 16], "flat": [0, -1, heads * 16]}
            for key, shape in shapes.items():
                values = np.array(shape, dtype=np.int64)
                model.graph.initializer.append(numpy_helper.from_array(values, f"{name}.{key}"))
            at = list(model.graph.node).index(node)
            rows, normed = f"{name}.rows", f"{name}.normed_rows"
            for new in (
                helper.make_node("Reshape", [normed, f"{name}.flat"], [f"{name}.normed"]),
                helper.make_node(
                    "SimplifiedLayerNormalization", [rows, scale], [normed], axis=-1, epsilon=1e-5
                ),
                helper.make_node("Reshape", [name, f"{name}.apart"], [rows]),
            ):
                model.graph.node.insert(at, new)
            node.input[index] = f"{name}.normed"
        del node.input[9:]
        kept = [a for a in node.attribute if a.name != "qk_norm_epsilon"]
        del node.attribute[:]
        node.attribute.extend(kept)
    apart = tmp_path / "apart.onnx"
    onnx.save_model(model, str(apart))
    wanted = assert_same_logits(apart, vocab_size=VOCAB)
    got = decoder_graph_from_onnx(fused, dtype="fp32", max_seqlen=64)
    ids = list(range(3, 20))
    np.testing.assert_allclose(
        DecoderRun(got).step([("a", ids)])["a"],
        DecoderRun(wanted).step([("a", ids)])["a"],
        atol=1e-5,
    )
