"""The BUILD folder: each stage's artifact, whole or absent, known by the hash of its inputs."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from blinkc.closing import Closing
from blinkc.errors import BlinkError

FORMAT_VERSION = 1
RECORD_NAME = "stage.json"
_CHUNK_BYTES = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """What stands in a stage's stage.json."""

    inputs_digest: str  # of everything that the artifact follows from
    follows: str  # outputs digest of the stage before it
    outputs_digest: str  # of its files' names and contents
    tools: dict[str, str]  # versions of the tools that made it


class BuildFolder(Closing):
    """A folder of stage artifacts; one compile at a time.

    A stage is written beside its place and renamed into it, so that a killed run leaves it whole or
    absent. Nothing in it depends on where the folder lies; weight files are named by content, their
    last known places stand in weight_paths.json. A finished build may lie where nothing can be
    written: it is opened with `create=False`, and `is_writable` says so.

    Raises:
        BlinkError: the folder is something else, or another compile holds it.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        self._marker = path / "build.json"
        if create:
            self._create()
        elif not self._marker.is_file():
            raise BlinkError(f"{path} is not a build", hint="make one with blinkc compile MODEL -o")
        self._lock = self._take_lock(must_write=create)
        self.is_writable = os.access(path, os.W_OK)
        for leftover in path.glob(".new-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _create(self) -> None:
        is_other = self.path.exists() and not self._marker.is_file()
        if is_other and (not self.path.is_dir() or any(map(_is_foreign, self.path.iterdir()))):
            raise BlinkError(
                f"{self.path} exists and is not a build", hint="choose an empty folder for -o"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BlinkError(f"{self.path} cannot be made: {error.strerror}") from error
        if not self._marker.is_file():
            self.write_json("build.json", {"format": FORMAT_VERSION})

    def _take_lock(self, *, must_write: bool) -> IO[str]:
        place, kind = self.path / ".lock", fcntl.LOCK_EX
        try:
            file = place.open("w")
        except OSError as error:
            if must_write or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            # Several may read at once, while nobody compiles into it.
            file, kind = (place if place.exists() else self._marker).open(), fcntl.LOCK_SH
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise BlinkError(f"another blinkc is working in {self.path}") from None
        return file

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the folder; empty when it is not there."""
        try:
            data = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise BlinkError(f"{self.path / name} is damaged: {error}") from error
        return data if isinstance(data, dict) else {}

    def write_json(self, name: str, data: dict[str, Any]) -> None:
        """Write a JSON file atomically."""
        write_atomically(self.path / name, json.dumps(data, indent=1, sort_keys=True).encode())

    def stage_folder(self, stage: str) -> Path:
        """Return where the artifact of a stage lies."""
        return self.path / stage

    def record(self, stage: str) -> StageRecord | None:
        """Return the record of a stage whose files are all there and unchanged; else None."""
        folder = self.path / stage
        try:
            data = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
            files: dict[str, str] = data["files"]
            for name, digest in files.items():
                if hash_file(folder / name) != digest:
                    return None
            return StageRecord(
                inputs_digest=data["inputs_digest"],
                follows=data["follows"],
                outputs_digest=_outputs_digest(files),
                tools=data["tools"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None  # missing or half-written by something else: made again

    @contextmanager
    def write_stage(
        self, stage: str, *, inputs_digest: str, follows: str, tools: dict[str, str]
    ) -> Iterator[Path]:
        """Give an empty folder to fill; on success it takes the stage's place at once."""
        temporary = Path(tempfile.mkdtemp(prefix=f".new-{stage}-", dir=self.path))
        try:
            yield temporary
            files = {
                str(file.relative_to(temporary)): hash_file(file)
                for file in sorted(temporary.rglob("*"))
                if file.is_file()
            }
            record = {
                "inputs_digest": inputs_digest,
                "follows": follows,
                "files": files,
                "tools": tools,
            }
            text = json.dumps(record, indent=1, sort_keys=True)
            write_atomically(temporary / RECORD_NAME, text.encode())
            replace_folder(temporary, self.path / stage)
        except OSError as error:
            error.filename = error.filename or str(self.path)  # of a write nothing names the file
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def close(self) -> None:
        """Let others work in the folder."""
        self._lock.close()


def _is_foreign(path: Path) -> bool:
    """Return whether a file is none of a build that another blinkc begins, or died beginning."""
    return path.name != ".lock" and not path.name.startswith(".build.json.")


def replace_folder(new: Path, place: Path) -> None:
    """Move `new` to `place` in one step; what was there is removed.

    Where the file system cannot exchange two names, `place` is missing for a moment.
    """
    new.chmod(0o755)
    if place.is_dir() and not place.is_symlink() and exchange_names(new, place):
        shutil.rmtree(new, ignore_errors=True)
        return
    old = None
    if place.exists():
        old = Path(tempfile.mkdtemp(prefix=f".new-old-{place.name}-", dir=new.parent))
        os.replace(place, old / "old")
    os.replace(new, place)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def exchange_names(first: Path, second: Path) -> bool:
    """Give two files or folders each other's name at once; return whether the system could."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):
        return False
    names = (os.fsencode(first), os.fsencode(second))
    return bool(libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:  # a full disk gets its bytes back
        partial.unlink(missing_ok=True)
        raise


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


def digest_of(*parts: object) -> str:
    """Return the SHA-256 of JSON-like values, the same on every machine."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _outputs_digest(files: dict[str, str]) -> str:
    return digest_of(files)
