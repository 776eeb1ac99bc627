"""The threads that a token's way leads through do not wait behind other programs' time slices."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from .fake_server import Server, wait_for

URGENT = ("blink-reader", "blink-detok", "blink-network")
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, ...
_SLICE_NS = 100_000
_LIBC = ctypes.CDLL(None, use_errno=True)


def scheduling(thread: int) -> tuple[int, int, int]:
    """Return (policy, nice value, time slice in nanoseconds) of a thread; 0: this one."""
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.size)
    number = _CALLS[platform.machine()][1]
    if _LIBC.syscall(number, thread, attributes, _ATTRIBUTES.size, 0) != 0:
        pytest.skip(f"sched_getattr: {os.strerror(ctypes.get_errno())}")
    _, policy, _, nice, _, runtime, _, _ = _ATTRIBUTES.unpack(attributes.raw)
    return policy, nice, runtime


def threads() -> dict[str, int]:
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # one that has just ended
            found[(task / "comm").read_text().strip()] = int(task.name)
    return found


def kernel_grants_slices() -> bool:
    """Whether another process that asks for a slice is told that it has it."""
    code = f"""
import ctypes, struct
call = ctypes.CDLL(None).syscall
layout = struct.Struct({_ATTRIBUTES.format!r})
asked = ctypes.create_string_buffer(layout.pack({_ATTRIBUTES.size}, 0, 0, 0, 0, {_SLICE_NS}, 0, 0))
told = ctypes.create_string_buffer({_ATTRIBUTES.size})
set_, get = {_CALLS[platform.machine()]}
assert call(set_, 0, asked, 0) == 0 and call(get, 0, told, {_ATTRIBUTES.size}, 0) == 0
print(layout.unpack(told.raw)[5])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() == str(_SLICE_NS)


@pytest.mark.skipif(platform.machine() not in _CALLS, reason="system call numbers not known")
def test_urgent_threads_have_short_slices(server: Server) -> None:
    if not kernel_grants_slices():
        pytest.skip("this kernel has no time slices to ask for")
    policy, nice, own_slice_ns = scheduling(0)
    assert own_slice_ns != _SLICE_NS
    # Each asks for it as the first thing that it does, which may be after the server is there.
    for name in URGENT:
        wait_for(lambda name=name: name in threads(), f"the thread {name}")  # type: ignore[misc]
        thread = threads()[name]
        wait_for(
            lambda thread=thread: scheduling(thread) == (policy, nice, _SLICE_NS),  # type: ignore[misc]
            f"a short slice of {name}: it has {scheduling(thread)}",
        )
