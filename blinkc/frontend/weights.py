"""Read the weights a graph refers to: reference in, numpy array out, from mapped files."""

from __future__ import annotations

import json
import math
import mmap
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightPart, WeightRef

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "uint8": np.dtype(np.uint8),
}
SAFETENSORS_DTYPES = {
    "F32": "fp32",
    "F16": "fp16",
    "BF16": "bf16",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
}
_MAX_HEADER_BYTES = 100 << 20  # as in the safetensors library
_RANDOM_STD = 0.02


def read_weight(reference: WeightRef) -> np.ndarray:
    """Read one weight: its parts in order, seen as `reference.shape`, in `reference.dtype`.

    Raises:
        BlinkError: a file is damaged or does not hold what the reference says.
    """
    dtype = NUMPY_DTYPES[reference.dtype]
    if reference.encoding is not None:
        from blinkc.frontend.quantize_weights import encode

        encoded: np.ndarray = encode(map(read_part, reference.parts), reference.encoding)
        return encoded.astype(dtype, copy=False).reshape(reference.shape)
    out = np.empty(math.prod(reference.shape), dtype=dtype)
    filled = 0
    for part in reference.parts:
        array = read_part(part)
        end = filled + array.size
        if end > out.size:
            break
        # Assignment converts; going through the part's own type keeps the peak at one part.
        out[filled:end] = array.reshape(-1)
        filled = end
    if filled != out.size:
        raise BlinkError(
            f"weight {reference.name}: its parts do not make up shape {list(reference.shape)}"
        )
    return out.reshape(reference.shape)


def read_part(part: WeightPart) -> np.ndarray:
    """Read one part with its transpose and row range, in the type it is stored in."""
    if part.source == "safetensors":
        array = _read_safetensors(part)
    elif part.source == "inline":
        if part.inline is None:
            raise BlinkError(f"weight part {part.key} says inline and carries nothing")
        array = np.frombuffer(part.inline, dtype=NUMPY_DTYPES[part.dtype]).reshape(part.shape)
    elif part.source == "random":
        array = _make_random(part)
    elif part.source == "onnx":
        from blinkc.frontend.onnx_weights import read_onnx_part

        array = read_onnx_part(part)
    else:
        raise BlinkError(f"weight part {part.key} has unknown source `{part.source}`")
    if part.transpose:
        array = array.swapaxes(0, 1)
    if part.rows is not None:
        array = array[part.rows[0] : part.rows[1]]
    return array


@lru_cache(maxsize=64)
def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read a file's header: tensor name -> {dtype, shape, data_offsets}, and where the data begin.

    Source: the safetensors format, 8 bytes of little-endian length, JSON, data.

    Raises:
        BlinkError: the file is no safetensors file, or its offsets leave the file.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            if header_bytes > min(_MAX_HEADER_BYTES, size_bytes - 8):
                raise ValueError(f"header of {header_bytes} bytes")
            header = json.loads(stream.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if not isinstance(entry["dtype"], str) or not _is_shape(entry["shape"]):
                raise ValueError(f"tensor {name} has no type or no shape")
            if not 0 <= begin <= end <= size_bytes - 8 - header_bytes:
                raise ValueError(f"tensor {name} leaves the file")
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error,
    ) as error:  # fmt: skip
        raise BlinkError(
            f"{path} is not a whole safetensors file: {error}", hint="fetch the checkpoint again"
        ) from error
    return header, 8 + header_bytes


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


@lru_cache(maxsize=64)
def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _read_safetensors(part: WeightPart) -> np.ndarray:
    assert part.path is not None
    header, data_begin = safetensors_header(part.path)
    entry = header.get(part.key)
    if entry is None:
        raise BlinkError(f"{part.path} holds no tensor {part.key}")
    dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
    if dtype is None:
        raise BlinkError(
            f"tensor {part.key} in {part.path} has type {entry['dtype']}",
            hint="quantized checkpoints are not supported: use one in fp32, fp16 or bf16",
        )
    if tuple(entry["shape"]) != part.shape or dtype != part.dtype:
        raise BlinkError(
            f"tensor {part.key} in {part.path} is {dtype} {entry['shape']}, "
            f"expected {part.dtype} {list(part.shape)}"
        )
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(part.shape) * NUMPY_DTYPES[dtype].itemsize:
        raise BlinkError(f"tensor {part.key} in {part.path} has {end - begin} bytes of data")
    data = memoryview(_mapped(part.path))[data_begin + begin : data_begin + end]
    return np.frombuffer(data, dtype=NUMPY_DTYPES[dtype]).reshape(part.shape)


def _make_random(part: WeightPart) -> np.ndarray:
    """Draw weights a model can run with: normal of std 0.02, vectors around one; equal by seed."""
    generator = np.random.Generator(np.random.Philox(part.seed))
    values = generator.standard_normal(part.shape, dtype=np.float32) * np.float32(_RANDOM_STD)
    if len(part.shape) == 1:
        values += np.float32(1.0)
    result: np.ndarray = values.astype(NUMPY_DTYPES[part.dtype])
    return result
