"""Finds and compares the bytes that a bundle speaks of: hashes, and weight files outside of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from blinkc.bundle.manifest import ExternalFile
from blinkc.bundle.weights import FileSpan
from blinkc.errors import BlinkError

CHUNK_BYTES = 1 << 20


def find_external(
    external: ExternalFile, bundle: Path, search: Iterable[Path], *, check_content: bool = True
) -> FileSpan:
    """Find a referenced weight file: at its path, beside the bundle, or in the `search` folders.

    Raises:
        BlinkError: no file of that name has the size and hash the manifest says.
    """
    name = Path(external.path).name
    candidates = [Path(external.path), bundle.parent / name, *(folder / name for folder in search)]
    problem = "no such file"
    for candidate in candidates:
        if not candidate.is_file():
            continue
        span = FileSpan(path=candidate, offset=0, num_bytes=external.bytes)
        if candidate.stat().st_size != external.bytes:
            problem = f"{candidate} has {candidate.stat().st_size} bytes, not {external.bytes}"
        elif check_content and hash_span(span) != external.sha256:
            problem = f"{candidate} has other content than when the bundle was made"
        else:
            return span
    raise BlinkError(
        f"{bundle} refers to the weights {external.path}: {problem}",
        hint="give the checkpoint's folder with --weights-from, or bundle with --weights embed",
    )


def hash_span(span: FileSpan) -> str:
    """Return the SHA-256 of a run of bytes, in hex."""
    digest = hashlib.sha256()
    left = span.num_bytes
    with span.path.open("rb") as file:
        file.seek(span.offset)
        while left > 0:
            data = file.read(min(left, CHUNK_BYTES))
            if not data:
                break
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()
