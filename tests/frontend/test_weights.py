"""Reading weights by reference: parts, transposes, row ranges, conversions, damaged files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightPart, WeightRef
from blinkc.frontend.weights import read_part, read_weight


def _write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    header, data = {}, b""
    for name, (dtype, value) in tensors.items():
        begin = len(data)
        data += value.tobytes()
        shape = list(value.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]}
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def _reference(shape: tuple[int, ...], dtype: str, *parts: WeightPart) -> WeightRef:
    return WeightRef(name="w", shape=shape, dtype=dtype, parts=parts)


def _part(path: Path, key: str, shape: tuple[int, ...], dtype: str, **more: object) -> WeightPart:
    return WeightPart(
        source="safetensors",
        key=key,
        shape=shape,
        dtype=dtype,
        path=path,
        **more,  # type: ignore[arg-type]
    )


def test_parts_are_transposed_sliced_joined_and_converted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    a = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16)
    b = np.arange(8, dtype=np.float16).reshape(4, 2)
    _write_safetensors(path, {"a": ("BF16", a), "b": ("F16", b)})
    reference = _reference(
        (4, 4),
        "fp32",
        _part(path, "a", (3, 4), "bf16", rows=(1, 3)),
        _part(path, "b", (4, 2), "fp16", transpose=True),
    )
    expected = np.concatenate([a[1:].astype(np.float32), b.T.astype(np.float32)])
    np.testing.assert_array_equal(read_weight(reference), expected)


def test_experts_are_joined_by_reshaping() -> None:
    # [E, 2I, H] from per-expert gate and up tensors, in the order of memory.
    blocks = [np.full((2, 3), i, dtype=np.float32) for i in range(4)]
    parts = [
        WeightPart(source="inline", key="", shape=(2, 3), dtype="fp32", inline=block.tobytes())
        for block in blocks
    ]
    weight = read_weight(_reference((2, 4, 3), "fp32", *parts))
    assert weight[:, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_parts_that_do_not_fill_the_shape_are_refused() -> None:
    part = WeightPart(source="inline", key="", shape=(2,), dtype="fp32", inline=bytes(8))
    for shape in ((1,), (3,)):
        with pytest.raises(BlinkError, match="do not make up shape"):
            read_weight(_reference(shape, "fp32", part))


@pytest.mark.parametrize("keep_bytes", [0, 7, 20, 120])
def test_truncated_file_is_refused(tmp_path: Path, keep_bytes: int) -> None:
    path = tmp_path / "model.safetensors"
    _write_safetensors(path, {"a": ("F32", np.zeros((8, 8), dtype=np.float32))})
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(BlinkError, match="not a whole safetensors file"):
        read_part(_part(path, "a", (8, 8), "fp32"))


def test_tensor_of_another_shape_or_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    _write_safetensors(
        path,
        {
            "a": ("F32", np.zeros((2, 2), dtype=np.float32)),
            "q": ("F8_E4M3", np.zeros((4,), dtype=np.uint8)),
        },
    )
    with pytest.raises(BlinkError, match=r"expected fp32 \[4\]"):
        read_part(_part(path, "a", (4,), "fp32"))
    with pytest.raises(BlinkError, match="no tensor b"):
        read_part(_part(path, "b", (4,), "fp32"))
    with pytest.raises(BlinkError, match="F8_E4M3"):
        read_part(_part(path, "q", (4,), "fp32"))


def test_random_weights_repeat() -> None:
    # Guards: the golden prompt of a bundle of random weights.
    for shape, dtype in (((16, 8), "fp32"), ((16,), "fp32"), ((4, 4), "fp16")):
        part = WeightPart(source="random", key="w", shape=shape, dtype=dtype, seed=(3 << 32) + 7)
        value = read_part(part)
        np.testing.assert_array_equal(value, read_part(part))
    assert abs(float(read_part(part).astype(np.float32).mean())) < 0.1
