"""Random histories of front ends, scheduler and a hashing model: nothing leaks, nothing is lost.

The slow one is the hundred thousand: `pytest tests/scheduler -m slow`. A failure names its seed;
`simulation SEED 1` runs that history alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scheduler.build import WARNINGS, build_program, run_program


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_program("simulation.cc", tmp_path_factory.mktemp("plain"), *WARNINGS)


def totals(printed: str) -> dict[str, int]:
    words = printed.split()
    return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}


def test_a_thousand_histories(simulation: Path) -> None:
    """Guards every invariant in invariants.h, history.h and fake_front_end.h."""
    sums = totals(run_program(simulation, "0", "1000"))
    assert sums["histories"] == 1000
    # A harness that never gets into trouble would prove nothing.
    for trouble in (
        "paused", "aborted", "failed", "late_commands", "checksum_retries", "off_cache_steps",
    ):  # fmt: skip
        assert sums[trouble] >= 200, trouble


@pytest.mark.slow
def test_a_hundred_thousand_histories(simulation: Path) -> None:
    """Guards the same at the size that finds rare meetings of events."""
    assert totals(run_program(simulation, "1000", "100000"))["histories"] == 100000


def test_rare_situations(tmp_path: Path) -> None:
    """Guards races inside one scan, bursts, lost bells, statistics and start-up checks."""
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    run_program(build_program("unit_test.cc", tmp_path, *WARNINGS, *sanitizers))


def test_memory_is_clean(tmp_path: Path) -> None:
    """Guards against accesses outside state, ring and step buffers, and undefined behaviour."""
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = build_program("simulation.cc", tmp_path, *sanitizers)
    assert totals(run_program(program, "0", "200"))["histories"] == 200


def test_a_team_takes_the_same_steps(tmp_path: Path) -> None:
    """Guards the cooperation of a block's threads: races (TSAN), results that depend on timing."""
    program = build_program("simulation.cc", tmp_path, "-fsanitize=thread")
    assert totals(run_program(program, "0", "25", "3"))["histories"] == 25


def test_concurrent_front_ends(tmp_path: Path) -> None:
    """Guards the acquire and release pairs of abi.h: TSAN watches real threads on one ring."""
    program = build_program("concurrent.cc", tmp_path, *WARNINGS, "-fsanitize=thread")
    assert totals(run_program(program, "1000"))["requests"] == 2000
