"""Gives a bundle whose weights the GPU would draw real files instead: to measure loading from disk.

`python -m benchmarks.write_weights BUNDLE`: writes random weights (bf16 or fp16, vectors of ones)
to `weights-N.bin`, names them in the manifest with their SHA-256, and takes them out of the page
cache, so that the next start reads the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

FILE_BYTES = 2 << 30  # about; a weight is never split
BLOCK_BYTES = 32 << 20
ALIGNMENT_BYTES = 4096
ONE = {"bf16": 0x3F80, "fp16": 0x3C00}
SCALE = 0.02


def random_block(dtype: str, seed: int) -> bytes:
    """Return a block of small random numbers of a 16-bit type."""
    draw = np.random.default_rng(seed)
    values = draw.uniform(-SCALE, SCALE, BLOCK_BYTES // 2).astype(np.float32)
    if dtype == "fp16":
        return values.astype(np.float16).tobytes()
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def split_files(weights: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group weights into files of about `FILE_BYTES`, in their order."""
    groups: list[list[dict[str, Any]]] = [[]]
    size = 0
    for weight in weights:
        if size >= FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(weight)
        size += _num_bytes(weight)
    return groups


def _num_bytes(weight: dict[str, Any]) -> int:
    count = 2
    for axis in weight["shape"]:
        count *= axis
    return count


def write_file(path: Path, weights: list[dict[str, Any]], block: bytes) -> dict[str, Any]:
    """Write one file, turn its weights' seeds into parts; return its entry of the manifest."""
    digest, offset = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for weight in weights:
            padding = -offset % ALIGNMENT_BYTES
            size = _num_bytes(weight)
            is_vector = len(weight["shape"]) == 1
            source = np.uint16(ONE[weight["dtype"]]).tobytes() * (size // 2) if is_vector else block
            pieces = [bytes(padding)] + [
                source[: min(len(source), size - done)] for done in range(0, size, len(source))
            ]
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
            part = {
                "file": path.name, "offset": offset + padding, "bytes": size,
                "shape": weight["shape"], "dtype": weight["dtype"],
            }  # fmt: skip
            del weight["seed"]
            weight["parts"] = [part]
            offset += padding + size
        os.fsync(file.fileno())
    forget_pages(path)
    return {"path": path.name, "bytes": offset, "sha256": digest.hexdigest()}


def forget_pages(path: Path) -> None:
    """Take a file that has reached the disk out of the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_weights(bundle: Path) -> tuple[int, float]:
    """Write the files; return their bytes and how many seconds it took."""
    started = time.monotonic()
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    drawn = [w for w in manifest["weights"] if w.get("seed") is not None]
    blocks = {dtype: random_block(dtype, 1) for dtype in {w["dtype"] for w in drawn}}
    groups = [group for group in split_files(drawn) if group]
    with ThreadPoolExecutor(len(groups) or 1) as pool:
        entries = list(
            pool.map(
                lambda pair: write_file(
                    bundle / f"weights-{pair[0]}.bin", pair[1], blocks[pair[1][0]["dtype"]]
                ),
                enumerate(groups),
            )
        )
    manifest["files"] += entries
    manifest.pop("sha256", None)  # of what it was
    path.write_text(json.dumps(manifest))
    return sum(entry["bytes"] for entry in entries), time.monotonic() - started


def main() -> None:
    """Write the named bundle's weights."""
    num_bytes, seconds = write_weights(Path(sys.argv[1]))
    rate = num_bytes / 1e6 / seconds
    print(f"{num_bytes / 1e9:.2f} GB of weights in {seconds:.1f} s, {rate:.0f} MB/s (hashed)")


if __name__ == "__main__":
    main()
