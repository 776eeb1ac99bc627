"""Small virtual machines with an RDMA device: programs and a shell script -> what they printed.

A guest is QEMU without KVM, a kernel and an archive of files in memory; it starts, runs its script,
tells its exit status and ends. Two guests share a wire: Soft-RoCE packets really travel. When one
of them has ended, the other reads the line "over" on its console: a wire that loses packets is no
way to say goodbye, since whoever speaks last never knows whether it was heard.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .guest_kernel import guest_kernel

PROVIDERS = "/usr/lib/*-linux-gnu/libibverbs/librxe-rdmav*.so"
BOOT_LIMIT_S = 3000  # a quiet host takes half a minute
_INIT = """#!/bin/sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev
mkdir -p /dev/shm; mount -t tmpfs t /dev/shm
for module in $(cat /modules/order); do
  insmod /modules/$module || echo "insmod $module failed"
done
ip link set lo up
ip addr add {address}/24 dev {netdev}; ip link set {netdev} up
{loss}
/t/rdma link add rxe0 type rxe netdev {netdev} || echo "no RDMA device"
# The GID with the IPv4 address comes a moment after the link.
left=300
until grep -q ffff: /sys/class/infiniband/rxe0/ports/1/gids/* 2>/dev/null || [ $left = 0 ]; do
  left=$((left - 1)); sleep 0.2
done
cd /t
sh -u /t/script
status=$?
read up idle </proc/uptime
echo "guest ends with status $status after $up s"
[ $status -gt 62 ] && status=62
printf "\\\\$(printf %o $((status + 16)))" | dd of=/dev/port bs=1 seek=244 2>/dev/null
poweroff -f
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guest:
    """What one machine is to run.

    `script` is busybox's sh, in a folder with `programs`; the variable PEER is the other guest's
    address. `files` lie at their paths from the root. `loss_percent` drops packets that it sends.
    """

    script: str
    programs: Mapping[str, Path] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    loss_percent: float = 0
    has_peer: bool = False
    number: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a guest ended: its script's status (-1: it never told) and its console."""

    status: int
    output: str


def run_guests(*guests: Guest, limit_s: float = BOOT_LIMIT_S) -> list[Outcome]:
    """Run one guest, or two on one wire, until each has ended or `limit_s` is over."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ends = [stack.enter_context(end) for end in _wire()] if len(guests) == 2 else [None]
        started = [
            _start(guest, folder / f"guest{i}", end)
            for i, (guest, end) in enumerate(zip(guests, ends, strict=True))
        ]
        for end in filter(None, ends):
            end.close()  # the guests have theirs: with one of them its end goes
        processes = [stack.enter_context(process) for process, _ in started]
        deadline = time.monotonic() + limit_s
        running = list(processes)
        while running and time.monotonic() < deadline:
            time.sleep(0.05)
            left = [process for process in running if process.poll() is None]
            if len(left) < len(running):
                for process in left:
                    _tell(process, b"over\n")
            running = left
        for process in running:
            process.kill()
        return [
            _outcome(-1 if process in running else process.wait(), console)
            for process, console in started
        ]


def _tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Write a line to a guest's console; one that has just ended does not mind."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()


def _outcome(code: int, console: Path) -> Outcome:
    output = console.read_text(errors="replace").replace("\r", "")
    # isa-debug-exit turns v into (v << 1) | 1; the script's status travels as v - 16.
    is_told = code >= 33 and code % 2 == 1 and "guest ends with status" in output
    return Outcome(status=(code >> 1) - 16 if is_told else -1, output=output)


def _wire() -> tuple[socket.socket, socket.socket]:
    """Make a wire for two guests; it has no port that somebody else may have."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)


def _start(
    guest: Guest, folder: Path, end: socket.socket | None
) -> tuple[subprocess.Popen[bytes], Path]:
    kernel = guest_kernel()
    folder.mkdir()
    archive = folder / "files.cpio"
    archive.write_bytes(_archive(dict(_files(guest))))
    wire = []
    if end is not None:
        wire = [
            "-netdev",
            f"socket,id=wire,fd={end.fileno()}",
            "-device",
            f"virtio-net-pci,netdev=wire,mac=52:54:00:00:00:0{guest.number},romfile=",
        ]
    console = folder / "console"
    command = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", "512M",
        "-smp", "2", "-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio",
        "-no-reboot", "-device", "isa-debug-exit,iobase=0xf4,iosize=0x04", *wire,
        "-kernel", str(kernel.image), "-initrd", str(archive),
        # Without the timer check: it fails, and the kernel gives up, on a busy host.
        "-append", "console=ttyS0 panic=-1 quiet no_timer_check",
    ]  # fmt: skip
    with console.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=() if end is None else (end.fileno(),),
        )
    return process, console


def _files(guest: Guest) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of all that the guest holds."""
    kernel = guest_kernel()
    yield "bin/busybox", Path(_tool("busybox")).read_bytes()
    yield "bin/sh", b"->busybox"
    yield "modules/order", "\n".join(path.name for path in kernel.modules).encode()
    for path in kernel.modules:
        yield f"modules/{path.name}", path.read_bytes()
    netdev = "eth0" if guest.has_peer else "dummy0"
    loss = f"/t/tc qdisc add dev {netdev} root netem loss {guest.loss_percent}%"
    init = _INIT.format(
        address=f"10.77.0.{guest.number}", netdev=netdev, loss=loss if guest.loss_percent else ""
    )
    yield "init", init.encode()
    peer = f"10.77.0.{3 - guest.number}"
    script = f"PEER={peer}; SELF=10.77.0.{guest.number}; LINK={netdev}\n{guest.script}"
    yield "t/script", script.encode()
    yield from guest.files.items()
    (provider,) = Path("/").glob(PROVIDERS[1:])
    yield "etc/libibverbs.d/rxe.driver", b"driver rxe\n"
    library = next(provider.parent.parent.glob("libibverbs.so.1"))
    binaries = {
        "t/rdma": Path(_tool("rdma")),
        "t/tc": Path(_tool("tc")),
        str(provider).lstrip("/"): provider,
        str(library).lstrip("/"): library,  # found at run time: ldd does not list it
        **{f"t/{name}": path for name, path in guest.programs.items()},
    }
    for name, path in binaries.items():
        yield name, path.read_bytes()
        for needed in needed_libraries(path):
            yield needed.lstrip("/"), Path(needed).read_bytes()


def _tool(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
    assert found is not None, f"{name} is missing: make system-packages"
    return found


@functools.cache
def needed_libraries(path: Path) -> tuple[str, ...]:
    """Return the shared libraries that a program or a library of this machine loads."""
    listing = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
    return tuple(re.findall(r"(/\S+\.so\S*)", listing))


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Pack files as a "newc" archive, the form of Linux' early file system.

    A content of "->X" is a symbolic link to X. Format: Documentation/driver-api/early-userspace.
    """
    entries: dict[str, tuple[int, bytes]] = {}
    for name in ("proc", "sys", "dev", "tmp"):
        entries[name] = (stat.S_IFDIR | 0o755, b"")
    for name, data in files.items():
        for parent in reversed(Path(name).parents):
            if str(parent) != ".":
                entries.setdefault(str(parent), (stat.S_IFDIR | 0o755, b""))
        is_link = data.startswith(b"->")
        mode = stat.S_IFLNK | 0o777 if is_link else stat.S_IFREG | 0o755
        entries[name] = (mode, data[2:] if is_link else data)
    entries["TRAILER!!!"] = (0, b"")
    out = bytearray()
    for inode, (name, (mode, data)) in enumerate(entries.items(), 1):
        fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08x" % value for value in fields)
        out += name.encode() + b"\0"
        out += bytes(-len(out) % 4) + data
        out += bytes(-len(out) % 4)
    return bytes(out)


def require_guests() -> None:
    """Skip unless this machine can run them."""
    if os.uname().machine != "x86_64":
        pytest.skip("the guests are x86-64")
    for tool in ("qemu-system-x86_64", "busybox"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: make system-packages")
    if not list(Path("/").glob(PROVIDERS[1:])):
        pytest.skip("ibverbs-providers is not installed: make system-packages")
