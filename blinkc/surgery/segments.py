"""What surgery delivers: few distinct segments, and the order in which they and the cut ops run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx

    from blinkc.frontend.decoder_graph import ModelSpec, WeightRef


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSpec:
    """A tensor that passes between calls: `[rows, *shape]`.

    `rows` is "tokens" (T of the step) or "samples" (R, one per row of the batch).
    """

    name: str
    rows: str
    shape: tuple[int, ...]
    dtype: str  # "fp32", "fp16", "bf16", "int32", "int64"


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A piece of the model between cut ops, made canonical: equal layers give equal bytes.

    `model` has inputs `activations` then `weights`, and `outputs`, all by canonical names.
    Activations are 2-D `[rows, n]` (ids and positions 1-D); weights keep the `[N, K]` layout.
    """

    name: str
    digest: str  # SHA-256 of the canonical model
    model: onnx.ModelProto
    activations: tuple[ValueSpec, ...]
    weights: tuple[ValueSpec, ...]  # rows "" and the full static shape
    outputs: tuple[ValueSpec, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentCall:
    """Run `segments[segment]`; names are keys of `values` and `weights`, in the segment's order."""

    segment: int
    activations: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOpCall:
    """Run a cut op of ours: "PagedAttention", "MoeExperts" or "Sample" (attributes: README.md)."""

    op: str
    attributes: dict[str, Any]
    activations: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentedModel:
    """The model as a list of calls over few distinct segments."""

    spec: ModelSpec
    segments: tuple[Segment, ...]
    calls: tuple[SegmentCall | CutOpCall, ...]
    values: dict[str, ValueSpec]
    weights: dict[str, WeightRef]
