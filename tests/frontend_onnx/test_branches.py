"""`If` nodes, files without all logits, and facts beside the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from tests.frontend_onnx.compare import assert_same_logits
from tests.frontend_onnx.evaluate import DecoderRun
from tests.frontend_onnx.op_models import VOCAB, build_op_model
from tests.frontend_onnx.original import OriginalRun


def test_long_rope_is_fixed_for_the_limit(tmp_path: Path) -> None:
    """The table for long sequences is taken, and the manifest's notes say so."""
    path = build_op_model(tmp_path / "model.onnx", longrope_at=20)
    graph = decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=64)
    assert any("64" in note for note in graph.spec.notes)
    ids = np.random.default_rng(0).integers(0, VOCAB, size=30).tolist()
    ours, original = DecoderRun(graph), OriginalRun(path)
    for chunk in (ids[:25], ids[25:]):
        got, wanted = ours.step([("a", chunk)])["a"], original.step(chunk)
        np.testing.assert_allclose(got, wanted, atol=2e-4, rtol=2e-4)


def test_short_limit_takes_the_short_table(tmp_path: Path) -> None:
    path = build_op_model(tmp_path / "model.onnx", longrope_at=40)
    graph = assert_same_logits(path, vocab_size=VOCAB, max_seqlen=40)
    assert not graph.spec.notes


def test_model_that_keeps_only_the_last_token(tmp_path: Path) -> None:
    """The pick of the last token is replaced by the step's rows."""
    path = build_op_model(tmp_path / "model.onnx", last_token_only=True)
    graph = decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=64)
    ours, original = DecoderRun(graph), OriginalRun(path)
    for chunk in ([3, 1, 4, 1, 5], [9, 2], [6]):
        got, wanted = ours.step([("a", chunk)])["a"], original.step(chunk)
        np.testing.assert_allclose(got[-1:], wanted, atol=2e-4, rtol=2e-4)


def test_merged_decoder(tmp_path: Path) -> None:
    """optimum's merged decoders hold the graph in the branch taken with a cache."""
    path = build_op_model(
        tmp_path / "plain.onnx", attention="standard", rotary="node", fused_norm=False
    )
    model = onnx.load(str(path))
    graph = model.graph
    then_branch = helper.make_graph(list(graph.node), "with_past", [], list(graph.output))
    nothing = []
    for value in graph.output:
        shape = helper.make_tensor("z", TensorProto.FLOAT, [1, 1, 1], [0.0])
        nothing.append(helper.make_node("Constant", [], [f"no_{value.name}"], value=shape))
    else_outputs = [
        helper.make_tensor_value_info(f"no_{o.name}", TensorProto.FLOAT, None) for o in graph.output
    ]
    else_branch = helper.make_graph(nothing, "without_past", [], else_outputs)
    chosen = helper.make_node(
        "If",
        ["use_cache_branch"],
        [f"out_{o.name}" for o in graph.output],
        then_branch=then_branch,
        else_branch=else_branch,
    )
    outputs = []
    for value in graph.output:
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(value)
        copy.name = f"out_{value.name}" if value.name != "logits" else "out_logits"
        outputs.append(copy)
    switch = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    merged = helper.make_graph(
        [chosen], "merged", [*graph.input, switch], outputs, list(graph.initializer)
    )
    merged_path = tmp_path / "merged.onnx"
    merged_model = helper.make_model(merged, opset_imports=model.opset_import, ir_version=10)
    onnx.save_model(merged_model, str(merged_path))
    wanted = decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=64)
    got = decoder_graph_from_onnx(merged_path, dtype="fp32", max_seqlen=64)
    ids = [5, 7, 11, 13]
    np.testing.assert_array_equal(
        DecoderRun(got).step([("a", ids)])["a"], DecoderRun(wanted).step([("a", ids)])["a"]
    )


def test_facts_of_config_json(tmp_path: Path) -> None:
    build_op_model(tmp_path / "model.onnx")
    facts = {"model_type": "llama", "max_position_embeddings": 50, "eos_token_id": [7, 8]}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    spec = decoder_graph_from_onnx(tmp_path, dtype="fp32").spec
    assert spec.architecture == "llama"
    assert spec.max_position_embeddings == 50
    assert spec.eos_token_ids == (7, 8)


def test_facts_of_genai_config(tmp_path: Path) -> None:
    path = build_op_model(tmp_path / "model.onnx")
    model = {"type": "phi3", "context_length": 40, "eos_token_id": 9, "bos_token_id": 1}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": model}))
    spec = decoder_graph_from_onnx(path, dtype="fp32").spec
    assert (spec.architecture, spec.max_position_embeddings) == ("phi3", 40)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((9,), 1)


def test_rotary_table_limits_positions(tmp_path: Path) -> None:
    """Without a config the rotary table says how long a sequence may be."""
    path = build_op_model(tmp_path / "model.onnx", positions=48)
    assert decoder_graph_from_onnx(path, dtype="fp32").spec.max_position_embeddings == 48
    asked = decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=4096)
    assert asked.spec.max_position_embeddings == 48
