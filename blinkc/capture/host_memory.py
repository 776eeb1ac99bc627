"""Says when a CPU plan is larger than this machine: `CapturePlan` -> the sums, as an error."""

from __future__ import annotations

import os
from pathlib import Path

from blinkc.capture.plan import CapturePlan
from blinkc.capture.plan_capture import check_budget, replace_budget
from blinkc.cgroups import CGROUP_ROOT, MEMBERSHIP, cgroup_folders

USABLE_PERCENT = 90


def check_host_memory(plan: CapturePlan, *, available_bytes: int | None = None) -> None:
    """Refuse a plan for the CPU that needs more than nine tenths of this machine's memory.

    Not part of the plan itself, so that the same inputs give the same plan on every machine. A
    budget that the user gave was checked when the plan was made.

    Raises:
        BlinkError: the sums, and what to lower.
    """
    if plan.target != "cpu" or plan.memory.budget_bytes:
        return
    available = host_memory_bytes() if available_bytes is None else available_bytes
    if available:
        memory = replace_budget(plan.memory, available * USABLE_PERCENT // 100)
        check_budget(memory, plan.target, len(plan.keys))


def host_memory_bytes(cgroup: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the memory this process may use: the machine's or its container's; 0 if unknown."""
    try:
        least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
    for folder in cgroup_folders("memory", cgroup, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():  # "max": no limit
                least = min(least, int(text))
    return least
