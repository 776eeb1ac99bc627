"""What the host did during a measurement: CPU time of each thread, steal, cores, hardware names."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FRONT_END_THREADS = (
    "blink-network", "blink-reader", "blink-detok", "blink-steps", "blink-log",
)  # fmt: skip
_STEAL_FIELD = 8  # of /proc/stat's first line, the word "cpu" being field 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadTime:
    """A thread's name and the CPU time it has used."""

    name: str
    cpu_s: float


def thread_times(pid: int | None = None) -> dict[int, ThreadTime]:
    """Return every thread of a process (default: this one) by its id."""
    found = {}
    for task in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            found[int(task.name)] = ThreadTime(name=name, cpu_s=_cpu_s(task))
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile
    return found


def _cpu_s(task: Path) -> float:
    """Nanoseconds from schedstat; where the kernel keeps none, ticks from stat."""
    try:
        on_cpu_ns = int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        on_cpu_ns = 0
    if on_cpu_ns:
        return on_cpu_ns * 1e-9
    fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def used_by_threads(
    before: dict[int, ThreadTime], after: dict[int, ThreadTime], seconds: float
) -> dict[str, float]:
    """Return the share of one core each thread used, in percent, busiest first; `name/id` names."""
    shares = {
        f"{thread.name}/{tid}": 100
        * (thread.cpu_s - (before[tid].cpu_s if tid in before else 0.0))
        / seconds
        for tid, thread in after.items()
    }
    return {name: round(v, 4) for name, v in sorted(shares.items(), key=lambda item: -item[1])}


def is_front_end(name: str) -> bool:
    """Tell whether a thread, `name/id`, serves clients; all others should sleep."""
    return name.split("/")[0] in FRONT_END_THREADS


def steal_s(stat: str | None = None) -> float:
    """Return the seconds that the hypervisor gave to others, summed over this machine's cores."""
    line = (stat if stat is not None else Path("/proc/stat").read_text()).splitlines()[0].split()
    return int(line[_STEAL_FIELD]) / _TICKS_PER_S if len(line) > _STEAL_FIELD else 0.0


def reserve_cores(count: int, cores: set[int], siblings: dict[int, set[int]]) -> set[int]:
    """Choose `count` cores to keep free of load, whole physical cores first.

    Args:
        siblings: for each core the hardware threads of the same physical core, itself among them.

    Raises:
        ValueError: nothing would be left for the load.
    """
    if count >= len(cores):
        raise ValueError(f"{count} reserved cores of {len(cores)} leave none for the load")
    chosen: set[int] = set()
    for core in sorted(cores):
        if len(chosen) >= count:
            break
        if core not in chosen:
            chosen |= siblings.get(core, {core}) & cores
    return set(sorted(chosen)[:count])


def core_siblings() -> dict[int, set[int]]:
    """Read which cores are hardware threads of one physical core; empty where it is not told."""
    found = {}
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
        core = int(path.parent.parent.name[3:])
        found[core] = _cores_of_list(path.read_text().strip())
    return found


def _cores_of_list(text: str) -> set[int]:
    cores: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        cores |= set(range(int(low), int(high or low) + 1))
    return cores


def hardware() -> dict[str, str | int]:
    """Return names and counts that a result must carry."""
    facts: dict[str, str | int] = {
        "host_cores": len(os.sched_getaffinity(0)),
        "host_cpu": _cpu_model(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        facts["gpu"] = done.stdout.strip() if done.returncode == 0 else "none"
    except (OSError, subprocess.TimeoutExpired):
        facts["gpu"] = "none"
    return facts


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit() -> str:
    """Return the checkout's commit, or nothing where there is none."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
