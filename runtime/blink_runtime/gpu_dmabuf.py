"""GPU memory as an RDMA card takes it: an address range -> a dma-buf that libibverbs registers.

Never run on hardware: no machine with a card beside a GPU was to be had; the driver's calls are
mocked in the tests. `serve-gpu --ring-memory gpu` comes here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blink_runtime.cuda_driver import check, driver
from blinkc.closing import Closing
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blink_runtime.cuda_driver import DeviceSpec

# CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: a card's writes reach the GPU that owns them in order.
NEEDED_WRITES_ORDERING = 100


@dataclass(kw_only=True, slots=True)
class Dmabuf(Closing):
    """An exported range: the ring begins `offset` bytes into the file `fd`. `close()` lets go."""

    fd: int
    offset: int

    def close(self) -> None:
        """Close the file; a registered region keeps its memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def export_dmabuf(spec: DeviceSpec, address: int, num_bytes: int) -> Dmabuf:
    """Export `num_bytes` of GPU memory at `address`, widened to whole host pages.

    The allocation must cover those pages. Source: cuMemGetHandleForAddressRange in the CUDA driver
    API.

    Raises:
        BlinkError: the GPU may show a command before its payload, or the driver exports nothing.
    """
    if spec.gpu_direct_rdma_writes_ordering < NEEDED_WRITES_ORDERING:
        raise BlinkError(
            f"{spec.name}: GPUDirectRDMAWritesOrdering is {spec.gpu_direct_rdma_writes_ordering}, "
            f"a ring in its memory needs {NEEDED_WRITES_ORDERING}: a command could be seen before "
            "its payload",
            hint="keep the ring in host memory: --ring-memory host",
        )
    cu = driver()
    page = os.sysconf("SC_PAGE_SIZE")
    start = address // page * page
    end = -(-(address + num_bytes) // page) * page
    kind = cu.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    try:
        fd = int(
            check(
                cu.cuMemGetHandleForAddressRange(start, end - start, kind, 0),
                f"exporting {end - start} bytes of GPU memory as a dma-buf",
            )
        )
    except BlinkError as error:
        raise BlinkError(
            error.message, hint="this needs NVIDIA's open kernel modules and Linux 5.12 or later"
        ) from None
    return Dmabuf(fd=fd, offset=address - start)
