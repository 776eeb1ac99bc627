"""The fuzz targets over their seeds and the same inputs each time; new ones in the slow list."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNS = 50_000
SLOW_SECONDS = int(os.environ.get("BLINK_SLOW_FUZZ_SECONDS", "3600"))
TARGETS = ["http", "json", "tokenizer"]


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("blink_fuzz", ROOT / "fuzz" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if (compiler := module.find_compiler()) is None:
        pytest.skip("clang++ with libFuzzer is not installed")
    module.build(compiler, TARGETS)
    return module


@pytest.mark.parametrize("target", TARGETS)
def test_short(fuzz: ModuleType, target: str, tmp_path: Path) -> None:
    assert fuzz.run(target, tmp_path, f"-runs={RUNS}", "-seed=1") == RUNS


def test_memory_of_who_starts_it_does_not_count(fuzz: ModuleType, tmp_path: Path) -> None:
    """The bug: a test runner that had used 2.3 GB failed every target's limit of 2 GB."""
    resident = bytearray(b"\1") * 1_200_000_000
    assert fuzz.run("http", tmp_path, "-runs=100000", "-seed=1", memory_mb=1000) > 0
    assert len(resident) > 0


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("target", TARGETS)
def test_an_hour(fuzz: ModuleType, target: str) -> None:
    assert fuzz.fuzz_for(target, SLOW_SECONDS // len(TARGETS)) > 100_000


def test_a_broken_parser_would_be_found(fuzz: ModuleType, tmp_path: Path) -> None:
    """The bug: a target that checks nothing finds nothing."""
    program = fuzz.BUILD / "fuzz_http"
    assert b"pieces give what the whole gives" in program.read_bytes()
    seed = tmp_path / "seed"
    seed.write_bytes(b"\x00GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    done = subprocess.run([str(program), str(seed)], capture_output=True)
    assert done.returncode == 0
