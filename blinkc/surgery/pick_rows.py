"""Pick the sampled tokens where the last piece begins: graph in, fewer rows in its products.

The front end's graph picks rows just before the head. What runs between the last cut op and there
works on each row alone, so that picking first computes the same for fewer rows: of a prefill, one
token a request instead of all. Keys and values of all tokens are made before the last attention.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from blinkc.surgery.cut_segments import made_in, node_depths
from blinkc.surgery.fold_shapes import SAMPLES, TOKENS
from blinkc.surgery.squeeze_tokens import SqueezedDecoder


def pick_rows_early(decoder: SqueezedDecoder) -> None:
    """Move every `Gather` by `rows` in the last piece up to what the piece is handed."""
    rows = decoder.inputs["rows"]
    decoder.graph.toposort()
    depth = node_depths(decoder)
    last = max(depth.values(), default=0)
    picks = [
        node
        for node in decoder.graph.nodes
        if node.op == "Gather" and len(node.inputs) == 2 and node.inputs[1] is rows
    ]
    picker = _Picker(decoder, depth, last)
    for node in picks:
        source, output = node.inputs[0], node.outputs[0]
        if depth[id(node)] != last or made_in(source, depth) != last:
            continue
        picked = picker.pick(source)
        for reader in list(output.outputs):
            reader.inputs = [picked if tensor is output else tensor for tensor in reader.inputs]
    decoder.graph.cleanup(remove_unused_graph_inputs=False)
    decoder.graph.toposort()


class _Picker:
    """Makes the picked form of tensors, each once."""

    def __init__(self, decoder: SqueezedDecoder, depth: dict[int, int], last: int) -> None:
        self._graph = decoder.graph
        self._rows = decoder.inputs["rows"]
        self._depth = depth
        self._last = last
        self._made: dict[int, gs.Tensor] = {}

    def pick(self, tensor: gs.Tensor) -> gs.Tensor:
        """Return `tensor` with the rows that are sampled; what has no rows of tokens as it is."""
        if not tensor.shape or tensor.shape[0] != TOKENS:
            return tensor
        if id(tensor) not in self._made:
            if made_in(tensor, self._depth) == self._last:
                self._clone(tensor.inputs[0])
            else:
                self._made[id(tensor)] = self._gather(tensor)
        return self._made[id(tensor)]

    def _gather(self, tensor: gs.Tensor) -> gs.Tensor:
        output = self._like(tensor)
        node = gs.Node(
            op="Gather",
            name=f"{output.name}.pick",
            attrs={"axis": 0},
            inputs=[tensor, self._rows],
            outputs=[output],
        )
        self._graph.nodes.append(node)
        return output

    def _clone(self, node: gs.Node) -> None:
        inputs = [self.pick(tensor) for tensor in node.inputs]
        outputs = [self._like(tensor) for tensor in node.outputs]
        self._graph.nodes.append(
            gs.Node(
                op=node.op,
                name=f"{node.name}.picked",
                attrs=dict(node.attrs),
                inputs=inputs,
                outputs=outputs,
                domain=node.domain,
            )
        )
        for tensor, output in zip(node.outputs, outputs, strict=True):
            self._made[id(tensor)] = output

    def _like(self, tensor: gs.Tensor) -> gs.Variable:
        shape = (SAMPLES, *tensor.shape[1:])
        return gs.Variable(f"{tensor.name}.picked", dtype=tensor.dtype, shape=shape)
