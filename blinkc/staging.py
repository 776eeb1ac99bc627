"""A place to write something that must be whole or not there: output -> a folder beside it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def staging_folder(output: Path) -> Iterator[Path]:
    """Give an empty folder on the output's file system; it is removed at the end.

    Folders that killed runs left for the same output are removed first. A run that goes on holds a
    lock on its own.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output.name}.blinkc-new-"
    for folder in [path for path in output.parent.iterdir() if path.name.startswith(prefix)]:
        with suppress(OSError), _lock(folder):
            shutil.rmtree(folder, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=output.parent))
    try:
        with _lock(staging):
            yield staging
    except OSError as error:
        error.filename = error.filename or str(output)  # of a write nothing names the file
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which ends with the process; BlockingIOError where another does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
