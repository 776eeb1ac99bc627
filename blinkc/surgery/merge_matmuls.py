"""Write products with weights as Gemm over `[N, K]` weights; join those that share their input.

Engines no longer merge q, k, v or gate and up themselves once weights are inputs; one wide
product reads the activations once and fills the machine better.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from blinkc.frontend.decoder_graph import WeightRef
from blinkc.surgery.squeeze_tokens import SqueezedDecoder


def merge_matmuls(decoder: SqueezedDecoder, weights: dict[str, WeightRef]) -> dict[str, WeightRef]:
    """Rewrite the products of `decoder` in place and return the weights they read now."""
    merger = _Merger(decoder, dict(weights))
    for node in list(decoder.graph.nodes):
        if node.op in ("MatMul", "Gemm"):
            merger.make_linear(node)
    decoder.graph.cleanup(remove_unused_graph_inputs=False)  # transposed weights are free again
    for node in list(decoder.graph.nodes):
        if node.op == "Gemm" and len(node.inputs) == 2:
            merger.absorb_bias(node)
    merger.join_products()
    decoder.graph.cleanup(remove_unused_graph_inputs=False)
    return merger.weights


class _Merger:
    def __init__(self, decoder: SqueezedDecoder, weights: dict[str, WeightRef]) -> None:
        self._decoder = decoder
        self.weights = weights

    def make_linear(self, node: gs.Node) -> None:
        """Write `x @ W` as Gemm(x, W, transB=1) with W `[N, K]` where W is a weight."""
        x, right = node.inputs[0], node.inputs[1]
        if len(x.shape) != 2 or (node.op == "Gemm" and node.attrs.get("transB")):
            return
        producer = right.inputs[0] if right.inputs else None
        if producer is not None and producer.op == "Transpose":
            right = producer.inputs[0]
        elif right.name in self._decoder.weights:
            right = self._transposed(right)
        else:
            return
        if right.name not in self._decoder.weights:
            return
        node.op = "Gemm"
        node.attrs = {"transB": 1}
        node.inputs = [x, right, *node.inputs[2:]]

    def _transposed(self, weight: gs.Variable) -> gs.Variable:
        """Have a `[K, N]` weight read as `[N, K]`."""
        name = f"{weight.name}.T"
        if name not in self._decoder.weights:
            reference = self.weights[weight.name]
            shape = (weight.shape[1], weight.shape[0])
            parts = tuple(replace(part, transpose=not part.transpose) for part in reference.parts)
            if len(parts) != 1 or parts[0].rows is not None:
                raise NotImplementedError(f"weight {weight.name} is in parts and [K, N]")
            self.weights[name] = replace(reference, name=name, shape=shape, parts=parts)
            self._add_weight(gs.Variable(name, dtype=weight.dtype, shape=shape))
        return self._decoder.weights[name]

    def _add_weight(self, weight: gs.Variable) -> None:
        self._decoder.weights[weight.name] = weight
        self._decoder.graph.inputs.append(weight)

    def absorb_bias(self, node: gs.Node) -> None:
        """Move the addition of a bias `[N]` into the Gemm before it."""
        out = node.outputs[0]
        if len(out.outputs) != 1 or out is self._decoder.logits or out.outputs[0].op != "Add":
            return
        add = out.outputs[0]
        bias = add.inputs[1] if add.inputs[0] is out else add.inputs[0]
        if bias.name not in self._decoder.weights or tuple(bias.shape) != (out.shape[1],):
            return
        result = add.outputs[0]
        add.outputs.clear()
        add.inputs.clear()
        node.inputs.append(bias)
        node.outputs = [result]

    def join_products(self) -> None:
        """Join Gemm nodes that read the same tensor and have weights of their own."""
        groups: dict[tuple[int, int], list[gs.Node]] = {}
        for node in self._decoder.graph.nodes:
            if node.op == "Gemm" and node.attrs.get("transB") and self._owns_weights(node):
                groups.setdefault((id(node.inputs[0]), len(node.inputs)), []).append(node)
        for nodes in groups.values():
            if len(nodes) > 1:
                self._join(nodes)

    def _owns_weights(self, node: gs.Node) -> bool:
        return all(
            tensor.name in self._decoder.weights and len(tensor.outputs) == 1
            for tensor in node.inputs[1:]
        )

    def _join(self, nodes: list[gs.Node]) -> None:
        x = nodes[0].inputs[0]
        widths = [int(node.outputs[0].shape[1]) for node in nodes]
        inputs = [x]
        for index in range(1, len(nodes[0].inputs)):
            inputs.append(self._concatenated([node.inputs[index] for node in nodes]))
        name = nodes[0].outputs[0].name + "_joined"
        wide = gs.Variable(name, dtype=nodes[0].outputs[0].dtype, shape=(x.shape[0], sum(widths)))
        joined = gs.Node("Gemm", name, {"transB": 1}, inputs, [wide])
        at = self._decoder.graph.nodes.index(nodes[0])
        slices = []
        start = 0
        for node, width in zip(nodes, widths, strict=True):
            slices.append(_slice_columns(wide, start, start + width, node.outputs[0]))
            node.outputs.clear()
            node.inputs.clear()
            start += width
        self._decoder.graph.nodes[at:at] = [joined, *slices]

    def _concatenated(self, tensors: list[gs.Variable]) -> gs.Variable:
        references = [self.weights[tensor.name] for tensor in tensors]
        name = "+".join(reference.name for reference in references)
        shape = (sum(int(tensor.shape[0]) for tensor in tensors), *tensors[0].shape[1:])
        parts = tuple(part for reference in references for part in reference.parts)
        self.weights[name] = WeightRef(
            name=name, shape=shape, dtype=references[0].dtype, parts=parts
        )
        self._add_weight(gs.Variable(name, dtype=tensors[0].dtype, shape=shape))
        return self._decoder.weights[name]


def _slice_columns(wide: gs.Variable, start: int, end: int, out: gs.Variable) -> gs.Node:
    numbers = [start, end, 1, 1]
    constants = [
        gs.Constant(f"{out.name}_{role}", np.array([number], dtype=np.int64))
        for role, number in zip(("start", "end", "axis", "step"), numbers, strict=True)
    ]
    out.inputs.clear()
    return gs.Node("Slice", f"{out.name}_slice", {}, [wide, *constants], [out])
