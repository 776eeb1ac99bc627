"""Cross-builds the wheel for aarch64 on x86-64: checkout and sysroot -> dist/*_aarch64.whl.

The build backend runs under an emulated Python of the sysroot, so that it names the wheel and finds
the headers for that Python; compilers and CMake run as they are on this machine.
`python runtime/dpu/build_wheel.py [--sysroot FOLDER] [--out FOLDER]`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SYSROOT = ROOT / "build" / "aarch64" / "sysroot"
PYTHON_VERSION = "3.11"  # Debian 12's, as in make_sysroot
BUILD_PACKAGES = ("scikit-build-core>=0.10", "nanobind>=2.4")
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
_BUILD = "import sys; from scikit_build_core.build import build_wheel as b; b(sys.argv[1])"


def build_wheel(sysroot: Path, out: Path) -> Path:
    """Return the wheel's path.

    Raises:
        SystemExit: a tool is missing (the message names its package), or the build failed.
    """
    make_sysroot(sysroot)
    python = make_python(sysroot)
    site = install_for_aarch64(sysroot.parent / "build-packages", BUILD_PACKAGES)
    out.mkdir(parents=True, exist_ok=True)
    includes = sysroot / "usr" / "include" / f"python{PYTHON_VERSION}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "BLINK_SYSROOT": str(sysroot),
        "CMAKE_GENERATOR": "Ninja",
        "SKBUILD_BUILD_DIR": str(sysroot.parent / "wheel"),
        "SKBUILD_CMAKE_ARGS": ";".join(
            [
                f"-DCMAKE_TOOLCHAIN_FILE={Path(__file__).with_name('aarch64.cmake')}",
                f"-DPython_EXECUTABLE={python}",
                f"-DPython_INCLUDE_DIR={includes}",
                f"-Dnanobind_DIR={site}/nanobind/cmake",
            ]
        ),
    }
    subprocess.run([python, "-c", _BUILD, str(out)], cwd=ROOT, env=environment, check=True)
    return max(out.glob("*_aarch64.whl"), key=lambda path: path.stat().st_mtime)


def make_sysroot(sysroot: Path) -> None:
    """Make the sysroot unless it is there."""
    script = Path(__file__).with_name("make_sysroot")
    subprocess.run([script, sysroot], check=True)


def make_python(sysroot: Path) -> Path:
    """Write a program that runs the sysroot's Python under emulation; return its path."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        sys.exit("qemu-aarch64 is missing: apt-get install qemu-user-static")
    path = sysroot.parent / "python-aarch64"
    python = sysroot / "usr" / "bin" / f"python{PYTHON_VERSION}"
    path.write_text(f'#!/bin/sh\nexec {emulator} -L {sysroot} {python} "$@"\n')
    path.chmod(0o755)
    return path


def install_for_aarch64(folder: Path, packages: tuple[str, ...]) -> Path:
    """Put packages (and what they need) for the emulated Python into a folder, once."""
    done = folder / ".complete"
    wanted = "\n".join(packages)
    if done.exists() and done.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [f"--platform={name}_aarch64" for name in _PLATFORMS]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", folder, *platforms,
         f"--python-version={PYTHON_VERSION}", "--only-binary=:all:", *packages],
        check=True,
    )  # fmt: skip
    done.write_text(wanted)
    return folder


def main() -> None:
    """Build the wheel and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sysroot", type=Path, default=SYSROOT)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    print(build_wheel(given.sysroot.resolve(), given.out.resolve()))


if __name__ == "__main__":
    main()
