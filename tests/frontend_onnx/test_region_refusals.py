"""Attention in primitive ops that is almost, but not quite, what the cut op computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

pytest.importorskip("transformers")

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from tests.frontend_onnx.exports import export_model

Change = Callable[[onnx.GraphProto], None]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("region")
    return export_model(folder / "model.onnx", "llama", dynamo=False, attention="eager")


def insert_after(graph: onnx.GraphProto, name: str, *nodes: onnx.NodeProto) -> None:
    """Let all readers of `name` read the last of `nodes` instead."""
    new = nodes[-1].output[0]
    for node in graph.node:
        for index, read in enumerate(node.input):
            if read == name:
                node.input[index] = new
    at = next(i for i, n in enumerate(graph.node) if name in n.output) + 1
    for offset, node in enumerate(nodes):
        graph.node.insert(at + offset, node)


def constant(graph: onnx.GraphProto, name: str, values: np.ndarray) -> str:
    graph.initializer.append(numpy_helper.from_array(values, name))
    return name


def scores_of(graph: onnx.GraphProto) -> str:
    """Return what the first softmax reads."""
    return next(node.input[0] for node in graph.node if node.op_type == "Softmax")


def cut_cache(graph: onnx.GraphProto) -> None:
    """Keep the last 20 tokens only: shorter sequences would not show it."""
    starts, ends, axes = (
        constant(graph, name, np.array([value], dtype=np.int64))
        for name, value in (("w_start", -20), ("w_end", 1 << 40), ("w_axis", 2))
    )
    for what in ("key", "value"):
        node = helper.make_node("Slice", [f"present.0.{what}", starts, ends, axes], [f"cut_{what}"])
        insert_after(graph, f"present.0.{what}", node)


def scale_heads(graph: onnx.GraphProto) -> None:
    """Give each head a temperature of its own."""
    numbers = np.linspace(0.5, 2.0, 4, dtype=np.float32).reshape(1, 4, 1, 1)
    node = helper.make_node(
        "Mul", [scores_of(graph), constant(graph, "heat", numbers)], ["hot"], name="heat_node"
    )
    insert_after(graph, scores_of(graph), node)


def clip_scores(graph: onnx.GraphProto) -> None:
    low = constant(graph, "low", np.array(-0.1, dtype=np.float32))
    node = helper.make_node("Clip", [scores_of(graph), low], ["clipped"], name="clip_node")
    insert_after(graph, scores_of(graph), node)


def softmax_over_queries(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "Softmax")
    node.attribute[0].i = 2


def damp_weights(graph: onnx.GraphProto) -> None:
    """Scale the weights after the softmax: the walk allows it, the proof must not."""
    softmax = next(node for node in graph.node if node.op_type == "Softmax")
    number = constant(graph, "damp", np.array(0.5, dtype=np.float32))
    insert_after(
        graph, softmax.output[0], helper.make_node("Mul", [softmax.output[0], number], ["damped"])
    )


def swap_values(graph: onnx.GraphProto) -> None:
    """Reverse the order of the value heads."""
    order = constant(graph, "order", np.array([1, 0], dtype=np.int64))
    node = helper.make_node("Gather", ["present.0.value", order], ["swapped"], axis=1)
    insert_after(graph, "present.0.value", node)


def cross_layers(graph: onnx.GraphProto) -> None:
    """Let the second layer attend to the first layer's keys."""
    for node in graph.node:
        for index, read in enumerate(node.input):
            if read == "present.1.key" and node.op_type != "Shape":
                node.input[index] = "present.0.key"


CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "cut_cache": (cut_cache, ("61 past tokens",)),
    "scale_heads": (scale_heads, ("past_key_values.0.key", "heat_node")),
    "clip_scores": (clip_scores, ("past_key_values.0.key", "clip_node")),
    "softmax_over_queries": (softmax_over_queries, ("Softmax", "causal attention")),
    "damp_weights": (damp_weights, ("Softmax", "causal attention")),
    "swap_values": (swap_values, ("Softmax", "causal attention")),
    "cross_layers": (cross_layers, ("past_key_values.0.key", "2 attention layers")),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(exported: Path, tmp_path: Path, name: str) -> None:
    change, words = CASES[name]
    model = onnx.load(str(exported))
    change(model.graph)
    path = tmp_path / "model.onnx"
    onnx.save_model(model, str(path))
    with pytest.raises(BlinkError) as caught:
        decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=64)
    for word in words:
        assert word in str(caught.value)
