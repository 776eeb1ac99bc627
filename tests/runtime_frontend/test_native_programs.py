"""Run the C++ tests of transport and front end under the sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .native_build import build_program

PROGRAMS = [
    "transport_conformance",
    "step_trace_test",
    "frontend_unit",
    "frontend_http",
    "frontend_load",
    "frontend_mixed",
    "frontend_faults",
    "frontend_stop",
    "frontend_pacer",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str) -> None:
    run_program(build_program(program))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_under_thread_sanitizer(program: str) -> None:
    run_program(build_program(program, sanitize="thread"))


def run_program(path: Path) -> None:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    done = subprocess.run([str(path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
