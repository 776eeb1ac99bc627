"""Quantized values and scales against a search over all representable values, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightEncoding, WeightPart, WeightRef
from blinkc.frontend.quantize_weights import FP8_STEP, decode, encode, group_size
from blinkc.frontend.weights import read_weight

# E4M3 without infinities: 3 bits of mantissa, 448 at most; -8 is left out of 4 bits.
FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
LEVELS = {"fp8": np.unique(FP8_VALUES[~np.isnan(FP8_VALUES)]), "int4": np.arange(-7.0, 8.0)}
SCALE_TYPES: dict[str, Any] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def encoding(kind: str, num_columns: int, scale_dtype: str = "bf16") -> WeightEncoding:
    return WeightEncoding(
        kind=kind,
        part="values",
        num_columns=num_columns,
        group=group_size(kind, num_columns, "w"),
        scale_dtype=scale_dtype,
    )


def both(matrix: Any, how: WeightEncoding) -> tuple[Any, Any]:
    return encode([matrix], how), encode([matrix], replace(how, part="scales"))


@pytest.mark.parametrize("scale_dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("spread", [1e-3, 0.05, 4.0])
def test_every_weight_becomes_the_nearest_value(kind: str, scale_dtype: str, spread: float) -> None:
    random = np.random.default_rng(3)
    matrix = (random.standard_normal((6, 192)) * spread).astype(np.float32)
    matrix[1] *= np.float32(1000)  # rows and groups of other sizes beside
    matrix[2, :64] = 0
    how = encoding(kind, 192, scale_dtype)
    values, scales = both(matrix, how)
    assert scales.dtype == SCALE_TYPES[scale_dtype] and (scales.astype(np.float64) > 0).all()
    step = FP8_STEP if kind == "fp8" else 1.0
    unit = scales.astype(np.float64).reshape(-1, 6).T[:, :, None] * step
    exact = matrix.astype(np.float64).reshape(6, unit.shape[1], -1)
    away = np.abs(exact[..., None] - unit[..., None] * LEVELS[kind])
    got = decode(values, scales, kind).astype(np.float64).reshape(exact.shape)
    # Division and result are rounded to fp32: of two neighbours as near, either may be taken.
    slack = 2.0**-22 * np.abs(exact)
    assert (np.abs(exact - got) <= away.min(axis=-1) + slack).all()
    # The largest of a group is the largest value, up to the rounding of the scale.
    largest = np.abs(exact).max(axis=-1)
    room = LEVELS[kind].max() * unit[..., 0]
    used = largest > 0
    assert np.abs(room / np.where(used, largest, 1) - 1)[used].max() < 2.0**-8


def test_bits_lie_as_onnx_reads_them() -> None:
    """Guards nibbles the wrong way round, which a decoder with the same fault would hide."""
    matrix = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    values, scales = both(matrix, encoding("int4", 64))
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.INT4, dims=[64, 3])
    tensor.raw_data = values.tobytes()
    read = onnx.numpy_helper.to_array(tensor).astype(np.float32) * scales.astype(np.float32)
    np.testing.assert_array_equal(read.T, decode(values, scales, "int4"))


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_row_is_quantized_alone(kind: str) -> None:
    """Guards joined projections: q, k and v are parts, and are quantized one by one."""
    random = np.random.default_rng(1)
    parts = [random.standard_normal((n, 128)).astype(np.float32) * n for n in (4, 2, 1)]
    how = encoding(kind, 128)
    reference = WeightRef(
        name="q+k+v",
        shape=(128, 7) if kind == "fp8" else (64 * 7,),
        dtype={"fp8": "fp8", "int4": "uint8"}[kind],
        parts=tuple(
            WeightPart(
                source="inline", key="p", shape=p.shape, dtype="fp32", inline=p.tobytes()
            )
            for p in parts
        ),
        encoding=how,
    )  # fmt: skip
    values, scales = both(np.concatenate(parts), how)
    np.testing.assert_array_equal(read_weight(reference).view(np.uint8), values.view(np.uint8))
    scale = replace(
        reference, shape=scales.shape, dtype="bf16", encoding=replace(how, part="scales")
    )
    np.testing.assert_array_equal(read_weight(scale), scales)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_extremes_stay_finite(kind: str) -> None:
    """Guards scales that round to zero, and values past 448, which E4M3 takes for NaN."""
    matrix = np.zeros((4, 64), np.float32)
    matrix[1] = 1e-12  # its scale is below fp16's range
    matrix[2] = 65504.0  # its scale of fp8 is above
    matrix[3] = np.linspace(-1.0009765, 1.0009765, 64)
    values, scales = both(matrix, encoding(kind, 64, "fp16"))
    wide = decode(values, scales, kind)
    assert np.isfinite(wide).all() and (scales.astype(np.float32) > 0).all()
    assert not wide[0].any() and (np.abs(wide[1]) < 1e-7).all()
    np.testing.assert_allclose(wide[2], 65504.0, rtol=2.0**-9 if kind == "int4" else 1 / 7)


def test_groups_divide_the_row() -> None:
    assert [group_size("int4", n, "w") for n in (128, 4096, 576, 64)] == [128, 128, 64, 64]
    assert group_size("fp8", 100, "w") == 100
    with pytest.raises(BlinkError, match=r"weight some\.name has rows of 100") as caught:
        group_size("int4", 100, "some.name")
    assert "--quantization fp8" in caught.value.hint
