"""The kernel that guests run: Debian's package -> a kernel image and the modules in load order.

The package is fetched with apt and unpacked, never installed; what is needed of it is kept.
"""

from __future__ import annotations

import fcntl
import functools
import io
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "blink-guest"
# rdma_rxe needs crc32_generic without saying so: without it `rdma link add` fails with ENOENT.
MODULES = ("crc32_generic", "rdma_rxe", "dummy", "virtio_pci", "virtio_net", "sch_netem")
_XZ_MAGIC = b"\xfd7zXZ\x00"


@dataclass(frozen=True, kw_only=True, slots=True)
class GuestKernel:
    """An uncompressed kernel and its modules, dependencies first."""

    image: Path
    modules: tuple[Path, ...]


@functools.cache  # asking apt may take seconds
def guest_kernel() -> GuestKernel:
    """Return the kernel, fetched once; skip where Debian's is not to be had."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers
        kept = sorted(CACHE.glob("*/order"), key=lambda path: path.stat().st_mtime)
        folder = kept[-1].parent if kept else _fetch()
    names = (folder / "order").read_text().split()
    return GuestKernel(image=folder / "vmlinux", modules=tuple(folder / name for name in names))


def _fetch() -> Path:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("no apt-get and dpkg: the guests' kernel is Debian's")
    package = _package_name()
    folder = CACHE / package
    folder.mkdir(exist_ok=True)
    _unpack(_download(package), folder)
    return folder


def _package_name() -> str:
    """Follow linux-image-amd64 to the package of its newest version."""
    done = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    found = re.search(r"Depends: (linux-image-\S+)", done.stdout)
    if found is None:
        pytest.skip("apt knows no linux-image-amd64 here (Debian's kernel for x86-64)")
    return found[1]


def _download(package: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["apt-get", "download", "-q", package],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert done.returncode == 0, f"apt-get download {package}: {done.stderr}"
        (path,) = Path(folder).glob("*.deb")
        return subprocess.run(
            ["dpkg", "--fsys-tarfile", str(path)], check=True, capture_output=True
        ).stdout


def _unpack(files: bytes, folder: Path) -> None:
    """Keep the kernel, uncompressed, and `MODULES` with what they depend on."""
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        members = {Path(member.name).name: member for member in archive.getmembers()}

        def read(name: str) -> bytes:
            file = archive.extractfile(members[name])
            assert file is not None
            return file.read()

        (image,) = (name for name in members if name.startswith("vmlinuz-"))
        packed = read(image)
        # An uncompressed kernel boots without its unpacking under emulation: seconds less.
        start = packed.index(_XZ_MAGIC)
        (folder / "vmlinux").write_bytes(lzma.LZMADecompressor().decompress(packed[start:]))
        order: list[str] = []

        def take(name: str) -> None:
            file = f"{name}.ko"
            if file in order or file not in members:
                return  # built in
            data = read(file)
            depends = re.search(rb"\0depends=([^\0]*)\0", data)
            for other in depends[1].decode().split(",") if depends else []:
                if other:
                    take(other if f"{other}.ko" in members else other.replace("_", "-"))
            (folder / file).write_bytes(data)
            order.append(file)

        for name in MODULES:
            take(name)
    (folder / "order").write_text("\n".join(order))
