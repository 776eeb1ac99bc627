"""Weights in memory: manifest and mapped files -> one address for each weight, in order.

A weight that lies in its file as the target wants it is an address into the mapping, not a copy.
One that must be merged, transposed or converted (`--weights reference`) is assembled with numpy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blinkc.bundle.manifest import Manifest, WeightEntry, WeightPart
from blinkc.closing import Closing
from blinkc.errors import BlinkError

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSpan:
    """A run of bytes in a file: a whole file, or a member of an archive."""

    path: Path
    offset: int
    num_bytes: int


class MappedSpan:
    """A span mapped copy-on-write: pages are shared with the file's until somebody writes.

    Raises:
        BlinkError: the file is shorter than the span.
    """

    def __init__(self, span: FileSpan) -> None:
        start = span.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        lead = span.offset - start
        with span.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if span.offset + span.num_bytes > size:
                raise BlinkError(
                    f"{span.path} ends at byte {size}, before {span.offset + span.num_bytes}",
                    hint="copy the bundle again, then blinkc verify",
                )
            length = lead + span.num_bytes
            self._map = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
        self._bytes = (ctypes.c_char * length).from_buffer(self._map)
        self.address = ctypes.addressof(self._bytes) + lead
        self.view = memoryview(self._map)[lead:]

    def close(self) -> None:
        """Unmap; every address handed out becomes invalid."""
        self.view.release()
        del self._bytes
        self._map.close()


class BundleWeights(Closing):
    """All weights of a bundle; `addresses` holds them in the manifest's order.

    Args:
        manifest: a checked manifest, so that every part lies inside its file.
        spans: where the files with weights lie, by the name that parts use.

    Raises:
        BlinkError: a file is too short, or numpy is missing where weights must be assembled.
    """

    def __init__(self, manifest: Manifest, spans: Mapping[str, FileSpan]) -> None:
        self._maps: dict[str, MappedSpan] = {}
        self._arrays: list[Any] = []  # keeps assembled weights alive
        self.addresses: list[int] = []
        try:
            for weight in manifest.weights:
                for part in weight.parts:
                    if part.file not in self._maps:
                        self._maps[part.file] = MappedSpan(spans[part.file])
                self.addresses.append(self._address(weight))
        except BaseException:
            self.close()
            raise

    def _address(self, weight: WeightEntry) -> int:
        part = weight.parts[0]
        whole = part.rows is None or part.rows == (0, part.shape[0])
        is_one = len(weight.parts) == 1 and part.dtype == weight.dtype
        address = self._maps[part.file].address + part.offset
        if is_one and whole and not part.transpose and address % ALIGNMENT_BYTES == 0:
            return address
        array = assemble_weight(weight, {name: span.view for name, span in self._maps.items()})
        self._arrays.append(array)
        return int(array.ctypes.data)

    def close(self) -> None:
        """Free and unmap everything; the target must have been closed first."""
        self._arrays.clear()
        self.addresses.clear()
        while self._maps:
            self._maps.popitem()[1].close()


def assemble_weight(weight: WeightEntry, views: Mapping[str, memoryview]) -> Any:
    """Return a weight as a contiguous, 64-byte aligned numpy array; bf16 comes as uint16.

    Raises:
        BlinkError: numpy is not installed, or there is no conversion between the two types.
    """
    try:
        import numpy as np
    except ImportError:
        raise BlinkError(
            f"weight {weight.name} must be assembled from the checkpoint, which needs numpy",
            hint="pip install numpy, or make the bundle with --weights embed",
        ) from None
    storage = np.empty(weight.num_bytes + ALIGNMENT_BYTES, np.uint8)
    skip = -storage.ctypes.data % ALIGNMENT_BYTES
    flat = storage[skip : skip + weight.num_bytes]
    out = flat.view(_numpy_dtype(weight.dtype)).reshape(weight.shape)
    row = 0
    for part in weight.parts:
        array = _read_part(part, views[part.file], weight)
        rows = array.shape[0] if array.ndim else 1
        if out.ndim:
            out[row : row + rows] = array
        else:
            out[...] = array
        row += rows
    return out


def _read_part(part: WeightPart, view: memoryview, weight: WeightEntry) -> Any:
    import numpy as np

    raw = np.frombuffer(view[part.offset : part.offset + part.bytes], np.uint8)
    array = raw.view(_numpy_dtype(part.dtype)).reshape(part.shape)
    if part.transpose:
        array = array.T
    if part.rows is not None:
        array = array[part.rows[0] : part.rows[1]]
    return convert(array, part.dtype, weight.dtype)


def convert(array: Any, from_dtype: str, to_dtype: str) -> Any:
    """Convert between float types; bf16 is uint16 in numpy, rounded to nearest even.

    Raises:
        BlinkError: either type is no float and they differ.
    """
    import numpy as np

    if from_dtype == to_dtype:
        return array
    floats = ("fp32", "fp16", "bf16")
    if from_dtype not in floats or to_dtype not in floats:
        raise BlinkError(f"a weight of type {from_dtype} cannot be read as {to_dtype}")
    wide = array
    if from_dtype == "bf16":
        wide = (array.astype(np.uint32) << 16).view(np.float32)
    elif from_dtype == "fp16":
        wide = array.astype(np.float32)
    if to_dtype == "fp32":
        return wide
    if to_dtype == "fp16":
        return wide.astype(np.float16)
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _numpy_dtype(dtype: str) -> str:
    return {
        "fp32": "<f4", "fp16": "<f2", "bf16": "<u2", "int32": "<i4", "int64": "<i8",
        "uint8": "u1", "int8": "i1", "bool": "?", "fp8": "u1",
    }[dtype]  # fmt: skip
