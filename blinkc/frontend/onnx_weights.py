"""Weights that lie in an ONNX file: tensor -> `WeightPart`, and `WeightPart` -> numpy array.

A part's `path` is the .onnx file; its `key` is the initializer's name, or, for a quantized matrix,
a JSON object that names the pieces it is computed from. External data is read through the model's
own entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkc.errors import BlinkError, InternalError
from blinkc.frontend.decoder_graph import WeightPart
from blinkc.frontend.onnx_model import external_range, load_proto

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx

    Array = npt.NDArray[Any]

# ONNX element type -> the name the compiler uses.
DTYPE_NAMES = {1: "fp32", 10: "fp16", 16: "bf16", 7: "int64", 6: "int32", 9: "bool", 2: "uint8"}
ELEMENT_TYPES = {name: value for value, name in DTYPE_NAMES.items()}


def part_from_initializer(tensor: onnx.TensorProto, path: Path) -> WeightPart:
    """Describe an initializer as a weight part."""
    return WeightPart(
        source="onnx",
        key=tensor.name,
        shape=tuple(tensor.dims),
        dtype=DTYPE_NAMES[tensor.data_type],
        path=path,
    )


def part_from_array(values: Array, dtype: str) -> WeightPart:
    """Describe a small computed constant; its bytes travel with the part, little-endian."""
    return WeightPart(
        source="inline",
        key="",
        shape=values.shape,
        dtype=dtype,
        inline=np.ascontiguousarray(values).tobytes(),
    )


def read_onnx_part(part: WeightPart) -> Array:
    """Read a part of source "onnx" in its file's shape; the caller applies `transpose` and `rows`.

    Quantized matrices come back as fp32 `[N, K]`.
    """
    if part.source != "onnx" or part.path is None:
        raise InternalError(f"read_onnx_part got a part of source '{part.source}'")
    if part.key.startswith("{"):
        return _dequantize(json.loads(part.key), part)
    array = _read_initializer(part.path, part.key)
    if array.shape != part.shape:
        raise BlinkError(
            f"{part.path}: initializer '{part.key}' has shape {list(array.shape)}, expected "
            f"{list(part.shape)}",
            hint="the file changed since it was compiled: compile again",
        )
    return array


def tensor_array(tensor: onnx.TensorProto, path: Path) -> Array:
    """Return a tensor's values, reading external data beside `path` if need be."""
    import onnx

    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        data_path, offset, length = external_range(tensor, path)
        with data_path.open("rb") as file:
            file.seek(offset)
            raw = file.read(length)
        copy = onnx.TensorProto()
        copy.data_type = tensor.data_type
        copy.dims.extend(tensor.dims)
        copy.raw_data = raw
        tensor = copy
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise BlinkError(f"{path}: tensor '{tensor.name}' cannot be read: {error}") from error
    return np.asarray(array)


def dequantized_part(node: onnx.NodeProto, attributes: dict[str, Any], path: Path) -> WeightPart:
    """Describe the `[N, K]` matrix that a MatMulNBits node multiplies with.

    Layout and formula: onnxruntime's ContribOperators.md, MatMulNBits.
    """
    inputs = [*node.input, "", "", ""]
    key = {
        "op": "MatMulNBits",
        "quantized": inputs[1],
        "scales": inputs[2],
        "zero_points": inputs[3],
        "bits": int(attributes.get("bits", 4)),
        "block_size": int(attributes["block_size"]),
    }
    return WeightPart(
        source="onnx",
        key=json.dumps(key, sort_keys=True),
        shape=(int(attributes["N"]), int(attributes["K"])),
        dtype="fp32",
        path=path,
    )


def _dequantize(key: dict[str, Any], part: WeightPart) -> Array:
    """Dequantize MatMulNBits: `(q - zero) * scale`, low bits first, blocks along K."""
    assert part.path is not None
    columns, depth = part.shape
    bits, block = key["bits"], key["block_size"]
    blocks = -(-depth // block)
    packed = _read_initializer(part.path, key["quantized"]).reshape(columns, blocks, -1)
    values = _unpack(packed, bits)[:, :, :block].astype(np.float32)
    scales = _read_initializer(part.path, key["scales"]).astype(np.float32)
    zeros: Array = np.array(float(1 << (bits - 1)), dtype=np.float32)
    if key["zero_points"]:
        stored = _read_initializer(part.path, key["zero_points"])
        if stored.dtype == np.uint8:
            stored = _unpack(stored.reshape(columns, -1), bits)[:, :blocks]
        zeros = stored.astype(np.float32).reshape(columns, blocks, 1)
    result = (values - zeros) * scales.reshape(columns, blocks, 1)
    return np.ascontiguousarray(result.reshape(columns, -1)[:, :depth])


def _unpack(packed: Array, bits: int) -> Array:
    """Split bytes into values of `bits` bits, the lowest first, along the last axis."""
    if bits == 8:
        return packed
    per_byte = 8 // bits
    shifts = np.arange(per_byte, dtype=np.uint8) * bits
    values = (packed[..., None] >> shifts) & ((1 << bits) - 1)
    return values.reshape(*packed.shape[:-1], -1)


def _read_initializer(path: Path, name: str) -> Array:
    tensor = _initializers(path, path.stat().st_mtime_ns).get(name)
    if tensor is None:
        raise BlinkError(
            f"{path}: there is no initializer '{name}'",
            hint="the file changed since it was compiled: compile again",
        )
    return tensor_array(tensor, path)


@lru_cache(maxsize=1)
def _initializers(path: Path, _changed_ns: int) -> dict[str, onnx.TensorProto]:
    """Parse the model once for many reads; the time of change is part of the cache's key."""
    return {tensor.name: tensor for tensor in _all_initializers(load_proto(path).graph)}


def _all_initializers(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_initializers(attribute.g)
    yield from graph.initializer
