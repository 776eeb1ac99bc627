"""Weight-only quantization: a matrix `[N, K]` -> values of 8 or 4 bits `[K, N]`, and scales.

Nothing is calibrated: each weight goes to the nearest value that its scale can say. What is divided
by is the scale as it is stored, rounded to the model's type.

| kind | a weight is | scales |
| --- | --- | --- |
| fp8 | value (E4M3) * 2^-9 * scale | one for each output: `[N]` |
| int4 | value (-7 to 7) * scale | one for each 128 (or 64) inputs of an output: `[K / group, N]` |

2^-9 is a constant of the engine: engines whose dequantization wants a constant scale take it, and
products of fp16 models neither overflow nor lose scales below fp16's range. Values lie transposed,
as engines read them; of `[N, K]` TensorRT-RTX makes a transposed copy in every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightEncoding

BYTES_PER_WEIGHT = {"fp8": 1.0, "int4": 0.5 + 2 / 128}  # of large matrices, scales among them
FP8_STEP = 2.0**-9
_FP8_MAX = 448.0  # of E4M3 without infinities
_INT4_MAX = 7.0  # symmetric: -8 is never needed
_GROUPS = (128, 64)  # columns that share a scale, the widest that divides the row
_ROWS_AT_ONCE = 1024  # bounds what the fp32 copies take
_STORED: dict[str, Any] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}

Array = Any  # numpy array


def group_size(kind: str, num_columns: int, name: str) -> int:
    """Return how many columns of a row share a scale.

    Raises:
        BlinkError: int4 has no group that divides the row; names the weight.
    """
    if kind == "fp8":
        return num_columns
    for group in _GROUPS:
        if num_columns % group == 0:
            return group
    raise BlinkError(
        f"weight {name} has rows of {num_columns}; int4 wants a multiple of {_GROUPS[-1]}",
        hint="use --quantization fp8",
    )


def encode(parts: Iterable[Array], encoding: WeightEncoding) -> Array:
    """Return the values or the scales of a matrix, as `encoding` asks.

    Args:
        parts: the matrix's rows `[n, K]`, in order.

    Returns:
        Scales as above; values of fp8 `[K, N]`; of int4 the bytes of `[K, N]`, two values each, the
        first in the low four bits.
    """
    pieces = [
        _encode_rows(part[first : first + _ROWS_AT_ONCE], encoding)
        for part in (array.reshape(-1, encoding.num_columns) for array in parts)
        for first in range(0, len(part), _ROWS_AT_ONCE)
    ]
    whole = np.concatenate(pieces, axis=-1)
    if encoding.part == "scales" or encoding.kind == "fp8":
        return whole
    nibbles = whole.reshape(-1).view(np.uint8) & 0xF
    return nibbles[0::2] | (nibbles[1::2] << 4)


def decode(values: Array, scales: Array, kind: str) -> Array:
    """Return what values and scales stand for, as fp32 `[N, K]`."""
    wide = scales.astype(np.float32)
    if kind == "fp8":
        return (values.astype(np.float32) * np.float32(FP8_STEP) * wide).T
    nibbles = np.stack([values & 0xF, values >> 4], axis=-1).reshape(-1, wide.shape[1])
    signed = (nibbles.astype(np.int8) ^ 8) - 8
    group = len(signed) // len(wide)
    return (signed.astype(np.float32) * wide.repeat(group, axis=0)).T


def _encode_rows(rows: Array, encoding: WeightEncoding) -> Array:
    """Return the values `[K, n]` or the scales of some rows."""
    groups = np.asarray(rows, dtype=np.float32).reshape(len(rows), -1, encoding.group)
    scales = _scales(groups, encoding)
    if encoding.part == "scales":
        return scales[:, 0] if encoding.kind == "fp8" else scales.T
    divided = groups / scales.astype(np.float32)[:, :, None]
    if encoding.kind == "fp8":
        bounded = np.clip(divided / np.float32(FP8_STEP), -_FP8_MAX, _FP8_MAX)
        return bounded.astype(ml_dtypes.float8_e4m3fn).reshape(rows.shape).T
    return np.clip(np.rint(divided), -_INT4_MAX, _INT4_MAX).astype(np.int8).reshape(rows.shape).T


def _scales(groups: Array, encoding: WeightEncoding) -> Array:
    """Return one scale for each group: its largest weight is the largest value; never zero."""
    largest = np.abs(groups).max(axis=2)
    most = _FP8_MAX * FP8_STEP if encoding.kind == "fp8" else _INT4_MAX
    stored = _STORED[encoding.scale_dtype]
    limits = ml_dtypes.finfo(stored)
    low, high = np.float32(limits.smallest_normal), np.float32(limits.max)
    scales = np.where(largest > 0, np.clip(largest / np.float32(most), low, high), 1.0)
    return scales.astype(stored)
