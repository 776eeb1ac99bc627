"""`blink-runtime doctor`: this machine -> one line for each thing a GPU target needs, and what to
do."""

from __future__ import annotations

import os
import struct
import time
from ctypes import c_int32, c_uint64
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from blink_runtime.cuda_driver import Context, Module, Stream
    from blink_runtime.cuda_graphs import GraphExec

MIN_DRIVER = (
    12040  # device-side graph launch with conditional-free relaunch; CUDA 13 kernels want 13000
)
WANTED_DRIVER = 13000
_RELAUNCHES = 1000
_WINDOW = 120
_TIMEOUT_S = 5.0


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

    try:
        context = Context()
    except BlinkError as error:
        yield Finding(name="driver", level="problem", text=error.message, advice=error.hint)
        return
    with context:
        yield from _examine_gpu(context)
        yield from _examine_libraries()
        yield from _examine_sharing()
        yield _examine_launch(context)


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


def _examine_sharing() -> Iterator[Finding]:
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
    """Run graphs that launch graphs: a tail relaunch, and a full window of fire-and-forget
    launches."""
    try:
        seconds = _LaunchTest(context).run()
    except BlinkError as error:
        return Finding(
            name="device launch",
            level="problem",
            text=error.message,
            advice="serve with --scheduler host on this machine",
        )
    return Finding(
        name="device launch",
        level="ok",
        text=f"{_RELAUNCHES} tail relaunches, {seconds * 1e6 / _RELAUNCHES:.1f} us each; "
        f"{_WINDOW} fire-and-forget launches",
    )


class _LaunchTest:
    def __init__(self, context: Context) -> None:
        from blink_runtime.cuda_driver import DeviceBuffer, Module, Stream
        from blinkc.codegen.compile_cuda import compile_cuda
        from blinkc.resources import templates_folder

        source = (templates_folder() / "doctor.cu").read_text(encoding="utf-8")
        architecture = context.spec.target
        self._module: Module = Module(compile_cuda({"doctor.cu": source}, architecture), "doctor")
        self._stream: Stream = Stream()
        self._state = DeviceBuffer(16, "the launch test")

    def run(self) -> float:
        """Return the seconds of `_RELAUNCHES` relaunches.

        Raises:
            BlinkError: a launch failed, or graphs did not come to their end.
        """
        from blink_runtime.cuda_driver import DeviceBuffer

        address = c_uint64(self._state.address)
        resident = self._graph("relaunch_self", address)
        seconds = self._play(resident, _RELAUNCHES, "tail relaunch")
        children = [self._graph("count_run", address) for _ in range(2)]
        table = DeviceBuffer(16, "the launch test")
        table.write(struct.pack("2Q", *(int(child.handle) for child in children)))
        window = self._graph("launch_window", address, c_uint64(table.address), c_int32(2))
        self._play(window, _WINDOW, "fire-and-forget launch")
        return seconds

    def _graph(self, kernel: str, *args: c_uint64 | c_int32) -> GraphExec:
        from blink_runtime.cuda_graphs import Capture, GraphExec, Launch, launch

        function = self._module.function(kernel)
        with Capture(self._stream) as capture:
            launch(Launch(function, (1, 1, 1), 1, 0, args, early=False), self._stream)
        assert capture.graph is not None
        made = GraphExec(capture.graph, device_launch=True, name=kernel)
        made.upload(self._stream)
        self._stream.synchronize()
        return made

    def _play(self, graph: GraphExec, target: int, what: str) -> float:
        self._state.write(struct.pack("IIII", 0, target, 0, 0))
        started = time.perf_counter()
        graph.launch(self._stream)
        self._stream.synchronize()
        seconds = time.perf_counter() - started
        return seconds if self._wait(target, what) else 0.0

    def _wait(self, target: int, what: str) -> bool:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            runs, _, error, _ = struct.unpack("IIII", self._state.read(16))
            if error:
                raise BlinkError(f"{what} failed with CUDA error {error} after {runs} runs")
            if runs >= target:
                return True
            if time.monotonic() > deadline:
                raise BlinkError(f"{what}: {runs} of {target} runs within {_TIMEOUT_S:.0f} s")
            time.sleep(0.001)


def print_findings(say: Callable[[str], None] = print) -> int:
    """Print one line for each finding; return 1 where something is a problem."""
    worst = 0
    for finding in examine():
        advice = f" -> {finding.advice}" if finding.advice else ""
        say(f"{finding.level:<8} {finding.name}: {finding.text}{advice}")
        worst = max(worst, finding.level == "problem")
    return int(worst)
