"""Counts the cores that this process may use: affinity mask and container limits -> a number."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the smaller of the affinity mask (cpuset) and the cgroup's CPU quota, at least 1.

    A quota is rounded up, so that a container limited to two cores of a large machine gets two
    threads.
    """
    cores = len(os.sched_getaffinity(0))
    quota = _quota_cores(cgroup)
    return max(1, min(cores, quota) if quota else cores)


def _quota_cores(cgroup: Path) -> int:
    """Return the quota in whole cores, or 0 where there is none (cgroup v2, then v1)."""
    for path in (cgroup / "cpu.max", cgroup / "cpu" / "cpu.cfs_quota_us"):
        try:
            if path.name == "cpu.max":
                quota, period = path.read_text().split()
            else:
                quota, period = path.read_text(), (path.parent / "cpu.cfs_period_us").read_text()
            if quota.strip() in ("max", "-1"):
                return 0
            return max(1, -(-int(quota) // int(period)))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return 0
