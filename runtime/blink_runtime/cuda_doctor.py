"""`blink-runtime doctor`: this machine -> one line for each thing a GPU target needs, and what to
do."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from blink_runtime.cuda_driver import Context

WANTED_DRIVER = 13000  # CUDA 13.0: the cubins of bundles, and graphs launched from the GPU


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line: `level` is "ok", "notice" or "problem"."""

    name: str
    level: str
    text: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Yield findings in order; stops at the first that makes the rest pointless."""
    from blink_runtime.cuda_driver import Context

    yield _examine_versions()
    try:
        context = Context()
    except BlinkError as error:
        yield Finding(name="driver", level="problem", text=error.message, advice=error.hint)
        return
    with context:
        yield from _examine_gpu(context)
        yield from _examine_libraries()
        yield from _examine_sharing(context)
        yield _examine_launch(context)


def _examine_versions() -> Finding:
    packages = ("blinkc", "cuda-bindings", "pydantic", "numpy")
    found = [f"{name} {version(name)}" for name in packages if _is_installed(name)]
    missing = [name for name in packages[1:3] if not _is_installed(name)]
    return Finding(
        name="versions",
        level="problem" if missing else "ok",
        text=", ".join([*found, f"Python {platform.python_version()}", platform.machine()]),
        advice=f"pip install {' '.join(missing)}" if missing else "",
    )


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _examine_gpu(context: Context) -> Iterator[Finding]:
    spec = context.spec
    version = f"{spec.driver_version // 1000}.{spec.driver_version % 1000 // 10}"
    is_new = spec.driver_version >= WANTED_DRIVER
    yield Finding(
        name="driver",
        level="ok" if is_new else "problem",
        text=f"supports CUDA {version}",
        advice="" if is_new else "install a driver of release 580 or later (CUDA 13.0)",
    )
    major, minor = spec.compute_capability
    yield Finding(
        name="gpu",
        level="ok" if major >= 8 else "problem",
        text=f"{spec.name}, compute capability {major}.{minor}, {spec.num_multiprocessors} "
        f"multiprocessors, {context.free_bytes() >> 20} of {spec.total_bytes >> 20} MiB free",
        advice="" if major >= 8 else "the cuda engine needs compute capability 8.0 or later",
    )
    ordering = spec.gpu_direct_rdma_writes_ordering
    yield Finding(
        name="rdma ordering",
        level="ok" if ordering >= 100 else "notice",
        text=f"GPUDirectRDMAWritesOrdering is {ordering}",
        advice="" if ordering >= 100 else "the verbs transport will refuse to start; mapped works",
    )


def _examine_libraries() -> Iterator[Finding]:
    from blink_runtime.cublaslt import library_version

    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
        yield Finding(name="nvrtc", level="ok", text=f"{major}.{minor}")
    except (ImportError, RuntimeError) as error:
        yield Finding(
            name="nvrtc", level="notice", text=str(error), advice="pip install nvidia-cuda-nvrtc"
        )
    try:
        yield Finding(name="cublaslt", level="ok", text=str(library_version()))
    except BlinkError as error:
        yield Finding(name="cublaslt", level="problem", text=error.message, advice=error.hint)


def _examine_sharing(context: Context) -> Iterator[Finding]:
    is_slice = "MIG" in context.spec.name
    yield Finding(
        name="mig",
        level="notice" if is_slice else "ok",
        text=f"this is {context.spec.name}" if is_slice else "the whole GPU",
        advice="fewer multiprocessors: compile with a smaller --memory-budget" if is_slice else "",
    )
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if os.path.exists(os.path.join(pipe, "control")):
        yield Finding(
            name="mps",
            level="notice",
            text="a Multi-Process Service is running",
            advice="stop it: a resident scheduler shares the GPU badly with other processes",
        )
    else:
        yield Finding(name="mps", level="ok", text="not running")


def _examine_launch(context: Context) -> Finding:
    """Run graphs that launch graphs: a tail relaunch, and a full window of launches beside."""
    from blink_runtime.cuda_driver import Module
    from blink_runtime.device_launch import NUM_BESIDE, NUM_RELAUNCHES, check_launches
    from blinkc.codegen.compile_cuda import compile_cuda
    from blinkc.resources import templates_folder

    source = (templates_folder() / "doctor.cu").read_text(encoding="utf-8")
    try:
        image = compile_cuda({"doctor.cu": source}, context.spec.target)
    except BlinkError as error:
        return Finding(
            name="device launch",
            level="notice",
            text=f"not tested: {error.message.splitlines()[0]}",
            advice="pip install 'blinkc[cuda]' to test here; `run` tests it with the bundle's code",
        )
    try:
        microseconds = check_launches(Module(image, "doctor"))
    except BlinkError as error:
        return Finding(
            name="device launch",
            level="problem",
            text=error.message,
            advice="`run` takes the host placement on this machine; update the driver",
        )
    return Finding(
        name="device launch",
        level="ok",
        text=f"{NUM_RELAUNCHES} tail relaunches, {microseconds:.1f} us each; "
        f"{NUM_BESIDE} launches beside one graph",
    )


def print_findings(say: Callable[[str], None] = print) -> int:
    """Print one line for each finding; return 1 where something is a problem."""
    worst = 0
    for finding in examine():
        advice = f" -> {finding.advice}" if finding.advice else ""
        say(f"{finding.level:<8} {finding.name}: {finding.text}{advice}")
        worst = max(worst, finding.level == "problem")
    return int(worst)
