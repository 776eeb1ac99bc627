"""The rendered scheduler on a GPU over a model of one kernel: plan + placement -> a served ring."""

from __future__ import annotations

import hashlib
import struct
from ctypes import c_uint32, c_uint64
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from blink_runtime.cuda_driver import DeviceBuffer, MappedBuffer, Module, Stream
from blink_runtime.cuda_graphs import Capture, GraphExec, Launch, launch
from blink_runtime.host_placement import HostPlacement
from blink_runtime.ring_memory import RingMemory
from blink_runtime.step_buffers import StepBuffers
from blinkc.capture.grid import GraphKey, build_grid
from blinkc.capture.plan import CapturePlan
from blinkc.codegen.compile_cuda import compile_cuda
from blinkc.codegen.render_scheduler import TEAM_THREADS, render_scheduler
from blinkc.resources import include_folder
from tests.codegen.plans import make_plan

CUBIN_CACHE = Path(__file__).parents[2] / ".cache" / "cubins"
MODEL_SOURCE = """
#include "blink/abi.hpp"
#include "blink/device/memory_order.cuh"
#include "blink/step.h"

constexpr uint64_t kHangSeed = 0xDEAD0001;   // a kernel that never ends
constexpr uint64_t kFaultSeed = 0xDEAD0002;  // a kernel that writes where nothing is

// Kernels that a bigger model would have before the one that samples.
extern "C" __global__ void fake_layer(uint32_t* counter) { atomicAdd(counter, 1u); }

// The next token is a hash of seed, index and last token.
extern "C" __global__ void fake_step(blink_step_buffers step, uint32_t vocab_size) {
  for (uint32_t row = threadIdx.x; row < step.state->num_rows; row += blockDim.x) {
    const blink_sampling_params& params = step.sampling[row];
    if ((params.flags & BLINK_SAMPLE_ENABLED) == 0) continue;
    while (params.seed == kHangSeed && *(volatile uint64_t*)&params.seed == kHangSeed) {
    }
    if (params.seed == kFaultSeed) *(volatile uint32_t*)64 = 1;
    const uint32_t last = step.input_ids[step.sample_token[row]];
    const uint64_t hash = blink::mix64(blink::mix64(params.seed + params.token_index) + last);
    step.sampled_ids[row] = static_cast<int32_t>(hash % vocab_size);
  }
  __syncthreads();
  if (threadIdx.x == 0) blink::store_release(&step.state->completion, step.state->launch);
}
"""
HANG_SEED, FAULT_SEED = 0xDEAD0001, 0xDEAD0002
_MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    """The finalizer of splitmix64, as in blink/abi.hpp."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def expected_tokens(seed: int, prompt: list[int], count: int, vocab_size: int) -> list[int]:
    """What `fake_step` says to a request."""
    tokens: list[int] = []
    last = prompt[-1]
    for index in range(count):
        last = mix64((mix64(seed + index) + last) & _MASK) % vocab_size
        tokens.append(last)
    return tokens


def gpu_plan(**changes: Any) -> CapturePlan:
    """A plan with small prefill and decode grids, for `max_batch` lanes and `max_seqlen` tokens."""
    max_batch = changes.get("max_batch", 8)
    max_seqlen = changes.get("max_seqlen", 1024)
    prefill = tuple(GraphKey("prefill", batch, seqlen) for batch in (1, 2) for seqlen in (64, 256))
    batches = sorted({1, 2, max_batch})
    decode = tuple(
        GraphKey("decode", batch, seqlen)
        for batch in batches
        for seqlen in sorted({256, max_seqlen})
    )
    values: dict[str, Any] = {
        "target": "sm_90",
        "keys": prefill + decode,
        "prefill": build_grid("prefill", prefill, 0),
        "decode": build_grid("decode", decode, len(prefill)),
        "max_batch": max_batch,
        "max_seqlen": max_seqlen,
        "max_prefill_tokens": 256,
        "page_size_tokens": 16,
        "max_pages_per_lane": -(-max_seqlen // 16),
        "num_kv_pages": max_batch * -(-max_seqlen // 16),
        "num_slots": 64,
        "max_prompt_tokens": min(max_seqlen, 1024),
        "max_output_tokens": max_seqlen,
        "trace_capacity": 4096,
        "vocab_size": 50000,
    }
    return replace(make_plan(), **{**values, **changes})


def _cached_cubin(sources: dict[str, str]) -> bytes:
    """Compile, or take what an earlier run compiled of the same sources and headers."""
    digest = hashlib.sha256(repr(sorted(sources.items())).encode())
    blink = include_folder() / "blink"
    for header in sorted([*blink.glob("*.h*"), *(blink / "device").glob("*.cuh")]):
        digest.update(header.read_bytes())
    path = CUBIN_CACHE / f"{digest.hexdigest()[:32]}.cubin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compile_cuda(sources, "sm_90a"))
    return path.read_bytes()


def compile_all(plan: CapturePlan) -> tuple[bytes, bytes]:
    """Return the cubins of scheduler and model."""
    return _cached_cubin(render_scheduler(plan, plan.target)), _cached_cubin(
        {"fake_model.cu": MODEL_SOURCE}
    )


class FakeTarget:
    """Everything between `blink_scheduler_init` and the ring's stop word, for one placement.

    Args:
        num_layers: small kernels before the one that samples.
    """

    def __init__(self, plan: CapturePlan, placement: str, *, num_layers: int = 0) -> None:
        scheduler, model = compile_all(plan)
        self._num_layers = num_layers
        self.plan, self.placement = plan, placement
        self.scheduler = Module(scheduler, "scheduler")
        self.model = Module(model, "fake model")
        self.stream = Stream()
        self.ring = RingMemory(plan, lambda size: MappedBuffer(size, "the ring"))
        self.step = StepBuffers(
            max_step_tokens=plan.max_step_tokens,
            max_batch=plan.max_batch,
            max_pages_per_lane=plan.max_pages_per_lane,
            page_size_tokens=plan.page_size_tokens,
        )
        packed = self.step.packed()
        self._buffers = (c_uint64 * (len(packed) // 8)).from_buffer_copy(packed)
        size = self.scheduler.read_uint64("blink_scheduler_state_bytes")
        self.state = DeviceBuffer(size, "the scheduler's state")
        self.state.fill(0xCD)
        self.mailbox = MappedBuffer(64, "the mailbox")
        self.counter = DeviceBuffer(16, "a counter")
        self.execs = [
            self._capture([*self._model_launches(), *self._last_node()], str(key))
            for key in plan.keys
        ]
        self._second = (
            [self._capture(self._model_launches(), str(key)) for key in plan.keys]
            if placement == "persistent"
            else self.execs
        )
        self.resident = self._capture_resident()
        self.table = DeviceBuffer(8 * (2 * len(plan.keys) + 1), "the table of graphs")
        self._write_table(broken_key=None)
        self._initialize()
        self._host: HostPlacement | None = None

    def _kernel(self, name: str, *args: Any) -> Launch:
        function = self.scheduler.function(name)
        return Launch(function, (1, 1, 1), TEAM_THREADS, 0, args, early=False)

    def _model_launches(self) -> list[Launch]:
        layer = self.model.function("fake_layer")
        counter = (c_uint64(self.counter.address),)
        layers = [Launch(layer, (1, 1, 1), 32, 0, counter, early=False)] * self._num_layers
        args = (self._buffers, c_uint32(self.plan.vocab_size))
        step = self.model.function("fake_step")
        return [*layers, Launch(step, (1, 1, 1), 64, 0, args, early=False)]

    def _last_node(self) -> list[Launch]:
        if self.placement != "chained":
            return []
        return [self._kernel("blink_scheduler_step", c_uint64(self.state.address))]

    def _capture(self, items: list[Launch], name: str) -> GraphExec:
        with Capture(self.stream) as capture:
            for item in items:
                launch(item, self.stream)
        assert capture.graph is not None
        made = GraphExec(capture.graph, device_launch=self.placement != "host", name=name)
        made.upload(self.stream)
        self.stream.synchronize()
        return made

    def _capture_resident(self) -> GraphExec | None:
        kernels = {"chained": "blink_scheduler_idle", "persistent": "blink_scheduler_persistent"}
        if self.placement not in kernels:
            return None
        name = kernels[self.placement]
        return self._capture([self._kernel(name, c_uint64(self.state.address))], name)

    def _write_table(self, *, broken_key: int | None) -> None:
        handles: list[int] = []
        for number, (first, second) in enumerate(zip(self.execs, self._second, strict=True)):
            is_broken = number == broken_key
            handles += [0, 0] if is_broken else [int(first.handle), int(second.handle)]
        handles.append(int(self.resident.handle) if self.resident else 0)
        self.table.write(struct.pack(f"{len(handles)}Q", *handles))

    def break_key(self, key_index: int) -> None:
        """Make every device launch of a key fail. Before `start`."""
        self._write_table(broken_key=key_index)

    def _initialize(self) -> None:
        error = DeviceBuffer(16, "an error word")
        error.fill(0xFF)
        launch(
            self._kernel(
                "blink_scheduler_init",
                c_uint64(self.state.address),
                c_uint64(self.state.num_bytes),
                c_uint64(self.ring.memory.address),
                c_uint64(self.ring.memory.num_bytes),
                self._buffers,
                c_uint64(self.table.address),
                c_uint64(self.mailbox.address),
                c_uint64(error.address),
            ),
            self.stream,
        )
        self.stream.synchronize()
        assert int.from_bytes(error.read(4), "little") == 0
        error.close()

    def start(self) -> None:
        """Let the scheduler run."""
        if self.resident is not None:
            self.resident.launch(self.stream)
            return
        step = self._kernel("blink_scheduler_host_step", c_uint64(self.state.address), c_uint32(0))
        self._host = HostPlacement(step, self.execs, self.mailbox, self.stream)
        self._host.start()

    def stop(self) -> None:
        """Set the stop word and wait for the scheduler's end."""
        self.ring.stop()
        if self._host is not None:
            assert self._host.join(10), "the host placement does not stop"
        self.stream.synchronize()
        assert self.ring.header.stopped == 1

    def release(self, slot: int) -> None:
        """Give a finished slot back."""
        self.ring._command(slot, self.ring.word(slot)[0], "RELEASE")

    def __enter__(self) -> FakeTarget:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.ring.header.stopped:
            self.stop()
        for made in {id(e): e for e in (*self.execs, *self._second)}.values():
            made.close()
        if self.resident is not None:
            self.resident.close()
        for owned in (
            self.table,
            self.mailbox,
            self.counter,
            self.state,
            self.step,
            self.ring.memory,
        ):
            owned.close()
        self.scheduler.close()
        self.model.close()
        self.stream.close()
