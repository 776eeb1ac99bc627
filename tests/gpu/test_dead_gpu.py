"""A GPU that dies while it serves: the process says so and ends, whatever the driver does."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("death", ["hang", "fault"])
@pytest.mark.parametrize("placement", ["chained", "persistent", "host"])
def test_the_process_ends(placement: str, death: str) -> None:
    """Guards against a server that hangs for ever on a sticky CUDA error or an endless kernel."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.dead_gpu", placement, death],
        capture_output=True,
        text=True,
        timeout=60,
    )
    print(f"{placement}, {death}: {time.monotonic() - started:.1f} s in all; {done.stderr.strip()}")
    assert done.returncode == 70, done.stdout + done.stderr
    assert "alive while idle" in done.stdout
    assert "shows no life" in done.stderr
