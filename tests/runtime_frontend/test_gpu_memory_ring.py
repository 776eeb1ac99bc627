"""A ring in GPU memory, with a GPU that is none: mocked driver calls and a CPU scheduler.

The mocked device's addresses lead nowhere in this process, so that a plain load of the ring ends
the test. Nothing here ran on a GPU or an RDMA card.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

_native = pytest.importorskip("blink_runtime._native", reason="the native module is not built")

from blink_runtime import (  # noqa: E402
    cuda_driver,
    gpu_dmabuf,
    gpu_memory_ring,
    serve_roles,
)
from blink_runtime.cuda_driver import DeviceSpec  # noqa: E402
from blink_runtime.gpu_memory_ring import GpuMemoryRing  # noqa: E402
from blink_runtime.serve import ring_sizes  # noqa: E402
from blink_runtime.serve_config import ServeConfig  # noqa: E402
from blink_runtime.serve_roles import LinkConfig, serve_gpu  # noqa: E402
from blinkc import abi  # noqa: E402
from blinkc.bundle.manifest import (  # noqa: E402
    MANIFEST_NAME,
    Golden,
    Limits,
    manifest_to_bytes,
)
from blinkc.codegen.compile_cpu import compile_cpu  # noqa: E402
from blinkc.codegen.render_scheduler import render_scheduler  # noqa: E402
from blinkc.errors import BlinkError  # noqa: E402
from tests.bundle.small_bundle import write_small_bundle  # noqa: E402
from tests.codegen.cpu_scheduler import CpuScheduler  # noqa: E402
from tests.codegen.plans import make_plan  # noqa: E402

PAGE = os.sysconf("SC_PAGE_SIZE")
LIMITS = Limits(**{name: getattr(make_plan(), name) for name in Limits.model_fields})
DEADLINE_S = 300


class FakeGpu:
    """The driver's calls over memory of this process; copies happen when a stream is waited for."""

    OFFSET = 1 << 60  # of device addresses: no process has memory there
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE = 2, 1
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUmemRangeHandleType = SimpleNamespace(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD=1)

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}  # by device address
        self.pinned: dict[int, Any] = {}
        self.streams: dict[int, list[tuple[int, int, int]]] = {}
        self.exports: list[tuple[int, int, int]] = []
        self.is_dead = False

    def cuMemAlloc(self, num_bytes: int) -> tuple[int, int]:
        buffer = ctypes.create_string_buffer(b"\xaa" * num_bytes, num_bytes)
        address = ctypes.addressof(buffer) + self.OFFSET
        self.memory[address] = buffer
        return 0, address

    def cuMemFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    def cuMemsetD8(self, address: int, byte: int, num_bytes: int) -> tuple[int]:
        ctypes.memset(self.real(address, num_bytes), byte, num_bytes)
        return (0,)

    def cuMemHostAlloc(self, num_bytes: int, flags: int) -> tuple[int, int]:
        buffer = ctypes.create_string_buffer(num_bytes)
        self.pinned[ctypes.addressof(buffer)] = buffer
        return 0, ctypes.addressof(buffer)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return 0, address + self.OFFSET

    def cuMemFreeHost(self, address: int) -> tuple[int]:
        del self.pinned[address]
        return (0,)

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:
        assert flags == 1, "a stream that waits for the default one waits for the scheduler"
        handle = len(self.streams) + 1
        self.streams[handle] = []
        return 0, handle

    def cuStreamDestroy(self, handle: int) -> tuple[int]:
        assert self.streams.pop(handle) == []
        return (0,)

    def cuMemcpyHtoDAsync(self, to: int, source: int, count: int, stream: int) -> tuple[int]:
        self.streams[stream].append((self.real(to, count), source, count))
        return (0,)

    def cuMemcpyDtoHAsync(self, to: int, source: int, count: int, stream: int) -> tuple[int]:
        self.streams[stream].append((to, self.real(source, count), count))
        return (0,)

    def cuStreamSynchronize(self, handle: int) -> tuple[int]:
        if self.is_dead:
            self.streams[handle].clear()
            return (700,)
        for to, source, count in self.streams[handle]:
            ctypes.memmove(to, source, count)
        self.streams[handle].clear()
        return (0,)

    def cuMemGetHandleForAddressRange(
        self, address: int, num_bytes: int, kind: int, flags: int
    ) -> tuple[int, int]:
        self.real(address, num_bytes)
        self.exports.append((address, num_bytes, kind))
        return 0, os.memfd_create("gpu")

    def real(self, address: int, num_bytes: int) -> int:
        """Return where a range of device memory lies in this process; it must be allocated."""
        for start, buffer in self.memory.items():
            if start <= address and address + num_bytes <= start + len(buffer):
                return address - self.OFFSET
        raise AssertionError(f"{num_bytes} bytes at {address:#x} are no device memory")


class FakeContext:
    """A context of a GPU whose memory a card may write in order."""

    def __init__(self, ordering: int = 100) -> None:
        self.spec = DeviceSpec(
            name="GPU",
            compute_capability=(9, 0),
            num_multiprocessors=132,
            total_bytes=1 << 37,
            driver_version=13000,
            gpu_direct_rdma_writes_ordering=ordering,
        )

    def __enter__(self) -> FakeContext:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def make_current(self) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    for module in (cuda_driver, gpu_dmabuf, gpu_memory_ring):
        monkeypatch.setattr(module, "driver", lambda: fake)
    return fake


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("scheduler") / "target.so"
    compile_cpu(render_scheduler(make_plan(), "cpu"), out=out)
    return ctypes.CDLL(str(out))


def make_ring(context: FakeContext, notice: Callable[[str], None] = print) -> GpuMemoryRing:
    manifest: Any = SimpleNamespace(limits=LIMITS)
    given: Any = context
    return GpuMemoryRing(given, ring_sizes(manifest), 0x1234, notice)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.005)


def test_the_ring_is_laid_out_and_exported(gpu: FakeGpu) -> None:
    """Guards memory that is not zeroed, and pages given to a card that hold something else too."""
    ring = make_ring(FakeContext())
    content = ring.memory.read(0, ring.num_bytes)
    header = abi.structs()["blink_ring_header"].from_buffer_copy(content)
    assert content[: len(ring.header)] == ring.header
    assert (header.magic, header.bundle_id) == (abi.constants()["BLINK_MAGIC"], 0x1234)
    assert header.ring_bytes == ring.num_bytes
    assert not any(content[len(ring.header) :])
    ((address, num_bytes, kind),) = gpu.exports
    assert address % PAGE == 0 and num_bytes % PAGE == 0 and kind == 1
    assert ring.exported.offset == ring.address - address
    assert ring.exported.offset + ring.num_bytes <= num_bytes
    ring.close()
    assert (gpu.memory, gpu.pinned, gpu.streams, ring.exported.fd) == ({}, {}, {}, -1)


def test_memory_that_no_card_may_have(gpu: FakeGpu) -> None:
    with pytest.raises(BlinkError, match="GPUDirectRDMAWritesOrdering is 0"):
        make_ring(FakeContext(ordering=0))
    assert (gpu.memory, gpu.pinned, gpu.streams, gpu.exports) == ({}, {}, {}, [])


def test_the_mirror_follows_the_header_and_stands_still_with_the_gpu(gpu: FakeGpu) -> None:
    """The watchdog looks at the mirror: a GPU that does not answer must look like a dead one."""
    said: list[str] = []
    ring = make_ring(FakeContext(), said.append)
    beat = ctypes.c_uint64.from_address(
        gpu.real(ring.address, ring.num_bytes) + abi.offset_of("blink_ring_header", "heartbeat")
    )
    beat.value = 5
    mirror = ring.follow_header()
    assert mirror.header()["heartbeat"] == 5
    beat.value = 6
    wait_for(lambda: mirror.header()["heartbeat"] == 6, "the mirror")
    gpu.is_dead = True
    wait_for(lambda: bool(said), "a word about the GPU")
    assert "cannot be read any more" in said[0] and "700" in said[0]
    beat.value = 7
    assert mirror.header()["heartbeat"] == 6
    gpu.is_dead = False
    ring.close()


def write_gpu_bundle(folder: Path, prompt: tuple[int, ...]) -> None:
    """Write a bundle for a GPU, as far as a role looks at it; its model counts on from a token."""
    manifest = write_small_bundle(folder)
    target = manifest.target.model_copy(update={"name": "sm_90", "library": None})
    tokens = tuple(prompt[-1] + 1 + number for number in range(20))
    golden = Golden(prompt_token_ids=prompt, output_token_ids=tokens, made_by="a test")
    changed = manifest.model_copy(update={"target": target, "limits": LIMITS, "golden": golden})
    (folder / MANIFEST_NAME).write_bytes(manifest_to_bytes(changed))


class FakeTarget:
    """What `load_cuda_target` returns: a scheduler that serves the ring in device memory."""

    def __init__(self, gpu: FakeGpu, library: ctypes.CDLL, ring: GpuMemoryRing) -> None:
        address = gpu.real(ring.address, ring.num_bytes)
        self._make = partial(CpuScheduler, library, address, ring.num_bytes)
        self._scheduler: CpuScheduler | None = None

    def start(self) -> None:
        self._scheduler = self._make()

    def __enter__(self) -> FakeTarget:
        return self

    def __exit__(self, *_: object) -> None:
        if self._scheduler is not None:
            self._scheduler.close()


class FakePlace:
    """An address and a card, held."""

    def __init__(self, *, host: str, port: int, device: str, gid_index: int) -> None:
        assert (host, port, device, gid_index) == ("127.0.0.1", 0, "", -1)

    def close(self) -> None:
        pass


class FakeOwner:
    """What answers front ends; it only remembers what it was given."""

    def __init__(self, made: list[dict[str, Any]], **given: Any) -> None:
        made.append(given)
        os.fstat(given["dmabuf_fd"])  # still open
        self.port, self.device = 7471, "fake0 port 1 gid 1"

    def sessions(self) -> list[tuple[int, str]]:
        return []

    def close(self) -> None:
        pass


class FakeWatchdog:
    """Does not look; the test does, at what it was given."""

    def __init__(self, made: list[Any], ring: Any, *_: object) -> None:
        made.append(ring)

    def disarm(self) -> None:
        pass


@pytest.fixture
def role(gpu: FakeGpu, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the fakes where `serve_gpu` finds them; what it is told and gives are attributes."""
    from blink_runtime import cuda_bundle

    owners: list[dict[str, Any]] = []
    watched: list[Any] = []
    stop = threading.Event()
    monkeypatch.setattr(cuda_driver, "Context", FakeContext)
    monkeypatch.setattr(
        cuda_bundle,
        "load_cuda_target",
        lambda bundle, context, ring, **_: FakeTarget(gpu, library, ring),
    )
    monkeypatch.setattr(serve_roles, "open_golden_cache", lambda bundle: None)
    monkeypatch.setattr(serve_roles, "stop_event", lambda: stop)
    monkeypatch.setattr(_native, "LinkPlace", FakePlace)
    monkeypatch.setattr(_native, "LinkOwner", partial(FakeOwner, owners))
    monkeypatch.setattr(_native, "Watchdog", partial(FakeWatchdog, watched))
    return SimpleNamespace(owners=owners, watched=watched, stop=stop)


def test_serve_gpu_over_gpu_memory(
    gpu: FakeGpu, role: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards every step that used to touch the ring by address: golden prompt, watchdog, owner,
    stop."""
    write_gpu_bundle(tmp_path / "bundle", prompt=(3, 4, 5))
    link = LinkConfig(transport="verbs", address="127.0.0.1:0", ring_memory="gpu")
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        status = pool.submit(serve_gpu, tmp_path / "bundle", ServeConfig(), link)
        stack.callback(role.stop.set)
        wait_for(lambda: status.done() or bool(role.owners), "the link's owner")
        if status.done():
            status.result()  # why it serves no more
        (header,) = (ring.header for ring in role.watched)
        beats = header()["heartbeat"]
        wait_for(lambda: header()["heartbeat"] > beats, "a heartbeat where the watchdog looks")
    assert status.result() == 0
    (given,) = role.owners
    ((start, num_bytes, _),) = gpu.exports
    assert isinstance(given["place"], FakePlace)
    assert given["address"] == start + given["dmabuf_offset"]
    assert given["dmabuf_offset"] + given["num_bytes"] <= num_bytes
    header = abi.structs()["blink_ring_header"].from_buffer_copy(given["header"])
    assert header.ring_bytes == given["num_bytes"] and header.bundle_id != 0
    assert (gpu.memory, gpu.pinned, gpu.streams) == ({}, {}, {})
    text = capsys.readouterr().out
    assert "ring in GPU memory" in text and "golden prompt gives its 20 tokens" in text


def test_gpu_memory_is_refused_where_it_cannot_be(role: Any, tmp_path: Path) -> None:
    with pytest.raises(BlinkError, match="cannot be shared with another process"):
        LinkConfig(transport="shm", address="/blink-a", ring_memory="gpu")
    write_small_bundle(tmp_path / "cpu")
    link = LinkConfig(transport="verbs", address="127.0.0.1:0", ring_memory="gpu")
    with pytest.raises(BlinkError, match="is for the CPU"):
        serve_gpu(tmp_path / "cpu", ServeConfig(), link)
    assert role.owners == []
