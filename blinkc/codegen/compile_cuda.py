"""Compiles rendered CUDA C++ without a GPU or nvcc: source files by name + architecture -> cubin.

NVRTC compiles for the real architecture with relocatable device code; nvJitLink links it with
libcudadevrt, which holds the device side of graph launches. Both come from pip's nvidia-* wheels or
from a CUDA toolkit.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from blinkc.errors import BlinkError
from blinkc.resources import include_folder

_INSTALL_HINT = (
    'pip install "cuda-python>=13" nvidia-cuda-nvrtc nvidia-nvjitlink '
    "nvidia-cuda-runtime nvidia-cuda-crt"
)
# NVRTC has no C library; the ring's header needs these names alone.
_C_HEADERS = {
    "stdint.h": """#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
""",
    "stddef.h": """#pragma once
#define offsetof(type, member) __builtin_offsetof(type, member)
""",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaToolkit:
    """Where the headers and the device runtime library of CUDA lie."""

    include_dirs: tuple[Path, ...]
    device_runtime: Path  # libcudadevrt.a


def compile_cuda(
    sources: Mapping[str, str],
    arch: str,
    *,
    include_dirs: Sequence[Path] = (),
    flags: Sequence[str] = (),
) -> bytes:
    """Compile the first `.cu` of `sources` and link it with the device runtime.

    Args:
        sources: text by file name; files other than the first `.cu` are headers it may include.
        arch: real architecture with its suffix, such as "sm_90a".
        include_dirs: searched after the project's headers and before CUDA's.
        flags: extra NVRTC options.

    Returns:
        The cubin.

    Raises:
        BlinkError: NVRTC or nvJitLink is missing, does not know `arch`, or rejects the source;
            carries its log.
    """
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise BlinkError(f"architecture {arch!r} is not of the form sm_90 or sm_90a")
    toolkit = find_toolkit()
    relocatable = compile_relocatable(
        sources, arch, include_dirs=(*include_dirs, *toolkit.include_dirs), flags=flags
    )
    return link_cubin([relocatable], arch, libraries=[toolkit.device_runtime])


def compile_whole(sources: Mapping[str, str], arch: str, *, flags: Sequence[str] = ()) -> bytes:
    """Compile the first `.cu` of `sources` as a program of its own: no device runtime, no linking.

    Relocatable code may call what it does not see, and then ptxas waits for every warpgroup product
    before the next: kernels that multiply are compiled this way.

    Raises:
        BlinkError: NVRTC is missing or rejects the source; carries its log.
    """
    return _run_nvrtc(sources, arch, (), (*flags, "--relocatable-device-code=false"))


def compile_relocatable(
    sources: Mapping[str, str],
    arch: str,
    *,
    include_dirs: Sequence[Path],
    flags: Sequence[str] = (),
) -> bytes:
    """Run NVRTC on the first `.cu` of `sources`; return a relocatable cubin."""
    return _run_nvrtc(sources, arch, include_dirs, (*flags, "--relocatable-device-code=true"))


def _run_nvrtc(
    sources: Mapping[str, str], arch: str, include_dirs: Sequence[Path], flags: Sequence[str]
) -> bytes:
    nvrtc = _import("nvrtc")
    main = next(name for name in sources if name.endswith(".cu"))
    headers = {**_C_HEADERS, **{name: text for name, text in sources.items() if name != main}}
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            sources[main].encode(),
            main.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        ),
        "nvrtcCreateProgram",
    )
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++20",
        *(f"--include-path={path}" for path in (include_folder(), *include_dirs)),
        *flags,
    ]
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BlinkError(
                f"NVRTC cannot compile {main} for {arch}: {status.name}",
                hint=f"NVRTC {_nvrtc_version(nvrtc)} may be too old for {arch}",
                log=_program_log(nvrtc, program),
            )
        size = _checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
        cubin: bytes = b" " * size
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def link_cubin(cubins: Sequence[bytes], arch: str, *, libraries: Sequence[Path]) -> bytes:
    """Link relocatable cubins and static libraries with nvJitLink; return the cubin."""
    nvjitlink = _import("nvjitlink")
    options = [f"-arch={arch}"]
    handle = nvjitlink.create(len(options), options)
    try:
        try:
            for number, cubin in enumerate(cubins):
                kind = nvjitlink.InputType.CUBIN
                nvjitlink.add_data(handle, kind, cubin, len(cubin), f"unit{number}")
            for library in libraries:
                nvjitlink.add_file(handle, nvjitlink.InputType.LIBRARY, str(library))
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            raise BlinkError(
                f"nvJitLink cannot link for {arch}: {error}", log=_linker_log(nvjitlink, handle)
            ) from error
        size = nvjitlink.get_linked_cubin_size(handle)
        linked = bytearray(size)
        nvjitlink.get_linked_cubin(handle, linked)
        return bytes(linked)
    finally:
        nvjitlink.destroy(handle)


def check_tools() -> None:
    """Look for what compiling and linking for a GPU take.

    Raises:
        BlinkError: NVRTC, nvJitLink, the headers or the device runtime are missing.
    """
    _import("nvrtc")
    _import("nvjitlink")
    find_toolkit()


def find_toolkit() -> CudaToolkit:
    """Find CUDA's headers and libcudadevrt.a in the wheels, then in CUDA_HOME and /usr/local/cuda.

    Raises:
        BlinkError: neither holds both.
    """
    site = Path(sysconfig.get_paths()["purelib"])
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    roots = [
        site / "nvidia" / "cu13",
        site / "nvidia" / "cuda_runtime",
        *([Path(named)] if named else []),
        Path("/usr/local/cuda"),
    ]
    for root in roots:
        include = root / "include"
        for library in (root / "lib64" / "libcudadevrt.a", root / "lib" / "libcudadevrt.a"):
            if library.is_file() and (include / "cuda_device_runtime_api.h").is_file():
                return CudaToolkit(include_dirs=(include,), device_runtime=library)
    raise BlinkError("CUDA's headers and libcudadevrt.a were not found", hint=_INSTALL_HINT)


def _import(name: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise BlinkError(f"cuda.bindings.{name} cannot be imported", hint=_INSTALL_HINT) from error


def _checked(nvrtc: ModuleType, result: tuple[Any, ...], call: str) -> Any:
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BlinkError(f"{call} failed: {result[0].name}")
    return result[1] if len(result) > 1 else None


def _nvrtc_version(nvrtc: ModuleType) -> str:
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _program_log(nvrtc: ModuleType, program: Any) -> str:
    size = _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
    log: bytes = b" " * size
    _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
    return log.rstrip(b"\0 \n").decode(errors="replace")


def _linker_log(nvjitlink: ModuleType, handle: int) -> str:
    size = nvjitlink.get_error_log_size(handle)
    log = bytearray(size)
    nvjitlink.get_error_log(handle, log)
    return log.rstrip(b"\0 \n").decode(errors="replace")
