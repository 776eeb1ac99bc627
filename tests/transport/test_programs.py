"""The transports' C++ tests, under sanitizers."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.runtime_frontend.native_build import build_program


@pytest.mark.parametrize(
    ("program", "sanitize"),
    [
        ("verbs_test", "address,undefined"),
        ("verbs_test", "thread"),
        ("transport_conformance", "thread"),  # the others: tests/runtime_frontend
    ],
)
def test_program(program: str, sanitize: str) -> None:
    environment = {
        **os.environ,
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    done = subprocess.run(
        [str(build_program(program, sanitize=sanitize))],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
