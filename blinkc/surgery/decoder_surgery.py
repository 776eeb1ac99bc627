"""The whole of surgery: decoder graph in, few distinct segments and the order of calls out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import DecoderGraph, WeightPart, WeightRef
from blinkc.surgery.canonicalize_segments import (
    DTYPE_NAMES,
    CanonicalPiece,
    canonicalize_piece,
    flat_shape,
    value_spec,
)
from blinkc.surgery.cut_segments import Piece, cut_segments
from blinkc.surgery.merge_matmuls import merge_matmuls
from blinkc.surgery.pick_rows import pick_rows_early
from blinkc.surgery.segments import CutOpCall, Segment, SegmentCall, SegmentedModel, ValueSpec
from blinkc.surgery.squeeze_tokens import SqueezedDecoder, squeeze_tokens

_MAX_INLINE_BYTES = 64  # larger constants become weights


def segment_decoder(graph: DecoderGraph) -> SegmentedModel:
    """Squeeze, fold, merge, pick, cut and canonicalize `graph`.

    Raises:
        BlinkError: the model has no attention layer, mixes tokens elsewhere, or uses an op
        without a rule;
            the message names the node.
    """
    squeezed = squeeze_tokens(graph)
    weights = merge_matmuls(squeezed, graph.weights)
    pick_rows_early(squeezed)
    weights |= _lift_constants(squeezed)
    pieces = cut_segments(squeezed)
    if not any(op.op == "PagedAttention" for piece in pieces for op in piece.cut_ops):
        raise BlinkError(
            "the model has no attention layer that became blink::PagedAttention",
            hint="only decoders with attention in every layer can be compiled",
        )
    assembler = _Assembler(squeezed)
    for piece in pieces:
        assembler.add(piece)
    used = {name for call in assembler.calls for name in call.weights}
    return SegmentedModel(
        spec=graph.spec,
        segments=tuple(assembler.segments),
        calls=(*assembler.calls, _sample()),
        values=assembler.values,
        weights={name: reference for name, reference in weights.items() if name in used},
    )


def _sample() -> CutOpCall:
    return CutOpCall(op="Sample", attributes={}, activations=("logits",), weights=(), outputs=())


def _lift_constants(decoder: SqueezedDecoder) -> dict[str, WeightRef]:
    """Make weights of the constants that are too large to lie in every segment."""
    lifted: dict[str, WeightRef] = {}
    for name, tensor in decoder.graph.tensors().items():
        if not isinstance(tensor, gs.Constant):
            continue
        value = np.ascontiguousarray(tensor.values)
        if value.nbytes <= _MAX_INLINE_BYTES or value.dtype.name not in DTYPE_NAMES:
            continue
        weight = f"constant.{name}"
        dtype = DTYPE_NAMES[value.dtype.name]
        part = WeightPart(
            source="inline", key=weight, shape=value.shape, dtype=dtype, inline=value.tobytes()
        )
        lifted[weight] = WeightRef(name=weight, shape=value.shape, dtype=dtype, parts=(part,))
        tensor.to_variable(value.dtype, value.shape)
        tensor.name = weight
        decoder.weights[weight] = tensor
        decoder.graph.inputs.append(tensor)
    return lifted


class _Assembler:
    """Collects the calls; equal pieces share a segment."""

    def __init__(self, decoder: SqueezedDecoder) -> None:
        self._logits = decoder.logits
        self._weights = {id(tensor) for tensor in decoder.weights.values()}
        self._names: dict[int, str] = {id(t): name for name, t in decoder.inputs.items()}
        self._by_digest: dict[str, int] = {}
        self._layers = {"PagedAttention": 0, "MoeExperts": 0}
        self.segments: list[Segment] = []
        self.calls: list[SegmentCall | CutOpCall] = []
        self.values: dict[str, ValueSpec] = {
            name: value_spec(tensor, name) for name, tensor in decoder.inputs.items()
        }

    def add(self, piece: Piece) -> None:
        """Append the call of `piece` and those of its cut ops."""
        canonical = canonicalize_piece(piece, lambda tensor: id(tensor) in self._weights)
        index = self._by_digest.setdefault(canonical.segment.digest, len(self.segments))
        if index == len(self.segments):
            self.segments.append(replace(canonical.segment, name=f"segment{index}"))
        self.calls.append(self._segment_call(index, canonical))
        for cut_op in piece.cut_ops:
            self.calls.append(self._cut_op_call(cut_op))

    def _segment_call(self, index: int, canonical: CanonicalPiece) -> SegmentCall:
        number = len(self.calls)
        for position, tensor in enumerate(canonical.outputs):
            name = "logits" if tensor is self._logits else f"call{number}.o{position}"
            self._name(tensor, name)
        return SegmentCall(
            segment=index,
            activations=tuple(self._names[id(tensor)] for tensor in canonical.activations),
            weights=tuple(tensor.name for tensor in canonical.weights),
            outputs=tuple(self._names[id(tensor)] for tensor in canonical.outputs),
        )

    def _cut_op_call(self, node: gs.Node) -> CutOpCall:
        layer = self._layers[node.op]
        self._layers[node.op] += 1
        word = "attention" if node.op == "PagedAttention" else "experts"
        for tensor in node.outputs:
            self._name(tensor, f"{word}{layer}")
        attributes = dict(node.attrs) | {"layer": layer}
        if node.op == "PagedAttention":
            attributes["rope"] = "none"
        return CutOpCall(
            op=node.op,
            attributes=attributes,
            activations=tuple(
                self._names[id(tensor)] for tensor in node.inputs if id(tensor) not in self._weights
            ),
            weights=tuple(tensor.name for tensor in node.inputs if id(tensor) in self._weights),
            outputs=tuple(self._names[id(tensor)] for tensor in node.outputs),
        )

    def _name(self, tensor: gs.Tensor, name: str) -> None:
        self._names[id(tensor)] = name
        spec = value_spec(tensor, name)
        flat = flat_shape(tuple(tensor.shape))
        self.values[name] = replace(spec, shape=tuple(int(dim) for dim in flat[1:]))
