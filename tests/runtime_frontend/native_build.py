"""Build the C++ test programs on demand, with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tests-native"


def build_program(target: str, *, sanitize: str = "address,undefined") -> Path:
    """Return the path of a built program; skip where there is no CMake or no Boost.

    The environment variable BLINK_TEST_BUILD names a build folder to use as it is, such as one
    configured with -DBLINK_TESTS=ON by hand.
    """
    if given := os.environ.get("BLINK_TEST_BUILD"):
        return find_program(Path(given), target)
    if shutil.which("cmake") is None or not Path("/usr/include/boost/version.hpp").exists():
        pytest.skip("cmake or Boost's headers are not here")
    folder = BUILD.with_name(f"{BUILD.name}-{sanitize.replace(',', '-')}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time, also under pytest-xdist
        if not (folder / "build.ninja").exists():
            run_quietly(
                "cmake", "-S", str(ROOT / "runtime"), "-B", str(folder), "-G", "Ninja",
                f"-DBLINK_SANITIZE={sanitize}", "-DBLINK_TESTS=ON", "-DBLINK_PYTHON=OFF",
            )  # fmt: skip
        run_quietly("cmake", "--build", str(folder), "-j2", "--target", target)
    return find_program(folder, target)


def find_program(folder: Path, target: str) -> Path:
    found = [path for path in folder.glob(f"tests_*/{target}") if path.is_file()]
    assert found, f"{target} is not in {folder}"
    return found[0]


def run_quietly(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
