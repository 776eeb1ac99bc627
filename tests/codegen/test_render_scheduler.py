"""The rendered scheduler: golden text, formatting, and tables that say what the plan says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from blinkc.codegen.environment import render_template
from blinkc.codegen.render_scheduler import OFF_CACHE_BIT, render_scheduler, scheduler_context
from blinkc.errors import InternalError
from tests.codegen.plans import make_plan

TARGETS = ("cpu", "sm_90a")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", TARGETS)
def test_text_is_golden(target: str, compare_golden: Callable[[str, str], None]) -> None:
    """Guards against a change of the templates that nobody looked at."""
    for name, text in render_scheduler(make_plan(target), target).items():
        compare_golden(f"scheduler_{target}/{name}", text)


@pytest.mark.parametrize("target", TARGETS)
def test_text_is_formatted(target: str) -> None:
    """Guards the rule that what stands in a bundle reads like the rest of the code."""
    beside = Path(sys.executable).parent / "clang-format"
    program = str(beside) if beside.exists() else shutil.which("clang-format")
    if program is None:
        pytest.skip("clang-format is not installed")
    for name, text in render_scheduler(make_plan(target), target).items():
        command = [program, f"--style=file:{ROOT / '.clang-format'}", f"--assume-filename={name}"]
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        assert result.stdout == text, name


def test_text_is_the_same_each_time() -> None:
    """Guards the cache by content: equal plans must give equal sources."""
    assert render_scheduler(make_plan(), "cpu") == render_scheduler(make_plan(), "cpu")


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_tables_follow_the_plan(kind: str) -> None:
    """Guards the flag in the tables: it marks the steps whose own bucket was not captured."""
    plan = make_plan()
    grid = next(grid for grid in scheduler_context(plan, "cpu").grids if grid.kind == kind)
    for batch in range(1, grid.batch_buckets[-1] + 1):
        for seqlen in range(1, grid.seqlen_buckets[-1] + 1):
            bucket = grid.bucket_index[-(-seqlen // grid.granule_tokens)]
            entry = grid.rows[batch][bucket]
            key = plan.look_up(kind, batch, seqlen)
            assert plan.keys[entry & ~OFF_CACHE_BIT] == key
            own = (
                min(size for size in grid.batch_buckets if size >= batch),
                min(size for size in grid.seqlen_buckets if size >= seqlen),
            )
            assert bool(entry & OFF_CACHE_BIT) == ((key.batch, key.seqlen) != own)


def test_a_missing_name_is_an_error() -> None:
    """Guards against Jinja's habit of printing nothing for a name that does not exist."""

    @dataclass
    class Empty:
        version: str = "1"

    with pytest.raises(InternalError, match="num_slots"):
        render_template("config.cuh.jinja", Empty())
