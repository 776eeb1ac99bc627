"""Kernel launches, captured graphs and their execs, over cuda_driver's checked calls."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blink_runtime.cuda_driver import check, driver
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from types import TracebackType

    from blink_runtime.cuda_driver import Function, Stream


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: what to run, over what, with which arguments (ctypes scalars)."""

    function: Function
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    args: tuple[Any, ...]
    early: bool = True  # programmatic dependent launch


def launch(item: Launch, stream: Stream) -> None:
    """Put a kernel into a stream (or the graph being captured from it)."""
    cu = driver()
    item.function.allow_shared(item.shared_bytes)
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = item.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = item.block, 1, 1
    config.sharedMemBytes = item.shared_bytes
    config.hStream = stream.handle
    if item.early:
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    pointers = (ctypes.c_void_p * max(len(item.args), 1))(
        *(ctypes.addressof(arg) for arg in item.args)
    )
    check(
        cu.cuLaunchKernelEx(config, item.function.handle, ctypes.addressof(pointers), 0),
        f"launching kernel {item.function.name} over grid {item.grid}",
    )


class Graph:
    """A captured graph, not yet executable."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def num_nodes(self) -> int:
        """Count the nodes."""
        return int(check(driver().cuGraphGetNodes(self.handle, 0), "counting nodes")[-1])

    def close(self) -> None:
        """Destroy the graph; execs made of it live on."""
        if self.handle is not None:
            driver().cuGraphDestroy(self.handle)
            self.handle = None


class Capture:
    """Records what is put into `stream` inside the `with` block; then `graph` holds it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.graph: Graph | None = None

    def __enter__(self) -> Capture:
        cu = driver()
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(self._stream.handle, mode), "beginning a capture")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        result = driver().cuStreamEndCapture(self._stream.handle)
        if error is None:
            self.graph = Graph(check(result, "ending a capture"))


class GraphExec:
    """An executable graph."""

    def __init__(self, graph: Graph, *, device_launch: bool, name: str) -> None:
        cu = driver()
        params = cu.CUDA_GRAPH_INSTANTIATE_PARAMS()
        if device_launch:
            params.flags = int(
                cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
            )
        result = cu.cuGraphInstantiateWithParams(graph.handle, params)
        if int(result[0]) != 0:
            reason = getattr(params.result_out, "name", params.result_out)
            raise BlinkError(
                f"graph {name} cannot be instantiated: {result[0].name}, {reason}, "
                f"at {describe_node(params.hErrNode_out)}"
            )
        self.handle = result[1]
        self.name = name

    def upload(self, stream: Stream) -> None:
        """Bring the exec to the GPU, so that a launch from there finds it."""
        check(driver().cuGraphUpload(self.handle, stream.handle), f"uploading graph {self.name}")

    def launch(self, stream: Stream) -> None:
        """Start it from the host."""
        check(driver().cuGraphLaunch(self.handle, stream.handle), f"launching graph {self.name}")

    def close(self) -> None:
        """Destroy it; it must not run."""
        if self.handle is not None:
            driver().cuGraphExecDestroy(self.handle)
            self.handle = None


def describe_node(node: Any) -> str:
    """Name a graph's node by its type and, for a kernel, the kernel's name."""
    cu = driver()
    code, kind = cu.cuGraphNodeGetType(node)
    if int(code) != 0:
        return "an unknown node"
    text = str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    if text == "kernel":
        code, params = cu.cuGraphKernelNodeGetParams(node)
        if int(code) == 0:
            code, name = cu.cuFuncGetName(params.func)
            if int(code) == 0:
                return f"kernel {name.decode() if isinstance(name, bytes) else name}"
    return f"a node of type {text}"
