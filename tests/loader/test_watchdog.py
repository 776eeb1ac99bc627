"""The watchdog ends a process whose scheduler is silent, and no other."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blink_runtime.serve import UNMEASURED_SILENCE_S, silence_limit_s
from blink_runtime.serve_config import ServeConfig
from blinkc.bundle.manifest import Golden
from tests.bundle.small_bundle import write_small_bundle
from tests.gpu.serving import GpuServer

pytest.importorskip("blink_runtime._native")

# A ring whose heartbeat is written by hand; argv: what happens.
PROGRAM = """
import ctypes, sys, time
from blink_runtime import _native
from blinkc import abi
sizes = _native.RingSizes(num_slots=4, max_prompt_tokens=16, max_output_tokens=16, max_seqlen=32,
                          max_batch=2, vocab_size=50, page_size_tokens=16, num_kv_pages=4)
memory = ctypes.create_string_buffer(sizes.ring_bytes + 4096)
address = (ctypes.addressof(memory) + 4095) // 4096 * 4096
ring = _native.Ring.create_at(address, sizes.ring_bytes, sizes)
header = abi.structs()["blink_ring_header"].from_address(address)
what = sys.argv[1]
header.longest_step_ns = int(float(sys.argv[2]) * 1e9)
header.launch_error, header.launch_error_key = 719, 12
watchdog = _native.Watchdog(ring, 2.0, 0.3, 70)
def beat(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        header.heartbeat += 1
        time.sleep(0.05)
beat(1.5)
if what == "stopped":
    header.stopped = 1
if what == "disarmed":
    watchdog.disarm()
    watchdog.disarm()
if what == "alive":
    beat(1.5)
    watchdog.disarm()
else:
    time.sleep(float(sys.argv[3]))
print("still here")
"""


def run(
    what: str, longest_step_s: float = 0.0, stays_s: float = 3.0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, what, str(longest_step_s), str(stays_s)],
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize(
    ("what", "text"), [("silent", "shows no life"), ("stopped", "has stopped")]
)
def test_it_ends_the_process(what: str, text: str) -> None:
    done = run(what, stays_s=500)
    assert done.returncode == 70, done.stdout + done.stderr
    assert text in done.stderr
    assert "launch error 719 of graph key 12)" in done.stderr
    assert "still here" not in done.stdout


@pytest.mark.parametrize(("what", "longest_step_s"), [("alive", 0), ("disarmed", 0), ("silent", 2)])
def test_it_leaves_the_process_alone(what: str, longest_step_s: float) -> None:
    """Guards slow models: silence of less than four of the longest steps proves nothing."""
    done = run(what, longest_step_s)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "still here" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("architecture", "longest_step_s", "silence_s"),
    [
        ("cpu", 0.5, 16.0),  # four steps of eight times as many tokens
        ("cpu", 0.001, 2.0),
        ("cpu", 0.0, UNMEASURED_SILENCE_S),
        ("sm_90a", 0.0, 2.0),
    ],
)
def test_patience_covers_the_largest_step(
    tmp_path: Path, architecture: str, longest_step_s: float, silence_s: float
) -> None:
    """The bug: with --no-golden nothing was known of a CPU's steps, so that a first long prompt was
    a scheduler without life."""
    made = write_small_bundle(tmp_path / "bundle")
    golden = Golden(prompt_token_ids=(1, 2, 3, 4), output_token_ids=(), made_by="")
    limits = made.limits.model_copy(update={"max_prefill_tokens": 32})
    library = made.target.library if architecture == "cpu" else None
    target = made.target.model_copy(update={"library": library})
    manifest = made.model_copy(update={"limits": limits, "golden": golden, "target": target})
    ring: Any = SimpleNamespace(header=lambda: {"longest_step_ns": int(longest_step_s * 1e9)})
    assert silence_limit_s(ring, manifest, ServeConfig()) == pytest.approx(silence_s)


# Stops one thread of a child as a debugger does: it makes no step more, whatever it holds.
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


WAIT_FOR_THREADS = 0x40000000  # __WALL


def freeze(thread_id: int) -> None:
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if _libc.ptrace(request, thread_id, None, None) != 0:
            pytest.skip(f"this machine does not allow ptrace: errno {ctypes.get_errno()}")


def let_die(thread_id: int) -> None:
    """Take note of a frozen thread's end: its process is not gone before."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(thread_id, os.WNOHANG | WAIT_FOR_THREADS)


def test_a_served_model_that_hangs(demo_bundle: Path) -> None:
    """Guards the whole chain on the CPU target: a scheduler that hangs in the middle of its work is
    told to clients by 503, and the process ends with a status that a supervisor restarts."""
    with GpuServer(demo_bundle) as server:
        assert server.get("/health")[0] == 200
        thread = scheduler_thread(server)
        freeze(thread)
        statuses = set()
        deadline = time.monotonic() + 600
        while server.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):  # it may just end
                statuses.add(server.get("/health")[0])
            let_die(thread)
            time.sleep(0.05)
        assert server.process.poll() == 70, server.output
        assert 503 in statuses
        assert "shows no life" in server.output


def scheduler_thread(server: GpuServer) -> int:
    """Return the id of the thread that makes the heartbeat."""
    found = [int(t) for t, (name, _) in server.thread_ticks().items() if name == "blink-scheduler"]
    assert len(found) == 1, server.thread_ticks()
    return found[0]
