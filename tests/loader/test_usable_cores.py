"""Thread pools follow the container, not the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blink_runtime import cpu_target
from blinkc.bundle import cross_check
from blinkc.codegen import compile_cpu
from blinkc.engine import tensorrt_plans
from blinkc.usable_cores import usable_cores


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cpuset of 24 cores; the machine has 64."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


def write_v1(folder: Path, quota: str, period: str) -> None:
    (folder / "cpu").mkdir()
    (folder / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu" / "cpu.cfs_period_us").write_text(period)


@pytest.mark.parametrize(
    ("quota", "period", "cores"),
    [
        ("200000", "100000", 2),
        ("250000", "100000", 3),  # rounded up: half a core is work for a thread
        ("10000", "100000", 1),
        ("3200000", "100000", 24),  # more than the cpuset
        ("50000", "25000", 2),
        ("x", "100000", 24),
        ("200000", "0", 24),
    ],
)
def test_a_quota_counts_in_both_versions(
    machine: None, tmp_path: Path, quota: str, period: str, cores: int
) -> None:
    for version in ("v1", "v2"):
        folder = tmp_path / version
        folder.mkdir()
        if version == "v1":
            write_v1(folder, f"{quota}\n", f"{period}\n")
        else:
            (folder / "cpu.max").write_text(f"{quota} {period}\n")
        assert usable_cores(folder) == cores, version


def test_without_a_quota_the_cpuset_counts(machine: None, tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none") == 24
    write_v1(tmp_path, "-1\n", "100000\n")
    assert usable_cores(tmp_path) == 24
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == 24
    (tmp_path / "cpu.max").write_text("")  # says nothing: then v1 does
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    assert usable_cores(tmp_path) == 3


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_quota_around_the_process_counts(machine: None, tmp_path: Path, version: str) -> None:
    """The bug: the root's files alone were read, so a service's CPUQuota= was none."""
    membership = tmp_path / "membership"
    inner = Path("blink.slice", "blink-1.service")
    membership.write_text(f"0::/{inner}\n1:cpu,cpuacct:/{inner}\n")
    outside = tmp_path / "outside"
    outside.write_text("0::/../../other\n1:cpu:/../other\n")
    base = tmp_path / "cpu" if version == "v1" else tmp_path

    def limit(folder: Path, quota: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if version == "v1":
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (folder / "cpu.cfs_period_us").write_text("100000\n")
        else:
            (folder / "cpu.max").write_text(f"{quota} 100000\n")

    limit(base / inner, 400_000)
    assert usable_cores(tmp_path, membership) == 4
    limit(base / inner.parent, 300_000)
    assert usable_cores(tmp_path, membership) == 3
    limit(base, 1_200_000)
    assert usable_cores(tmp_path, membership) == 3
    assert usable_cores(tmp_path, outside) == 12
    assert usable_cores(tmp_path, tmp_path / "none") == 12


def test_every_pool_asks(machine: None) -> None:
    """Guards against a pool that counts the machine's cores itself."""
    for module in (cpu_target, compile_cpu, cross_check, tensorrt_plans):
        assert module.usable_cores is usable_cores
        source = Path(str(module.__file__)).read_text()
        assert "cpu_count" not in source and "sched_getaffinity" not in source
