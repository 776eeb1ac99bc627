"""The kernels' tests once more, compiled with the address and undefined-behaviour sanitizers: plain
loads and stores outside a buffer, crooked vectors, overflow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("test_products.py", "test_attention.py", "test_sampling.py", "test_experts.py")

pytestmark = pytest.mark.slow


def runtime_of(name: str) -> str:
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{name} is not here")
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TESTS)
def test_sanitizers_find_nothing(name: str) -> None:
    preload = " ".join(runtime_of(library) for library in ("libasan.so", "libstdc++.so"))
    settings = {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "BLINK_EMULATION_SANITIZE": "address,undefined",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-s", "-k", "bf16",
         str(Path(__file__).with_name(name))],
        cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-6000:]}"
