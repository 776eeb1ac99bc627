"""Decoder graphs written by hand: the smallest thing each pass can be shown on."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from blinkc.frontend.decoder_graph import DecoderGraph, ModelSpec, WeightPart, WeightRef
from blinkc.frontend.hf_export import register_schemas

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
HIDDEN, VOCAB, HEADS, SIZE = 8, 12, 2, 4


class GraphWriter:
    """Collects nodes and weights of one decoder."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, WeightRef] = {}
        self._inputs = [
            helper.make_tensor_value_info("input_ids", INT64, ["T"]),
            helper.make_tensor_value_info("positions", INT64, ["T"]),
            helper.make_tensor_value_info("rows", INT64, ["R"]),
        ]

    def weight(self, name: str, *shape: int) -> str:
        """Add a weight input with random content."""
        seed = len(self.weights)
        part = WeightPart(source="random", key=name, shape=shape, dtype="fp32", seed=seed)
        self.weights[name] = WeightRef(name=name, shape=shape, dtype="fp32", parts=(part,))
        self._inputs.append(helper.make_tensor_value_info(name, FLOAT, shape))
        return name

    def constant(self, value: object, dtype: type = np.int64) -> str:
        name = f"const{len(self.nodes)}"
        tensor = onnx.numpy_helper.from_array(np.array(value, dtype=dtype))
        self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def add(self, op: str, *inputs: str, domain: str = "", **attributes: object) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        node = helper.make_node(op, list(inputs), [name], name=f"node_{name}", **attributes)
        node.domain = domain
        self.nodes.append(node)
        return name

    def embed(self) -> str:
        """`[T, 1, H]`, as transformers' batch axis carries the tokens."""
        ids = self.add("Unsqueeze", "input_ids", self.constant([1]))
        return self.add("Gather", self.weight("embed", VOCAB, HIDDEN), ids)

    def linear(self, x: str, name: str, width: int = HIDDEN) -> str:
        weight = self.weight(name, width, HIDDEN)
        return self.add("MatMul", x, self.add("Transpose", weight, perm=[1, 0]))

    def attend(self, x: str, layer: str) -> str:
        """Attention over `x` `[T, 1, H]`; heads are split by a shape made of the batch size."""
        batch = self.add("Gather", self.add("Shape", x), self.constant([0]))
        target = self.add(
            "Concat", batch, self.constant([1]), self.constant([HEADS]), self.constant([-1]), axis=0
        )
        heads = []
        for role in ("q", "k", "v"):
            split = self.add("Reshape", self.linear(x, f"{layer}.{role}"), target, allowzero=1)
            turned = self.add("Transpose", split, perm=[0, 2, 1, 3])
            heads.append(self.add("Squeeze", turned, self.constant([2])))
        scale = {"scale": 0.5, "window": 0, "softcap": 0.0}
        out = self.add("PagedAttention", *heads, "positions", domain="blink", **scale)
        return self.add("Reshape", out, self.constant([-1, 1, HIDDEN]))

    def finish(self, x: str) -> DecoderGraph:
        """Pick rows, multiply with the head and close the graph."""
        flat = self.add("Squeeze", x, self.constant([1]))
        picked = self.add("Gather", flat, "rows")
        out = self.linear(picked, "head", VOCAB)
        self.nodes[-1].output[0] = "logits"
        del out
        logits = helper.make_tensor_value_info("logits", FLOAT, ["R", VOCAB])
        graph = helper.make_graph(self.nodes, "decoder", self._inputs, [logits])
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("blink", 1)]
        register_schemas()
        spec = ModelSpec(
            name="small",
            architecture="Small",
            dtype="fp32",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            max_position_embeddings=64,
            attention=(),
        )
        model = helper.make_model(graph, opset_imports=opsets)
        return DecoderGraph(spec=spec, model=model, weights=self.weights)


def small_decoder(num_layers: int) -> DecoderGraph:
    """A decoder of equal layers: attention and a residual."""
    writer = GraphWriter()
    x = writer.embed()
    for layer in range(num_layers):
        x = writer.add("Add", x, writer.attend(x, f"layer{layer}"))
    return writer.finish(x)
