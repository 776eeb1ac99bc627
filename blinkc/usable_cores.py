"""Counts the cores that this process may use: affinity mask and container limits -> a number."""

from __future__ import annotations

import os
from pathlib import Path

from blinkc.cgroups import CGROUP_ROOT, MEMBERSHIP, cgroup_folders


def usable_cores(cgroup: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the smaller of the affinity mask (cpuset) and the cgroups' CPU quotas, at least 1.

    A quota is rounded up, so that a container limited to two cores of a large machine gets two
    threads.
    """
    quotas = map(_quota_cores, cgroup_folders("cpu", cgroup, membership))
    return max(1, min([len(os.sched_getaffinity(0)), *(cores for cores in quotas if cores)]))


def _quota_cores(folder: Path) -> int:
    """Return a cgroup's quota in whole cores, or 0 where it has none (version 2, then 1)."""
    for name in ("cpu.max", "cpu.cfs_quota_us"):
        try:
            if name == "cpu.max":
                quota, period = (folder / name).read_text().split()
            else:
                quota = (folder / name).read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if quota.strip() in ("max", "-1"):
                return 0
            return max(1, -(-int(quota) // int(period)))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return 0
