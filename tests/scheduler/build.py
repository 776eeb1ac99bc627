"""Compiles the C++ programs of this folder once per session."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "runtime" / "include"
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror")


def build_program(source: str, folder: Path, *flags: str) -> Path:
    """Compile `source` of this folder to a program in `folder` and return its path."""
    program = folder / Path(source).stem
    command = [
        *os.environ.get("CXX", "g++").split(),
        "-std=c++20",
        "-O1",
        "-g",
        "-pthread",
        f"-I{INCLUDE}",
        f"-I{HERE}",
        *flags,
        str(HERE / source),
        "-o",
        str(program),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return program


def run_program(program: Path, *arguments: str, text: str = "") -> str:
    """Run a program to its end and return what it printed; it must succeed."""
    result = subprocess.run(
        [str(program), *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout
