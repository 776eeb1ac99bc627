"""The CPU target's end, over a library without a model."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from blink_runtime.cpu_target import CpuTarget

SOURCE = Path(__file__).with_name("slow_target.c")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is here")
    path = tmp_path / "target.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    return path


def test_the_end_waits_for_the_step_at_hand(library: Path) -> None:
    """The bug: after five seconds the weights were unmapped under a long prefill that still read
    them, and the process died of it."""
    ring = ctypes.create_string_buffer(2)
    target = CpuTarget(
        library=library,
        weights=(),
        ring_address=ctypes.addressof(ring),
        ring_bytes=2,
        num_kv_pages=1,
        num_threads=1,
    )
    target.start()
    ring[0] = b"\1"  # the stop word
    assert not target.join(0.1)
    step = threading.Timer(6.0, ring.__setitem__, (1, b"\1"))
    step.start()
    target.close()
    assert ring[1] == b"\1"
    assert target.join(0.0)
    step.join()
