"""Reads weights piece by piece for the bundle: `WeightRef` -> arrays of its type, in order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blinkc.bundle.manifest import DTYPE_BYTES
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blinkc.frontend.decoder_graph import WeightPart, WeightRef


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """The bytes of a safetensors file that hold a tensor."""

    offset: int
    num_bytes: int


def weight_pieces(weight: WeightRef) -> Iterator[Any]:
    """Yield a weight's parts, contiguous and of its dtype: less memory than the whole. What is
    quantized comes in one piece.

    Raises:
        BlinkError: a file is damaged, or the parts do not make up the weight.
    """
    import numpy as np

    from blinkc.frontend.weights import NUMPY_DTYPES, read_part, read_weight

    if weight.encoding is not None:
        yield np.ascontiguousarray(read_weight(weight))
        return
    count = 0
    for part in weight.parts:
        array = np.ascontiguousarray(read_part(part)).astype(NUMPY_DTYPES[weight.dtype], copy=False)
        count += array.size
        yield array
    if count != math.prod(weight.shape):
        raise BlinkError(f"weight {weight.name}: its parts do not make up {list(weight.shape)}")


def place_of(part: WeightPart) -> TensorPlace:
    """Return where a part of source "safetensors" lies in its file."""
    from blinkc.frontend.weights import safetensors_header

    if part.path is None:
        raise BlinkError(f"weight part {part.key} has no file")
    header, start = safetensors_header(part.path)
    if part.key not in header:
        raise BlinkError(f"{part.path} holds no tensor {part.key}", hint="run blinkc compile again")
    first, last = header[part.key]["data_offsets"]
    return TensorPlace(offset=start + first, num_bytes=last - first)


def can_be_referenced(weight: WeightRef) -> bool:
    """Return whether a loader can assemble the weight from safetensors files along axis 0."""
    if weight.encoding is not None:
        return False
    rows = 0
    for part in weight.parts:
        shape = part.shape[::-1] if part.transpose else part.shape
        if part.source != "safetensors" or shape[1:] != weight.shape[1:] or not shape:
            return False
        rows += part.rows[1] - part.rows[0] if part.rows else shape[0]
    return rows == (weight.shape[0] if weight.shape else 0)


def num_bytes(weight: WeightRef) -> int:
    """Return a weight's size in its own dtype."""
    return math.prod(weight.shape) * DTYPE_BYTES[weight.dtype]
