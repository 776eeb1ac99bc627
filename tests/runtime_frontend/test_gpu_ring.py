"""Where a GPU's ring lies, with a driver that only remembers what it was asked."""

from __future__ import annotations

import ctypes
import itertools
import os
from typing import Any

import pytest

_native = pytest.importorskip("blink_runtime._native", reason="the native module is not built")

from blink_runtime import cuda_driver, gpu_ring  # noqa: E402

_numbers = itertools.count()


class FakeDriver:
    """The calls that pin and map host memory."""

    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE = 2, 1
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE = 2, 1
    OFFSET = 1 << 40  # of device addresses

    def __init__(self, *, registers: bool) -> None:
        self.registers = registers
        self.registered: dict[int, int] = {}
        self.allocated: dict[int, Any] = {}

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[int]:
        if not self.registers:
            return (801,)
        assert flags == 3
        self.registered[address] = num_bytes
        return (0,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        del self.registered[address]
        return (0,)

    def cuMemHostAlloc(self, num_bytes: int, flags: int) -> tuple[int, int]:
        buffer = ctypes.create_string_buffer(num_bytes + 4096)
        address = -(-ctypes.addressof(buffer) // 4096) * 4096
        self.allocated[address] = buffer
        return (0, address)

    def cuMemFreeHost(self, address: int) -> tuple[int]:
        del self.allocated[address]
        return (0,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return (0, address + self.OFFSET)


def make(monkeypatch: pytest.MonkeyPatch, registers: bool) -> tuple[Any, FakeDriver, list[str]]:
    fake = FakeDriver(registers=registers)
    for module in (cuda_driver, gpu_ring):
        monkeypatch.setattr(module, "driver", lambda: fake)
    sizes = _native.RingSizes(
        num_slots=8, max_prompt_tokens=16, max_output_tokens=16, max_seqlen=32, max_batch=4,
        vocab_size=100, page_size_tokens=16, num_kv_pages=8,
    )  # fmt: skip
    notices: list[str] = []
    name = f"/blink-gpuring-{os.getpid()}-{next(_numbers)}"
    return gpu_ring.GpuRing(name, sizes, notices.append), fake, notices


def test_ring_is_shared_and_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug it guards: a ring that `top` and `trace` cannot find."""
    ring, fake, notices = make(monkeypatch, registers=True)
    assert fake.registered == {ring.ring.address: ring.num_bytes}
    assert ring.address == ring.ring.address + FakeDriver.OFFSET
    assert _native.Ring.open(ring.ring.name).header()["num_slots"] == 8
    assert notices == []
    ring.close()
    ring.close()
    assert fake.registered == {}


def test_pinned_memory_where_it_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, fake, notices = make(monkeypatch, registers=False)
    assert list(fake.allocated) == [ring.ring.address]
    assert ring.address == ring.ring.address + FakeDriver.OFFSET
    assert ring.ring.name == ""
    assert "cannot see it" in notices[0]
    ring.close()
    assert fake.allocated == {}
