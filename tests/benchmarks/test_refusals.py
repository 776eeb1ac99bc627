"""What a benchmark cannot run without is said in a sentence, not by a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _refusal(script: str, *arguments: str) -> str:
    """Run a benchmark where no GPU is to be seen; return what it says on stderr."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments],
        cwd=ROOT,
        env=os.environ
        | {
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:.:runtime",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("script", ["bench_scheduler.py", "bench_kernels.py"])
def test_missing_gpu_is_said(script: str) -> None:
    said = _refusal(script)
    assert said.startswith(f"{script}: ") and ("GPU" in said or "CUDA" in said)


@pytest.mark.parametrize("arguments", [(), ("nowhere", "serve=host,1:8:8"), (".",)], ids=str)
def test_model_benchmark_says_what_it_takes(arguments: tuple[str, ...]) -> None:
    assert "prepare_model.py" in _refusal("bench_model.py", *arguments)
