"""The GPU target: compiled files and weights -> captured graphs and a scheduler that serves a ring
by itself.

Order: modules, memory, algorithms, graphs, tables, scheduler. Everything is loaded before the
scheduler starts: afterwards no call may wait for the device (design: lazy loading, cudaFree and
default- stream copies can wait for ever beside a kernel that does not end).
"""

from __future__ import annotations

import os
import threading
import time
from ctypes import c_uint32, c_uint64
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from blink_runtime.cublaslt import CublasLt
from blink_runtime.cuda_driver import Context, DeviceBuffer, MappedBuffer, Module, Stream
from blink_runtime.cuda_graphs import Capture, GraphExec, Launch, launch
from blink_runtime.cuda_kernels import CudaKernels
from blink_runtime.cuda_steps import CudaSteps, ModelAddresses, pack_weights
from blink_runtime.host_placement import HostPlacement
from blink_runtime.step_buffers import StepBuffers
from blink_runtime.tensorrt_engines import TensorRtEngines
from blinkc.closing import Closing
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from blinkc.capture.grid import GraphKey
    from blinkc.capture.plan import CapturePlan
    from blinkc.engine.tensorrt_api import TensorRtApi

PLACEMENTS = ("chained", "persistent", "host")
SCHEDULER_THREADS = 256  # TEAM_THREADS of blinkc.codegen.render_scheduler
_INITIALIZE_ERRORS = (  # InitializeError of initialize.cuh
    "no error",
    "the ring's magic, version or sizes are not those of this scheduler",
    "the ring's memory is smaller than its header says",
    "the scheduler's memory is smaller than its state",
    "step buffers and ring disagree on the number of lanes or the page size",
    "the graph table lacks a key for a full step",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaFiles:
    """What the compiler made for a GPU."""

    kernels: bytes  # cubin
    scheduler: bytes  # cubin, linked with the device runtime
    launches: dict[str, Any]
    algorithms: dict[str, list[int]] = field(default_factory=dict)
    plans: dict[str, bytes] = field(default_factory=dict)  # TensorRT's, by the launch list's names
    tensorrt: TensorRtApi | None = None  # that the plans were checked against


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Seconds and bytes of a load, for the log and for benchmarks."""

    modules_s: float
    weights_s: float
    tune_s: float
    graphs_s: float
    num_graphs: int
    num_nodes: int
    graph_bytes: int
    num_measured: int


class CudaTarget(Closing):
    """A model on the GPU.

    Args:
        files: compiled modules and the launch list.
        plan: keys and limits they were compiled for.
        ring_address: device address of the ring.
        fill_weights: puts every weight at its address; gets the target.
        placement: one of `PLACEMENTS`; "none" captures graphs without a scheduler, for benchmarks.
        only_keys: capture these alone; a step that wants another one fails. Default: all.

    Raises:
        BlinkError: the GPU does not fit, memory runs out, or a graph cannot be instantiated.
    """

    def __init__(
        self,
        *,
        files: CudaFiles,
        plan: CapturePlan,
        ring_address: int,
        ring_bytes: int,
        fill_weights: Callable[[CudaTarget], None],
        placement: str = "chained",
        context: Context | None = None,
        progress: Callable[[str], None] = lambda text: None,
        only_keys: Collection[GraphKey] | None = None,
    ) -> None:
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        self.plan = plan
        self.placement = placement
        self.context = context or Context()
        self._check_gpu()
        started = time.monotonic()
        self.stream = Stream()
        self.kernels_module = Module(files.kernels, "kernels")
        self.scheduler_module = (
            Module(files.scheduler, "scheduler") if placement != "none" else None
        )
        modules_s = time.monotonic() - started
        self._buffers: list[DeviceBuffer | MappedBuffer] = []
        self.step = StepBuffers(
            max_step_tokens=plan.max_step_tokens,
            max_batch=plan.max_batch,
            max_pages_per_lane=plan.max_pages_per_lane,
            page_size_tokens=plan.page_size_tokens,
            has_logprobs=plan.has_logprobs,
        )
        self.kernels = CudaKernels(self.kernels_module, self.context.spec)
        # Where plans do all products, cuBLASLt need not be installed.
        has_products = any(step["op"] == "gemm" for step in files.launches["steps"])
        self.products = CublasLt(files.algorithms) if has_products else None
        started = time.monotonic()
        self.addresses = self._allocate(files.launches)
        self.launches = files.launches
        fill_weights(self)
        self.context.synchronize()
        weights_s = time.monotonic() - started
        self.engines = self._load_engines(files, progress)
        self.steps = CudaSteps(
            files.launches,
            self.kernels,
            self.products,
            self.addresses,
            self.step.addresses,
            plan.keys,
            self.engines,
        )
        started = time.monotonic()
        self._wanted = set(plan.keys if only_keys is None else only_keys)
        for key in plan.keys:
            if key in self._wanted:
                self.steps.tune(key, self.stream)
        self.stream.synchronize()
        tune_s = time.monotonic() - started
        self._state: DeviceBuffer | None = None
        if placement != "none":
            self._state = self._allocate_state()
        started = time.monotonic()
        free_before = self.context.free_bytes()
        self._num_nodes = 0
        self.execs: list[GraphExec] = []
        self._capture_all(progress)
        self.stream.synchronize()
        self.report = LoadReport(
            modules_s=modules_s,
            weights_s=weights_s,
            tune_s=tune_s,
            graphs_s=time.monotonic() - started,
            num_graphs=len(self.execs),
            num_nodes=self._num_nodes,
            graph_bytes=free_before - self.context.free_bytes(),
            num_measured=self.products.num_measured if self.products else 0,
        )
        self._host: HostPlacement | None = None
        self._mailbox: MappedBuffer | None = None
        if placement != "none":
            self._initialize(ring_address, ring_bytes)

    def _load_engines(
        self, files: CudaFiles, progress: Callable[[str], None]
    ) -> TensorRtEngines | None:
        entries = files.launches.get("engines")
        if not entries:
            return None
        assert files.tensorrt is not None, "plans come with the TensorRT that they are for"
        return TensorRtEngines(files.tensorrt, entries, files.plans, progress)

    def _check_gpu(self) -> None:
        spec = self.context.spec
        targets = self.plan.target.split(",")
        if spec.target not in targets and spec.target + "a" not in targets:
            raise BlinkError(
                f"the model was compiled for {self.plan.target}, "
                f"this GPU ({spec.name}) is {spec.target}",
                hint=f"blinkc compile ... --target {spec.target}",
            )

    def _allocate(self, launches: dict[str, Any]) -> ModelAddresses:
        plan = self.plan
        offsets, weight_bytes = pack_weights(launches)
        width = 2
        kv_bytes = [
            plan.num_physical_pages * 2 * heads * plan.page_size_tokens * dim * width
            for heads, dim in launches["kv_layers"]
        ]
        wanted = weight_bytes + sum(kv_bytes) + launches["arena_bytes"]
        if wanted > self.context.free_bytes():
            raise BlinkError(
                f"weights, KV cache and arena want {wanted >> 20} MiB, "
                f"{self.context.free_bytes() >> 20} MiB are free on the GPU",
                hint="give --num-kv-pages, or free the GPU",
            )
        weights = self._weights = self._new(weight_bytes, "weights")
        kv = [self._new(size, "the KV cache") for size in kv_bytes]
        for buffer in kv:
            buffer.fill(0)
        arena = self._new(launches["arena_bytes"], "the arena")
        arena.fill(0)
        return ModelAddresses(
            arena=arena.address,
            weights=tuple(weights.address + offset for offset in offsets),
            kv_layers=tuple(buffer.address for buffer in kv),
        )

    def clear_weights(self) -> None:
        """Make every weight zero: enough to measure with."""
        self._weights.fill(0)

    def _new(self, num_bytes: int, what: str) -> DeviceBuffer:
        buffer = DeviceBuffer(num_bytes, what)
        self._buffers.append(buffer)
        return buffer

    def _scheduler_launch(self, name: str, *args: Any) -> Launch:
        assert self.scheduler_module is not None
        function = self.scheduler_module.function(name)
        return Launch(function, (1, 1, 1), SCHEDULER_THREADS, 0, args, early=False)

    def _allocate_state(self) -> DeviceBuffer:
        assert self.scheduler_module is not None
        size = self.scheduler_module.read_uint64("blink_scheduler_state_bytes")
        return self._new(size, "the scheduler's state")

    def _capture(self, enqueue: Callable[[], None], name: str) -> GraphExec:
        """Capture what `enqueue` puts into the stream; instantiate, for device launch if so."""
        with Capture(self.stream) as capture:
            enqueue()
        graph = capture.graph
        assert graph is not None
        self._num_nodes += graph.num_nodes()
        made = GraphExec(
            graph, device_launch=self.placement in ("chained", "persistent"), name=name
        )
        graph.close()
        made.upload(self.stream)
        return made

    def _enqueue_step(self, key: GraphKey) -> None:
        self.steps.enqueue(key, self.stream)
        if self.placement == "chained":
            assert self._state is not None
            launch(
                self._scheduler_launch("blink_scheduler_step", c_uint64(self._state.address)),
                self.stream,
            )

    def _capture_all(self, progress: Callable[[str], None]) -> None:
        copies = 2 if self.placement == "persistent" else 1
        self._table: list[int] = []
        for number, key in enumerate(self.plan.keys):
            if key not in self._wanted:
                self._table += [0, 0]
                continue
            name = f"{key.kind} {key.batch} x {key.seqlen}"
            self.steps.prepare(key, self.stream)
            enqueue = partial(self._enqueue_step, key)
            execs = [self._capture(enqueue, name) for _ in range(copies)]
            self.execs += execs
            self._table += [int(execs[0].handle), int(execs[-1].handle)]
            if number % 50 == 0:
                progress(f"captured {number} of {len(self.plan.keys)} graphs")
        self._resident: GraphExec | None = None
        kernel = {
            "chained": "blink_scheduler_idle",
            "persistent": "blink_scheduler_persistent",
        }.get(self.placement)
        if kernel is not None:
            assert self._state is not None
            item = self._scheduler_launch(kernel, c_uint64(self._state.address))
            self._resident = self._capture(lambda: launch(item, self.stream), kernel)
        self._table.append(int(self._resident.handle) if self._resident else 0)

    def _initialize(self, ring_address: int, ring_bytes: int) -> None:
        """Bring up the scheduler's state in device memory."""
        import struct

        assert self._state is not None
        table = self._new(len(self._table) * 8, "the table of graphs")
        table.write(struct.pack(f"{len(self._table)}Q", *self._table))
        self._mailbox = MappedBuffer(64, "the mailbox")
        error = self._new(16, "an error word")
        error.fill(0xFF)
        packed = self.step.packed()
        buffers = (c_uint64 * (len(packed) // 8)).from_buffer_copy(packed)
        init = self._scheduler_launch(
            "blink_scheduler_init",
            c_uint64(self._state.address),
            c_uint64(self._state.num_bytes),
            c_uint64(ring_address),
            c_uint64(ring_bytes),
            buffers,
            c_uint64(table.address),
            c_uint64(self._mailbox.address),
            c_uint64(error.address),
        )
        launch(init, self.stream)
        self.stream.synchronize()
        code = int.from_bytes(error.read(4), "little")
        if code != 0:
            text = _INITIALIZE_ERRORS[code] if code < len(_INITIALIZE_ERRORS) else f"error {code}"
            raise BlinkError(f"the scheduler does not start: {text}")

    def start(self) -> None:
        """Start the scheduler; with `chained` and `persistent` the host is out of it from here."""
        if self._resident is not None:
            self._resident.launch(self.stream)
        elif self.placement == "host":
            assert self._state is not None and self._mailbox is not None
            step = self._scheduler_launch(
                "blink_scheduler_host_step", c_uint64(self._state.address), c_uint32(0)
            )
            self._host = HostPlacement(step, self.execs, self._mailbox, self.stream)
            self._host.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until the scheduler has returned (the ring's stop word was set); True if it did in
        time."""
        if self._host is not None:
            return self._host.join(timeout_s)
        done = threading.Event()

        def wait() -> None:
            self.context.make_current()
            self.stream.synchronize()
            done.set()

        threading.Thread(target=wait, name="blink-join", daemon=True).start()
        return done.wait(timeout_s)

    def close(self) -> None:
        """Free everything; the ring must have been told to stop."""
        if not self.join(5.0):
            raise BlinkError("the GPU's scheduler did not stop within 5 s of the ring's stop word")
        self._host = None  # its native object ends here, not with the interpreter
        for made in self.execs:
            made.close()
        self.execs.clear()
        if self._resident is not None:
            self._resident.close()
        self.steps.close()
        if self.engines is not None:
            self.engines.close()
        if self.products is not None:
            self.products.close()
        self.step.close()
        if self._mailbox is not None:
            self._mailbox.close()
        while self._buffers:
            self._buffers.pop().close()
        self.kernels_module.close()
        if self.scheduler_module is not None:
            self.scheduler_module.close()
        self.stream.close()


def random_weights(seed: int) -> Callable[[CudaTarget], None]:
    """Return a filler that makes every weight on the GPU: vectors near 1, matrices scaled by their
    rows."""

    def fill(target: CudaTarget) -> None:
        for number, entry in enumerate(target.launches["weights"]):
            fill_random(target, number, entry, seed)

    return fill


def fill_random(target: CudaTarget, number: int, entry: dict[str, Any], seed: int) -> None:
    """Fill one weight of the model's dtype."""
    from ctypes import c_float

    count = 1
    for axis in entry["shape"]:
        count *= axis
    is_vector = len(entry["shape"]) == 1
    center = 1.0 if is_vector else 0.0
    scale = 0.05 if is_vector else (3.0 / entry["shape"][-1]) ** 0.5
    args = (
        c_uint64(target.addresses.weights[number]),
        c_uint64(count),
        c_uint64((seed * 1_000_003 + number) * 0x9E3779B97F4A7C15 & (1 << 64) - 1),
        c_float(center),
        c_float(scale),
    )
    function = target.kernels.function("fill_random")
    launch(Launch(function, (1056, 1, 1), 256, 0, args, early=False), target.stream)
