"""Puts weights into a bundle or points at them: `WeightRef`s -> weights.safetensors, table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blinkc.build_folder import hash_file
from blinkc.bundle.manifest import ExternalFile, WeightEntry, WeightPart
from blinkc.bundle.source_weights import can_be_referenced, num_bytes, place_of, weight_pieces
from blinkc.bundle.weights import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from blinkc.frontend.decoder_graph import WeightRef

WEIGHTS_NAME = "weights.safetensors"
_SAFETENSORS_DTYPES = {
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
    "fp8": "F8_E4M3",
    "uint8": "U8",
}


def embed_weights(
    weights: Sequence[WeightRef],
    path: Path,
    report: Callable[[str], None],
) -> tuple[WeightEntry, ...]:
    """Write the weights to one safetensors file, each on a 64-byte boundary, one part at a time.

    Gaps are filled by tensors named `__pad_<n>`, because the format allows none.
    """
    header: dict[str, dict[str, object]] = {}
    offsets: list[int] = []
    position = 0
    for number, weight in enumerate(weights):
        size = num_bytes(weight)
        header[weight.name] = {
            "dtype": _SAFETENSORS_DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [position, position + size],
        }
        offsets.append(position)
        position += size
        gap = -position % ALIGNMENT_BYTES
        if gap:
            header[f"__pad_{number}"] = {
                "dtype": "U8",
                "shape": [gap],
                "data_offsets": [position, position + gap],
            }
            position += gap
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT_BYTES)
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            report(f"weight {weight.name}")
            for piece in weight_pieces(weight):
                file.write(piece.reshape(-1).view("u1").data if piece.size else b"")
            file.write(b"\0" * (-file.tell() % ALIGNMENT_BYTES))
    return tuple(
        WeightEntry.model_validate(
            {
                "name": weight.name,
                "shape": weight.shape,
                "dtype": weight.dtype,
                "parts": (
                    WeightPart.model_validate(
                        {
                            "file": WEIGHTS_NAME,
                            "offset": start + offset,
                            "bytes": num_bytes(weight),
                            "shape": weight.shape,
                            "dtype": weight.dtype,
                        }
                    ),
                ),
            }
        )
        for weight, offset in zip(weights, offsets, strict=True)
    )


def reference_weights(
    weights: Sequence[WeightRef],
    path: Path,
    report: Callable[[str], None],
) -> tuple[tuple[WeightEntry, ...], tuple[ExternalFile, ...]]:
    """Point at the safetensors files that hold the weights; what lies nowhere else is embedded.

    Computed tables, quantized and random weights and those of ONNX files go to `path`.
    """
    is_external = {weight.name: can_be_referenced(weight) for weight in weights}
    inside = [weight for weight in weights if not is_external[weight.name]]
    embedded = {
        entry.name: entry for entry in (embed_weights(inside, path, report) if inside else ())
    }
    paths = sorted(
        {part.path for w in weights if is_external[w.name] for part in w.parts if part.path}
    )
    numbers = {path: number for number, path in enumerate(paths)}
    files = []
    for file in paths:
        report(f"hashing {file.name}")
        size = file.stat().st_size
        files.append(ExternalFile(path=str(file), bytes=size, sha256=hash_file(file)))
    entries = tuple(
        _external_entry(weight, numbers) if is_external[weight.name] else embedded[weight.name]
        for weight in weights
    )
    return entries, tuple(files)


def split_random(
    weights: Sequence[WeightRef], dtype: str
) -> tuple[dict[str, int], list[WeightRef]]:
    """Return the seeds of the weights that a GPU draws itself when it loads, and the other weights.

    Args:
        dtype: the model's; computed tables of other types are not drawn, nor what is quantized.
    """
    seeds = {
        weight.name: weight.parts[0].seed
        for weight in weights
        if weight.dtype == dtype
        and weight.encoding is None
        and all(part.source == "random" for part in weight.parts)
    }
    return seeds, [weight for weight in weights if weight.name not in seeds]


def drawn_entry(weight: WeightRef, seed: int) -> WeightEntry:
    """Return the entry of a weight that lies in no file."""
    return WeightEntry.model_validate(
        {"name": weight.name, "shape": weight.shape, "dtype": weight.dtype, "seed": seed}
    )


def _external_entry(weight: WeightRef, numbers: Mapping[Path, int]) -> WeightEntry:
    parts = []
    for part in weight.parts:
        assert part.path is not None
        place = place_of(part)
        parts.append(
            WeightPart.model_validate(
                {
                    "file": f"external:{numbers[part.path]}",
                    "offset": place.offset,
                    "bytes": place.num_bytes,
                    "shape": part.shape,
                    "dtype": part.dtype,
                    "transpose": part.transpose,
                    "rows": part.rows,
                }
            )
        )
    return WeightEntry.model_validate(
        {
            "name": weight.name,
            "shape": weight.shape,
            "dtype": weight.dtype,
            "parts": tuple(parts),
        }
    )
