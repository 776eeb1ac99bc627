"""The device launch self-test: a module with its kernels -> seconds a relaunch takes, or an error.

The kernels are those of `launch_test.cuh`; every bundle's scheduler holds them, so that a loader
needs no compiler. A driver where launches from the GPU do nothing must not serve.
"""

from __future__ import annotations

import struct
import time
from ctypes import c_uint64
from typing import TYPE_CHECKING

from blink_runtime.cuda_driver import DeviceBuffer, Stream
from blink_runtime.cuda_graphs import Capture, GraphExec, Launch, launch
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blink_runtime.cuda_driver import Module

NUM_RELAUNCHES = 1000
NUM_BESIDE = 120  # fire-and-forget launches that one execution of a graph may make
_TIMEOUT_S = 5.0
_STATE_BYTES = 16  # LaunchTest of launch_test.cuh: runs, target, error, reserved


def check_launches(module: Module) -> float:
    """Relaunch a graph behind itself, then launch two others beside one, a full window.

    Returns:
        The microseconds of one relaunch.

    Raises:
        BlinkError: a graph cannot be instantiated or launched, or did not come to its end.
    """
    test = _LaunchTest(module)
    try:
        return test.run()
    finally:
        test.close()


class _LaunchTest:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._stream = Stream()
        self._state = DeviceBuffer(_STATE_BYTES, "the launch test")
        self._children = DeviceBuffer(16, "the launch test")
        self._graphs: list[GraphExec] = []

    def run(self) -> float:
        address = c_uint64(self._state.address)
        seconds = self._play(self._graph("blink_test_relaunch", address), NUM_RELAUNCHES)
        children = [self._graph("blink_test_count", address) for _ in range(2)]
        self._children.write(struct.pack("2Q", *(int(child.handle) for child in children)))
        window = self._graph("blink_test_window", address, c_uint64(self._children.address))
        self._play(window, NUM_BESIDE)
        return seconds * 1e6 / NUM_RELAUNCHES

    def _graph(self, kernel: str, *args: c_uint64) -> GraphExec:
        item = Launch(self._module.function(kernel), (1, 1, 1), 1, 0, args, early=False)
        with Capture(self._stream) as capture:
            launch(item, self._stream)
        assert capture.graph is not None
        made = GraphExec(capture.graph, device_launch=True, name=kernel)
        self._graphs.append(made)
        capture.graph.close()
        made.upload(self._stream)
        self._stream.synchronize()
        return made

    def _play(self, graph: GraphExec, target: int) -> float:
        self._state.write(struct.pack("IIII", 0, target, 0, 0))
        started = time.perf_counter()
        graph.launch(self._stream)
        self._stream.synchronize()
        seconds = time.perf_counter() - started
        self._wait(graph.name, target)
        return seconds

    def _wait(self, name: str, target: int) -> None:
        """Launched graphs may end after the stream says that the first one has."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            runs, _, error, _ = struct.unpack("IIII", self._state.read(_STATE_BYTES))
            if error:
                raise BlinkError(f"{name}: CUDA error {error} after {runs} of {target} launches")
            if runs >= target:
                return
            if time.monotonic() > deadline:
                raise BlinkError(f"{name}: {runs} of {target} launches ran within {_TIMEOUT_S} s")
            time.sleep(0.001)

    def close(self) -> None:
        for graph in self._graphs:
            graph.close()
        self._children.close()
        self._state.close()
        self._stream.close()
