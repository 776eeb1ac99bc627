"""Damaged files: whatever is changed, the answer is a BlinkError or a graph, never a crash."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import onnx
import pytest

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from tests.frontend_onnx.op_models import build_op_model

SMALL: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "group_query": {"rotary": "node"},
    "standard": {
        "attention": "standard",
        "is_causal": False,
        "rotary": "none",
        "fused_norm": False,
    },
    "quantized": {"bits": 4},
}
NUM_FILES = 40


def damage(model: onnx.ModelProto, chance: random.Random) -> bytes:
    """Change one thing in a copy of the model, or a few bytes of the file."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    node = chance.choice(copy.graph.node)
    kind = chance.randrange(6)
    if kind == 0 and node.input:
        del node.input[chance.randrange(len(node.input)) :]
    elif kind == 1 and node.attribute:
        del node.attribute[chance.randrange(len(node.attribute))]
    elif kind == 2 and node.input:
        names = [name for other in copy.graph.node for name in other.input]
        node.input[chance.randrange(len(node.input))] = chance.choice(names)
    elif kind == 3:
        node.op_type = chance.choice(copy.graph.node).op_type
    elif kind == 4:
        tensor = chance.choice(copy.graph.initializer)
        if tensor.dims:
            tensor.dims[0] = chance.choice([0, 1, 3, -1, 1 << 40])
    data = bytearray(copy.SerializeToString())
    if kind == 5:
        for _ in range(3):
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("name", VARIANTS)
def test_damaged_files(tmp_path: Path, name: str) -> None:
    model = onnx.load(str(build_op_model(tmp_path / "whole.onnx", **SMALL, **VARIANTS[name])))
    chance = random.Random(name)
    refused = 0
    for _ in range(NUM_FILES):
        path = tmp_path / "model.onnx"
        path.write_bytes(damage(model, chance))
        try:
            decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=64)
        except BlinkError:
            refused += 1
    assert refused > NUM_FILES // 4
