"""Finds the cgroups that limit this process: a controller's name -> their folders, inner first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cgroup_folders(
    controller: str, root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP
) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those around it, version 2 before 1.

    A limit of any of them counts. A container usually sees its own cgroup as the root; a service of
    systemd does not. Some of the folders may not exist.
    """
    paths = {"": "/", controller: "/"}  # by controller; of version 2: ""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    for base, path in ((root, paths[""]), (root / controller, paths[controller])):
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # outside of what this process sees
            parts = []
        for count in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:count])
