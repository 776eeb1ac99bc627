"""The C++ tests under sanitizers, and a short run of the fuzz target."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .vocabularies import ROOT

SOURCE = ROOT / "tests" / "tokenizer" / "cpp"
FUZZ_SECONDS = int(os.environ.get("BLINK_FUZZ_SECONDS", "20"))
SLOW_FUZZ_SECONDS = int(os.environ.get("BLINK_SLOW_FUZZ_SECONDS", "3600"))


def build(name: str, *options: str) -> Path:
    directory = ROOT / "build" / name
    for command in (
        ["cmake", "-S", str(SOURCE), "-B", str(directory), *options],
        ["cmake", "--build", str(directory), "-j2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return directory


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr[-8000:]}"
    return done.stdout


def test_under_address_and_undefined_sanitizer() -> None:
    directory = build("tokenizer-asan")
    assert ", 0 failures" in run(str(directory / "test_tokenizer")).replace(";", ",")
    assert "inputs" in run(str(directory / "fuzz_tokenizer"), str(FUZZ_SECONDS))


def test_under_thread_sanitizer() -> None:
    directory = build("tokenizer-tsan", "-DBLINK_SANITIZE=thread")
    run(str(directory / "test_tokenizer"))


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
def test_under_libfuzzer() -> None:
    compiler = shutil.which("clang++") or shutil.which("clang++-14")
    if compiler is None:
        pytest.skip("libFuzzer needs clang++, which is not installed")
    directory = build("tokenizer-fuzz", f"-DCMAKE_CXX_COMPILER={compiler}", "-DBLINK_LIBFUZZER=ON")
    corpus = ROOT / ".cache" / "fuzz" / "tokenizer"
    corpus.mkdir(parents=True, exist_ok=True)
    run(
        str(directory / "fuzz_tokenizer"),
        f"-max_total_time={SLOW_FUZZ_SECONDS}",
        "-max_len=4096",
        f"-artifact_prefix={corpus.parent}/",
        str(corpus),
    )


def test_on_aarch64() -> None:
    """The NEON classifier against its scalar twin, and all else, under user-mode emulation."""
    compiler = shutil.which("aarch64-linux-gnu-g++") or shutil.which("aarch64-linux-gnu-g++-12")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        missing = "aarch64-linux-gnu-g++" if compiler is None else "qemu-aarch64"
        pytest.skip(f"{missing} is not installed")
    directory = build(
        "tokenizer-aarch64",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_EXE_LINKER_FLAGS=-static",
        "-DBLINK_SANITIZE=",
    )
    assert "byte classes: neon; 0 failures" in run(emulator, str(directory / "test_tokenizer"))
