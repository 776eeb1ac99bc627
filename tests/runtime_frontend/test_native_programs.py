"""Run the C++ tests of transport and front end, also those built with sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [
    "tests_transport/transport_conformance",
    "tests_frontend/frontend_unit",
    "tests_frontend/frontend_load",
]


@pytest.mark.parametrize("build", ["native", "sanitize", "tsan"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(build: str, program: str) -> None:
    path = ROOT / "build" / build / program
    if not path.exists():
        pytest.skip(f"build/{build}/{program} is not built (cmake -DBLINK_TESTS=ON)")
    done = subprocess.run([str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
