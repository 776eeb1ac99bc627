"""The export of GPU memory for an RDMA card, against a mocked driver: nothing here ran on one."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from blink_runtime import gpu_dmabuf
from blink_runtime.cuda_driver import DeviceSpec
from blink_runtime.gpu_dmabuf import export_dmabuf
from blinkc.errors import BlinkError


def gpu(ordering: int) -> DeviceSpec:
    return DeviceSpec(
        name="GPU",
        compute_capability=(9, 0),
        num_multiprocessors=132,
        total_bytes=1 << 37,
        driver_version=13000,
        gpu_direct_rdma_writes_ordering=ordering,
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Mock the driver; an export of more than 1 MiB fails. Return the calls."""
    seen: list[tuple[int, ...]] = []

    def get_handle(address: int, num_bytes: int, kind: int, flags: int) -> tuple[Any, ...]:
        seen.append((address, num_bytes, kind, flags))
        if num_bytes > 1 << 20:
            return (801, 0)
        return (0, os.memfd_create("gpu"))

    kinds = SimpleNamespace(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD=1)
    mock = SimpleNamespace(CUmemRangeHandleType=kinds, cuMemGetHandleForAddressRange=get_handle)
    monkeypatch.setattr(gpu_dmabuf, "driver", lambda: mock)
    return seen


def test_export_is_whole_pages(calls: list[tuple[int, ...]]) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    address = 0x7F0000000000 + 3 * page + 512
    with export_dmabuf(gpu(100), address, page) as exported:
        fd = exported.fd
        assert exported.offset == 512
        assert os.fstat(fd).st_size == 0
    assert calls == [(address - 512, 2 * page, 1, 0)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_whose_writes_are_not_ordered_is_refused(calls: list[tuple[int, ...]]) -> None:
    # The bug: a command that the GPU sees before its payload, once in a million.
    with pytest.raises(BlinkError, match="GPUDirectRDMAWritesOrdering is 0, a ring in its memory"):
        export_dmabuf(gpu(0), 0x7F0000000000, 4096)
    assert calls == []


def test_a_driver_that_exports_nothing(calls: list[tuple[int, ...]]) -> None:
    with pytest.raises(BlinkError, match="as a dma-buf: 801") as caught:
        export_dmabuf(gpu(100), 0x7F0000000000, 1 << 21)
    assert "open kernel modules" in caught.value.hint
