"""Follow cached keys and values through an ONNX graph, back to where past joins new data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_attention import HeadsSource, heads_source
from blinkc.frontend.onnx_model import ONNX_DOMAINS, OnnxModel, attribute_values, describe_node

if TYPE_CHECKING:
    import onnx

    from blinkc.frontend.onnx_probe import Probe

VIEWS = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast", "Dropout"}
_CACHE_VIEWS = VIEWS | {"Expand", "Tile", "Gather", "Slice"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheJoin:
    """Where past and new keys (or values) meet."""

    seen: str  # what attention reads
    past: str
    new: str
    axis: int
    factor: float


def scalar_value(name: str, probes: Sequence[Probe]) -> float | None:
    """Return the number that `name` is everywhere and at every size, or None."""
    found: set[float] = set()
    for probe in probes:
        value = probe.value(name)
        if value is None or value.size == 0 or value.dtype == bool:
            return None
        found.update(float(x) for x in np.unique(np.asarray(value, dtype=np.float64))[:2])
    return found.pop() if len(found) == 1 else None


def find_cache_join(model: OnnxModel, name: str, probes: Sequence[Probe]) -> CacheJoin | None:
    """Walk back over views and scalings to the concatenation of a past input with new data."""
    factor, seen = 1.0, name
    unknown = probes[0].unknown_data
    for _ in range(64):
        node = model.producer.get(name)
        if node is None or node.domain not in ONNX_DOMAINS:
            return None
        data = [i for i in node.input if i in unknown]
        if node.op_type == "Concat" and len(data) == 2:
            past = _past_behind(model, data[0])
            if not past:
                return None
            axis = int(str(attribute_values(node)["axis"]))
            return CacheJoin(seen=seen, past=past, new=data[1], axis=axis, factor=factor)
        if not data or len(set(data)) != 1:
            return None
        if node.op_type in ("Mul", "Div"):
            known = [i for i in node.input if i not in unknown]
            number = scalar_value(known[0], probes) if known else None
            if number is None or (node.op_type == "Div" and node.input[0] != data[0]):
                return None
            factor *= number if node.op_type == "Mul" else 1.0 / number
        elif node.op_type not in _CACHE_VIEWS | {"Concat"}:
            return None
        name = data[0]
    return None


def check_all_tokens(
    model: OnnxModel, node: onnx.NodeProto, name: str, probes: Sequence[Probe]
) -> None:
    """Refuse caches cut to a window on the way: at small sizes that would not show."""
    for probe in probes:
        if probe.total not in probe.shapes.get(name, ()):
            raise BlinkError(
                f"{model.path}: {describe_node(node)} reads '{name}', which does not hold all "
                f"{probe.total} tokens",
                hint="export with a cache that keeps every token",
            )


def _past_behind(model: OnnxModel, name: str) -> str:
    """Return the KV input that `name` is a view of, or ""."""
    for _ in range(8):
        if name in model.past:
            return name
        node = model.producer.get(name)
        if node is None or node.op_type not in VIEWS | {"Concat"}:
            return ""
        name = node.input[0]
    return ""


def joined_heads(model: OnnxModel, join: CacheJoin, probes: Sequence[Probe]) -> HeadsSource:
    """Return the layout of the new keys or values that join a cache."""
    rank = len(probes[0].shapes[join.new])
    dim_axis = rank - 1 if join.axis % rank != rank - 1 else rank - 2
    return heads_source(model, join.new, probes, dim_axis=dim_axis)
