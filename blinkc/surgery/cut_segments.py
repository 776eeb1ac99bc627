"""Cut the squeezed graph at its `blink::` nodes: graph in, pieces and cut ops in order out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from blinkc.errors import BlinkError
from blinkc.surgery.fold_shapes import ROW_SYMBOLS, SAMPLES, TOKENS
from blinkc.surgery.squeeze_tokens import SqueezedDecoder


@dataclass(kw_only=True, slots=True)
class Piece:
    """What runs between two rounds of cut ops.

    `outputs` are the tensors that later pieces or cut ops read: those of the cut ops first, in
    their order. `cut_ops` run after the piece. `nodes` holds the ids of the nodes first run in
    it.
    """

    nodes: set[int] = field(default_factory=set)
    outputs: list[gs.Variable] = field(default_factory=list)
    cut_ops: list[gs.Node] = field(default_factory=list)


def cut_segments(decoder: SqueezedDecoder) -> list[Piece]:
    """Give each node the earliest piece it can run in and say which tensors cross.

    Raises:
        BlinkError: a tensor would cross that cannot.
    """
    decoder.graph.toposort()
    order = {id(node): index for index, node in enumerate(decoder.graph.nodes)}
    depth = node_depths(decoder)
    crossing: dict[int, dict[int, gs.Variable]] = defaultdict(dict)  # depth made -> tensors by id
    last = max((depth[id(node)] for node in decoder.graph.nodes), default=0)
    pieces = [Piece() for _ in range(last + 1)]
    for node in decoder.graph.nodes:
        reader = depth[id(node)]
        if node.domain == "blink":
            pieces[reader].cut_ops.append(node)
        else:
            pieces[reader].nodes.add(id(node))
        for tensor in node.inputs:
            # A view that a cut op reads is handed over as such; others are made anew where read.
            handed = [tensor] if node.domain == "blink" else sources(tensor, depth, reader)
            for source in handed:
                made = made_in(source, depth)
                if made is not None and made != reader:
                    crossing[made][id(source)] = source
    for index, piece in enumerate(pieces):
        named = [t for cut_op in piece.cut_ops for t in cut_op.inputs if made_in(t, depth) == index]
        rest = sorted(crossing[index].values(), key=lambda tensor: order[id(tensor.inputs[0])])
        for tensor in (*named, *rest):
            if not any(tensor is other for other in piece.outputs):
                piece.outputs.append(tensor)
    if not any(decoder.logits is tensor for tensor in pieces[-1].outputs):
        pieces[-1].outputs.append(decoder.logits)
    for piece in pieces:
        for tensor in piece.outputs:
            if tensor.dtype == bool:
                raise BlinkError(f"tensor `{tensor.name}` of booleans crosses a cut op")
    return pieces


def node_depths(decoder: SqueezedDecoder) -> dict[int, int]:
    """Number of cut ops, at most, between the inputs and each node."""
    depth: dict[int, int] = {}
    for node in decoder.graph.nodes:
        found = 0
        for tensor in node.inputs:
            if tensor.inputs:
                producer = tensor.inputs[0]
                found = max(found, depth[id(producer)] + (producer.domain == "blink"))
        depth[id(node)] = found
    return depth


def made_in(tensor: gs.Tensor, depth: dict[int, int]) -> int | None:
    """Say which piece makes a tensor: None for inputs, weights, constants and cut ops' results."""
    if not tensor.inputs or tensor.inputs[0].domain == "blink":
        return None
    return depth[id(tensor.inputs[0])]


def is_made_anew(tensor: gs.Tensor) -> bool:
    """Say whether a tensor is cheaper to make again in each piece than to hand over.

    Views are, and picked rows, so that the piece before the last stays like the others; what has no
    rows, such as arithmetic on a weight, must be.
    """
    if not tensor.inputs or tensor.inputs[0].domain == "blink":
        return False
    has_rows = bool(tensor.shape) and tensor.shape[0] in ROW_SYMBOLS
    producer = tensor.inputs[0]
    picks = producer.op == "Gather" and producer.inputs[0].shape[:1] == (TOKENS,)
    return producer.op == "Reshape" or not has_rows or (picks and tensor.shape[0] == SAMPLES)


def sources(tensor: gs.Tensor, depth: dict[int, int], piece: int) -> list[gs.Tensor]:
    """Follow what is made anew in `piece` back to the tensors that must be handed to it."""
    made = made_in(tensor, depth)
    if made is None or made == piece or not is_made_anew(tensor):
        return [tensor]
    return [s for inner in tensor.inputs[0].inputs for s in sources(inner, depth, piece)]
