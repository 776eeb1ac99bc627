"""Rings in shared memory: made by a server, found and opened by whoever looks on."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from blinkc.closing import Closing
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blink_runtime import _native

SHARED_MEMORY = Path("/dev/shm")
_UNSEEN = "unseen-blink-"  # not of the rings' family; the process id follows
_START_ONE = "start one: blink-runtime run BUNDLE"
_MAKER_LOCK = 1 << 40  # kMakerLock of transport/shared_memory.cc
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid


def create_ring(name: str, sizes: _native.RingSizes) -> _native.Ring:
    """Make a ring in shared memory.

    Raises:
        BlinkError: a size is out of range, or there is no room.
    """
    from blink_runtime import _native

    try:
        return _native.Ring.create(name, sizes)
    except _native.RingError as error:
        raise BlinkError(
            str(error), hint=f"the ring needs room in {SHARED_MEMORY} (containers: --shm-size)"
        ) from error


def open_ring(ring_name: str | None) -> tuple[_native.Ring, str]:
    """Open the ring of a running server, and say its name.

    Raises:
        BlinkError: there is no such ring, its server is dead, or there are several and none was
            named.
    """
    from blink_runtime import _native

    name = ring_name or find_ring()
    try:
        ring = _native.Ring.open(name)
    except _native.RingError as error:
        raise BlinkError(f"ring {name}: {error}", hint=_what_runs()) from error
    if not has_living_maker(SHARED_MEMORY / name.lstrip("/")):
        raise BlinkError(f"ring {name} is left over from a server that died", hint=_what_runs())
    return ring, name


class UnseenRing(Closing):
    """A note beside the rings that one lies where no other process can look: `top` and `trace` find
    it, and say so instead of that no server runs.

    Best effort: a server runs without it as well. Goes with the process, however that ends.
    """

    def __init__(self, why: str) -> None:
        self._path = SHARED_MEMORY / f"{_UNSEEN}{os.getpid()}"
        self._file: IO[str] | None = None
        with suppress(OSError):
            for path in SHARED_MEMORY.glob(f"{_UNSEEN}*"):
                if not has_living_maker(path):
                    path.unlink()
            self._file = self._path.open("w", encoding="utf-8")
            lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _MAKER_LOCK, 1, 0)
            fcntl.fcntl(self._file.fileno(), fcntl.F_OFD_SETLK, lock)
            self._file.write(why)
            self._file.flush()

    def close(self) -> None:
        """Take the note away."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def find_ring() -> str:
    """Return the name of the only ring of a running server on this machine.

    Raises:
        BlinkError: there is none that can be looked into, or there are several.
    """
    names = _living_rings()
    unseen = [path for path in SHARED_MEMORY.glob(f"{_UNSEEN}*") if has_living_maker(path)]
    if not names and unseen:
        pid = unseen[0].name.removeprefix(_UNSEEN)
        raise BlinkError(
            f"the ring of process {pid} cannot be looked into: {unseen[0].read_text()}",
            hint="its front end's /metrics tells steps, tokens, lanes and pages",
        )
    if not names:
        raise BlinkError("no server is running here", hint=_START_ONE)
    if len(names) > 1:
        raise BlinkError(f"several rings: {', '.join(names)}", hint="choose one with --ring NAME")
    return names[0]


def _living_rings() -> list[str]:
    paths = sorted(SHARED_MEMORY.glob("blink-*"))
    return ["/" + path.name for path in paths if has_living_maker(path)]


def _what_runs() -> str:
    names = _living_rings()
    return f"running here: {', '.join(names)}" if names else f"no server is running; {_START_ONE}"


def has_living_maker(path: Path) -> bool:
    """Return whether a process holds the lock that a ring's maker takes; takes none itself.

    Another user's ring counts as held: opening it will say what is wrong.
    """
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, _MAKER_LOCK, 1, 0)
    try:
        with path.open("rb") as file:
            found = fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, wanted)
    except PermissionError:
        return True
    except OSError:
        return False
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)
