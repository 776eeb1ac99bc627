"""The ring of a GPU in the same machine (transport `mapped`): sizes -> memory both sides address.

It lies in POSIX shared memory that is registered with the GPU, so that `top` and `trace` can read
it beside the server. Where registering fails, in pinned memory without a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blink_runtime.cuda_driver import MappedBuffer, check, driver
from blink_runtime.shared_ring import UnseenRing, create_ring
from blinkc.closing import Closing
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable

    from blink_runtime import _native


class GpuRing(Closing):
    """A ring with its header written; `address` is the GPU's, `ring` is the host's view.

    Args:
        name: of the shared memory, e.g. "/blink-123".
        notice: told in a sentence when the memory could not be shared.

    Raises:
        BlinkError: there is no memory to be had.
    """

    def __init__(self, name: str, sizes: _native.RingSizes, notice: Callable[[str], None]) -> None:
        from blink_runtime import _native

        self.num_bytes = sizes.ring_bytes
        self._pinned: MappedBuffer | None = None
        self._unseen: UnseenRing | None = None
        self._registered = 0
        ring = create_ring(name, sizes)
        try:
            self.address = self._register(ring.address)
            self.ring = ring
        except BlinkError as error:
            notice(f"{error}; the ring has no name, so `top` and `trace` cannot see it")
            self._unseen = UnseenRing("the GPU's driver did not register shared memory")
            self._pinned = MappedBuffer(self.num_bytes, "the ring")
            self.address = self._pinned.address
            self.ring = _native.Ring.create_at(self._pinned.host_address, self.num_bytes, sizes)

    def _register(self, host_address: int) -> int:
        """Pin the memory where it lies; return its address on the GPU."""
        cu = driver()
        flags = cu.CU_MEMHOSTREGISTER_DEVICEMAP | cu.CU_MEMHOSTREGISTER_PORTABLE
        what = f"registering {self.num_bytes} bytes of shared memory with the GPU"
        check(cu.cuMemHostRegister(host_address, self.num_bytes, flags), what)
        self._registered = host_address
        return int(check(cu.cuMemHostGetDevicePointer(host_address, 0), "mapping shared memory"))

    def close(self) -> None:
        """Let the GPU go of the memory; the scheduler must have returned."""
        if self._registered:
            driver().cuMemHostUnregister(self._registered)
            self._registered = 0
        if self._unseen is not None:
            self._unseen.close()
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
