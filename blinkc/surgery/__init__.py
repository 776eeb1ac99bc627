"""Decoder graph -> few distinct segments. README.md names the passes and the ops they leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blinkc.frontend.decoder_graph import DecoderGraph
    from blinkc.surgery.segments import SegmentedModel


def segment_decoder(graph: DecoderGraph) -> SegmentedModel:
    """Squeeze, fold, merge, cut and canonicalize `graph`; onnx-graphsurgeon is imported here."""
    from blinkc.surgery.decoder_surgery import segment_decoder as run

    return run(graph)
