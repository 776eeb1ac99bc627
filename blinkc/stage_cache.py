"""Artifacts shared by all builds of a user: inputs' digest -> a stage's folder, made once.

Lies in $BLINK_CACHE_DIR, else in the user's cache folder; BLINK_CACHE_DIR=off does without.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from blinkc.build_folder import replace_folder

MAX_ENTRIES = 200  # each holds graphs and code, no weights: below a megabyte for most models


class StageCache:
    """A folder of stage artifacts by the digest of their inputs.

    Best effort: whatever goes wrong with the cache's own folder, the stage is made as without it.
    What comes out of it is checked by the build like any other artifact.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def fetch(self, digest: str, into: Path) -> bool:
        """Copy an artifact to `into`, whole or not at all; return whether it was there."""
        entry = self._entry(digest)
        if entry is None or not entry.is_dir():
            return False
        temporary = Path(tempfile.mkdtemp(prefix=".new-cached-", dir=into.parent))
        try:
            shutil.copytree(entry, temporary / "artifact")
            replace_folder(temporary / "artifact", into)
            os.utime(entry)  # the newest ones are kept
        except OSError:
            return False
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return True

    def store(self, digest: str, artifact: Path) -> None:
        """Keep a copy of an artifact; forget the oldest when there are too many."""
        entry = self._entry(digest)
        if entry is None or entry.exists():
            return
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))
            try:
                shutil.copytree(artifact, temporary / "artifact")
                os.rename(temporary / "artifact", entry)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            entries = sorted(entry.parent.iterdir(), key=lambda path: path.stat().st_mtime)
            for old in entries[:-MAX_ENTRIES]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError:
            return  # a full or read-only home is no reason to fail

    def forget(self, digest: str) -> None:
        """Drop an artifact that turned out damaged or of no use."""
        entry = self._entry(digest)
        if entry is not None:
            shutil.rmtree(entry, ignore_errors=True)

    def _entry(self, digest: str) -> Path | None:
        return None if self._folder is None else self._folder / digest


def default_cache() -> StageCache:
    """Return the user's cache, as the environment says."""
    chosen = os.environ.get("BLINK_CACHE_DIR", "")
    if chosen == "off":
        return StageCache(None)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # no home
        return StageCache(None)
    return StageCache(Path(chosen) if chosen else home / "blinkc" / "stages")
