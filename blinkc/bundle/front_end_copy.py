"""What a machine that only speaks HTTP needs of a bundle: bundle -> a few MB without weights.

The manifest stays as it is, so that both ends can tell that they have the same bundle.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from blinkc.bundle.manifest import MANIFEST_NAME, Manifest
from blinkc.bundle.reader import Bundle, open_bundle
from blinkc.errors import BlinkError
from blinkc.staging import staging_folder


def front_end_files(manifest: Manifest) -> frozenset[str]:
    """Return the files that a front end reads: tokenizer and chat template."""
    tokenizer = manifest.tokenizer
    named = (
        tokenizer.compiled,
        tokenizer.tokenizer_json,
        tokenizer.config,
        tokenizer.chat_template,
    )
    return frozenset(path for path in named if path is not None)


def open_front_end_bundle(path: Path) -> Bundle:
    """Open a bundle, or a copy made by `copy_front_end`, for a front end alone.

    Raises:
        BlinkError: it is no bundle, or a file that a front end reads is missing or damaged.
    """
    bundle = open_bundle(path, check_hashes=False, files=front_end_files)
    bundle.check_abi()
    bundle.check_hashes(front_end_files(bundle.manifest))
    return bundle


def copy_front_end(path: Path, folder: Path) -> int:
    """Write the front end's part of the bundle `path` into a new folder; return its bytes.

    Raises:
        BlinkError: `folder` exists, or the bundle is damaged.
        OSError: `folder` cannot be made.
    """
    if folder.exists():
        raise BlinkError(f"{folder} exists already", hint="choose another folder")
    num_bytes = 0
    with open_front_end_bundle(path) as bundle, staging_folder(folder) as staging:
        whole = staging / "bundle"
        for name in (MANIFEST_NAME, *sorted(front_end_files(bundle.manifest))):
            data = bundle.manifest_bytes() if name == MANIFEST_NAME else bundle.read_bytes(name)
            target = whole / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            num_bytes += len(data)
        os.replace(whole, folder)
    return num_bytes


def bundle_id(manifest: Manifest) -> int:
    """Return 8 bytes that tell bundles apart: of the SHA-256 over every file's path and hash."""
    digest = hashlib.sha256()
    for entry in sorted(manifest.files, key=lambda entry: entry.path):
        digest.update(f"{entry.path} {entry.sha256}\n".encode())
    for external in manifest.external_files:
        digest.update(f"external {external.sha256}\n".encode())
    return int.from_bytes(digest.digest()[:8], "little") or 1  # 0 means unknown
