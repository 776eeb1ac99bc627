"""The front end and its tests for the DPU's processor, built here and run under emulation.

The C++ tests run as they are. The Python tests of the front end run under an emulated Python with
the extension module of the cross-built wheel; only the fake ring owner, which stands in for the
GPU, runs natively beside it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "runtime" / "dpu"))
import build_wheel  # noqa: E402

from tests.runtime_frontend.native_build import build_program  # noqa: E402

AARCH64 = ROOT / "build" / "aarch64"
PROGRAMS = ("transport_conformance", "frontend_unit", "frontend_load")
PYTHON_TESTS = (
    "tests/runtime_frontend/test_http.py",
    "tests/runtime_frontend/test_parameters.py",
    "tests/runtime_frontend/test_text.py",
)
TEST_PACKAGES = ("click", "jinja2", "pydantic", "httpx", "pytest", "pytest-timeout", "hypothesis")
ELF_MACHINE_AARCH64 = 183


@pytest.fixture(scope="module")
def sysroot() -> Path:
    """The sysroot; skips where this machine lacks a tool to make or to run it."""
    if platform.machine() != "x86_64":
        pytest.skip("cross-building is tested on x86-64")
    if "bookworm" not in Path("/etc/os-release").read_text():
        pytest.skip("the sysroot is made of Debian 12's packages, on Debian 12")
    tools = {
        "mmdebstrap": ("mmdebstrap",),
        "g++-12-aarch64-linux-gnu": ("aarch64-linux-gnu-g++-12", "aarch64-linux-gnu-g++"),
        "qemu-user-static": ("qemu-aarch64-static", "qemu-aarch64"),
    }
    for package, names in tools.items():
        if not any(shutil.which(name) for name in names):
            pytest.skip(f"{package} is not installed")
    build_wheel.make_sysroot(build_wheel.SYSROOT)
    return build_wheel.SYSROOT


@pytest.fixture(scope="module")
def programs(sysroot: Path) -> Path:
    """The build folder of the C++ tests."""
    folder = AARCH64 / "tests"
    environment = {**os.environ, "BLINK_SYSROOT": str(sysroot)}
    toolchain = ROOT / "runtime" / "dpu" / "aarch64.cmake"
    for command in (
        ["cmake", "-S", ROOT / "runtime", "-B", folder, "-G", "Ninja", "-DBLINK_TESTS=ON",
         "-DBLINK_PYTHON=OFF", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}"],
        ["cmake", "--build", folder, "-j2", "--target", *PROGRAMS],
    ):  # fmt: skip
        run(*command, environment=environment)
    return folder


@pytest.fixture(scope="module")
def wheel(sysroot: Path) -> Path:
    return build_wheel.build_wheel(sysroot, AARCH64 / "dist")


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(programs: Path, sysroot: Path, name: str) -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    program = next(path for path in programs.glob(f"tests_*/{name}") if path.is_file())
    assert elf_machine(program.read_bytes()) == ELF_MACHINE_AARCH64
    run(emulator, "-L", sysroot, program)


def test_wheel_is_for_aarch64(wheel: Path) -> None:
    """Guards a wheel whose tag or module is the build machine's."""
    assert wheel.name.endswith("-cp311-cp311-linux_aarch64.whl")
    archive = zipfile.ZipFile(wheel)
    modules = [name for name in archive.namelist() if name.endswith(".so")]
    assert modules == ["blink_runtime/_native.cpython-311-aarch64-linux-gnu.so"]
    assert elf_machine(archive.read(modules[0])) == ELF_MACHINE_AARCH64


def test_front_end_under_emulated_python(wheel: Path, sysroot: Path, tmp_path: Path) -> None:
    """The Python tests of the front end, with the wheel's own files before the checkout's."""
    site = build_wheel.install_for_aarch64(AARCH64 / "test-packages", TEST_PACKAGES)
    zipfile.ZipFile(wheel).extractall(tmp_path / "wheel")
    owner = build_program("fake_owner", sanitize="address,undefined")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path / 'wheel'}:{site}:{ROOT}",
        "BLINK_TEST_BUILD": str(owner.parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        build_wheel.make_python(sysroot),
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
    ]
    output = run(*command, *PYTHON_TESTS, environment=environment)
    assert " passed" in output.splitlines()[-1], output


def elf_machine(data: bytes) -> int:
    assert data[:4] == b"\x7fELF"
    return int.from_bytes(data[18:20], "little")


def run(*command: object, environment: dict[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-6000:]}{done.stderr[-4000:]}"
    return done.stdout
