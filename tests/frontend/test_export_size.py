"""Exporting an 8B shape is cheap because no weight is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_peak_memory_is_the_programs_own() -> None:
    # Guards: the memory of the process that starts a program counted as that program's.
    ballast = bytearray(1 << 29)
    code = "from benchmarks.bench_export import peak_rss_mb; print(peak_rss_mb())"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert int(result.stdout) < len(ballast) >> 21


@pytest.mark.slow
def test_llama_3_8b_shape_exports_in_little_memory() -> None:
    # Guards: weights made real somewhere on the way (16 GB), and layers that stop being equal.
    script = ROOT / "benchmarks" / "bench_export.py"
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=3000
    )
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert report["num_segments"] == 33
    assert report["num_distinct_segments"] == 3
    assert report["peak_rss_mb"] < 1024
