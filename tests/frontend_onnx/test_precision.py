"""Compiling to fp16 and bf16: norms and rotary angles stay fp32, matrices become narrow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from blinkc.frontend.decoder_graph import DecoderGraph
from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from tests.frontend_onnx.evaluate import DecoderRun
from tests.frontend_onnx.exports import VOCAB, export_model
from tests.frontend_onnx.op_models import build_op_model
from tests.frontend_onnx.original import OriginalRun


def assert_close_logits(graph: DecoderGraph, path: Path, vocab_size: int, count: int) -> None:
    """Compare at rounding's level: the error's norm against the logits' norm, token by token."""
    ids = np.random.default_rng(2).integers(0, vocab_size, size=count).tolist()
    got = DecoderRun(graph).step([("a", ids)])["a"].astype(np.float64)
    wanted = OriginalRun(path).step(ids).astype(np.float64)
    error = np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert error.max() < 0.06


def weight_types(graph: DecoderGraph) -> dict[int, set[str]]:
    """Return the types of weights by rank."""
    types: dict[int, set[str]] = {}
    for ref in graph.weights.values():
        if "wpe" not in ref.name:  # looked up by position: kept in fp32
            types.setdefault(len(ref.shape), set()).add(ref.dtype)
    return types


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", "bf16"),
        ("gpt2", "fp16"),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind, dtype in (
                ("llama", "fp16"),
                ("qwen3", "fp16"),
                ("qwen3", "bf16"),
                ("gpt2", "bf16"),
            )
        ),
    ],
)
def test_fp32_export(tmp_path: Path, kind: str, dtype: str) -> None:
    path = export_model(tmp_path / "model.onnx", kind, dynamo=False, attention="eager", opset=17)
    graph = decoder_graph_from_onnx(path, dtype=dtype, max_seqlen=128)
    assert graph.spec.dtype == dtype
    assert weight_types(graph)[2] == {dtype}
    assert_close_logits(graph, path, VOCAB, 20)


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("sdpa", "fp16"),
        ("eager", "fp32"),
        *(
            pytest.param(attention, dtype, marks=pytest.mark.slow)
            for attention, dtype in (
                ("sdpa", "fp32"),
                ("sdpa", "bf16"),
                ("eager", "fp16"),
                ("eager", "bf16"),
            )
        ),
    ],
)
def test_fp16_export(tmp_path: Path, attention: str, dtype: str) -> None:
    """The exporter leaves attention's result in fp32 with sdpa: types must still agree."""
    path = tmp_path / "model.onnx"
    export_model(path, "llama", dynamo=False, attention=attention, is_half=True)
    graph = decoder_graph_from_onnx(path, dtype=dtype, max_seqlen=128)
    assert_close_logits(graph, path, VOCAB, 20)


def test_angles_of_late_positions_stay_exact(tmp_path: Path) -> None:
    """bf16 cannot tell position 257 from 256: angles must be computed in fp32."""
    path = export_model(tmp_path / "model.onnx", "llama", dynamo=False)
    graph = decoder_graph_from_onnx(path, dtype="bf16", max_seqlen=512)
    casts = [
        node.attribute[0].i
        for node in graph.model.graph.node
        if node.op_type == "Cast" and node.input[0].startswith(("positions", "reshape"))
    ]
    assert casts and set(casts) == {onnx.TensorProto.FLOAT}
    assert_close_logits(graph, path, VOCAB, 300)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_fp16_group_query(tmp_path: Path, dtype: str) -> None:
    path = build_op_model(tmp_path / "model.onnx", fp16=True)
    graph = decoder_graph_from_onnx(path, dtype=dtype, max_seqlen=64)
    assert weight_types(graph)[2] == {dtype}
    assert_close_logits(graph, path, 61, 20)


def test_quantized_matrices(tmp_path: Path) -> None:
    path = build_op_model(tmp_path / "model.onnx", bits=4)
    graph = decoder_graph_from_onnx(path, dtype="bf16", max_seqlen=64)
    assert weight_types(graph)[2] == {"bf16"}
    assert_close_logits(graph, path, 61, 12)
