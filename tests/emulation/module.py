"""A model's kernels for the emulated device: rendered .cu text -> a library -> launches of it.

g++ compiles the text with the headers of include/emulation in place of CUDA's. Where it lies:
build/tests-emulation, a file a source; ccache is used where it is.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blinkc.resources import include_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blink_runtime.cuda_graphs import Launch

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "tests-emulation"
DEVICE_SOURCES = ("device.cc", "fibers.cc", "tensor_cores.cc")
# What a target's compiler defines.
TARGETS = {
    "sm_90a": ("__CUDA_ARCH__=900", "__CUDA_ARCH_FEAT_SM90_ALL=1"),
    "sm_100a": ("__CUDA_ARCH__=1000",),
    "sm_80": ("__CUDA_ARCH__=800",),
}
_DECLARATION = re.compile(
    r"^(#(?:if|else|endif).*)$"
    r"|^__device__ uint32_t (\w+)\s*="
    r"|^__global__\s+([^;{}]*?)\bvoid\s+(\w+)\s*\(",
    re.MULTILINE,
)
_MESSAGE_BYTES = 1024


def table_of_kernels(source: str) -> str:
    """Return C++ that lists the kernels and constants of `source`; stands behind it."""
    kernels, constants = [], []
    for directive, constant, qualifiers, kernel in _DECLARATION.findall(source):
        if directive:  # what the target does not have is not listed
            kernels.append(directive)
            constants.append(directive)
        elif constant:
            constants.append(f'{{"{constant}", &{constant}}},')
        else:
            kernels.append(f'kernel_entry<{kernel}>("{kernel}", 0 {qualifiers}),')
    newline = "\n"
    return f"""
#undef __cluster_dims__
#undef __launch_bounds__
#define __cluster_dims__(x, y, z) + (x)
#define __launch_bounds__(threads, ...) , (threads)
namespace emulation {{
const Kernel kernels[] = {{
{newline.join(kernels)}
}};
const size_t num_kernels = sizeof kernels / sizeof kernels[0];
const Constant constants[] = {{
{newline.join(constants)}
{{"", nullptr}}}};
const size_t num_constants = sizeof constants / sizeof constants[0] - 1;
}}  // namespace emulation
"""


def build_library(source: str, target: str) -> Path:
    """Compile, or take what was compiled of the same text, headers and flags."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not here")
    flags = [
        "-std=c++20", "-fPIC", "-g1", "-fvisibility=hidden", "-fno-gnu-unique",
        "-fno-extern-tls-init", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-variable",
        "-fno-strict-aliasing", f"-I{HERE / 'include'}", f"-I{include_folder()}",
    ]  # fmt: skip
    most_frame_bytes = 32 * 1024  # a quarter of a stack
    if sanitize := os.environ.get("BLINK_EMULATION_SANITIZE"):
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined"]
        most_frame_bytes *= 4
    defines = [f"-D{define}" for define in TARGETS[target]]
    kernel_flags = [
        "-O1", "-include", "emulation/cuda.h", *defines,
        '-DBLINK_PTX_HEADER="emulation/ptx.h"', "-x", "c++",
        f"-Werror=frame-larger-than={most_frame_bytes}",
    ]  # fmt: skip
    device_flags = ["-O3"]
    text = source + table_of_kernels(source)
    digest = hashlib.sha256(repr((text, flags, kernel_flags, device_flags)).encode())
    headers = [*HERE.rglob("*.h"), *HERE.glob("*.cc"), *include_folder().rglob("*.*h")]
    for header in sorted(headers):
        digest.update(header.read_bytes())
    library = BUILD / f"{digest.hexdigest()[:32]}.so"
    if library.exists():
        return library
    BUILD.mkdir(parents=True, exist_ok=True)
    stem = library.with_suffix("")
    with stem.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        kernels = stem.with_suffix(".cu")
        kernels.write_text(text)
        compiler = ["ccache", "g++"] if shutil.which("ccache") else ["g++"]
        objects = []
        for path, extra in (
            (kernels, kernel_flags),
            *((HERE / name, device_flags) for name in DEVICE_SOURCES),
        ):
            objects.append(stem.with_suffix(f".{path.name}.o"))
            _run(*compiler, *flags, *extra, "-c", str(path), "-o", str(objects[-1]))
        made = stem.with_suffix(".made")
        _run("g++", *flags, "-shared", *map(str, objects), "-o", str(made))
        made.rename(library)
        for path in (*objects, kernels):
            path.unlink()
    return library


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-8000:]}"


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("is_of_previous", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class EmulatedFunction:
    """A kernel, as `Launch` names it."""

    name: str


class KernelFault(Exception):
    """A kernel broke a rule of the device."""


class EmulatedModule:
    """A loaded library; stands in for blink_runtime.cuda_driver.Module."""

    def __init__(self, source: str, target: str = "sm_90a") -> None:
        self._library = ctypes.CDLL(str(build_library(source, target)))
        self._library.emulation_launch.argtypes = [
            ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p,
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t,
        ]  # fmt: skip

    def function(self, name: str) -> EmulatedFunction:
        """Look a kernel up by its name."""
        assert self._library.emulation_has_kernel(name.encode()), name
        return EmulatedFunction(name)

    def read_uint32(self, name: str) -> int:
        """Return the value of a `__device__` constant."""
        value = ctypes.c_uint32()
        assert self._library.emulation_constant(name.encode(), ctypes.byref(value)), name
        return value.value

    def launch(self, item: Launch, buffers: Sequence[tuple[int, int, bool]], seed: int) -> None:
        """Run one kernel to its end.

        buffers: address, bytes, whether the previous kernel of the step wrote it.

        Raises:
            KernelFault: what the device would not do, or what is left to chance there.
        """
        arguments = (ctypes.c_void_p * max(len(item.args), 1))(
            *(ctypes.addressof(arg) for arg in item.args)
        )
        known = (_Buffer * max(len(buffers), 1))(*buffers)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if self._library.emulation_launch(
            item.function.name.encode(), (ctypes.c_uint32 * 3)(*item.grid), item.block,
            item.shared_bytes, arguments, known, len(buffers), seed, message, _MESSAGE_BYTES,
        ):  # fmt: skip
            raise KernelFault(message.value.decode())
