"""A ring in GPU memory (transport `verbs`): sizes -> memory that the GPU and an RDMA card address.

The host never loads from it or stores to it. It copies, on streams of its own that no scheduler
holds up: the golden prompt before front ends come, the stop word at the end, and four times a
second the header into host memory, where the watchdog looks. A copy that fails or does not return
leaves the header's mirror as it was, which is what a dead scheduler looks like.

Never run on hardware: the driver's calls are mocked in the tests.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from blink_runtime.cuda_driver import DeviceBuffer, MappedBuffer, Stream, check, driver
from blink_runtime.gpu_dmabuf import export_dmabuf
from blinkc import abi
from blinkc.closing import Closing
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable

    from blink_runtime import _native
    from blink_runtime.cuda_driver import Context

MIRROR_INTERVAL_S = 0.25  # the watchdog's own
_PATIENCE_S = 5.0  # with a copy that is under way at the end
_BOUNCE_BYTES = 4096


class CopiedBytes(Closing):
    """Device memory as `RingBytes`: copies through pinned memory, done when a call returns.

    One thread at a time. All is allocated here: beside a running scheduler an allocation may wait
    for ever.
    """

    def __init__(self, address: int) -> None:
        self._address = address
        self._stream = Stream()
        self._bounce = MappedBuffer(_BOUNCE_BYTES, "copies of the ring")

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Copy out of the ring."""
        return b"".join(
            self._read_part(offset + done, min(num_bytes - done, _BOUNCE_BYTES))
            for done in range(0, num_bytes, _BOUNCE_BYTES)
        )

    def _read_part(self, offset: int, num_bytes: int) -> bytes:
        copy = driver().cuMemcpyDtoHAsync
        host = self._bounce.host_address
        result = copy(host, self._address + offset, num_bytes, self._stream.handle)
        check(result, f"reading {num_bytes} bytes of the ring")
        self._stream.synchronize()
        return ctypes.string_at(host, num_bytes)

    def write(self, offset: int, data: bytes) -> None:
        """Copy into the ring, after all that was written before."""
        copy = driver().cuMemcpyHtoDAsync
        host = self._bounce.host_address
        for done in range(0, len(data), _BOUNCE_BYTES):
            part = data[done : done + _BOUNCE_BYTES]
            ctypes.memmove(host, part, len(part))
            result = copy(self._address + offset + done, host, len(part), self._stream.handle)
            check(result, f"writing {len(part)} bytes of the ring")
            self._stream.synchronize()

    def close(self) -> None:
        """Free the stream and the pinned memory."""
        self._stream.close()
        self._bounce.close()


class GpuMemoryRing(Closing):
    """A ring with its header written, exported as a dma-buf.

    Attributes:
        address: the GPU's; the host must not follow it.
        memory: the ring's bytes, by copies.
        exported: the file that a card's driver registers.
        header: its bytes as they were made.

    Args:
        bundle_id: whose tokens these are.
        notice: told in a sentence why the mirror stands still.

    Raises:
        BlinkError: there is no memory to be had, or the GPU's cannot be given to a card.
    """

    def __init__(
        self,
        context: Context,
        sizes: _native.RingSizes,
        bundle_id: int,
        notice: Callable[[str], None],
    ) -> None:
        from blink_runtime import _native

        self.num_bytes = sizes.ring_bytes
        self._context = context
        self._notice = notice
        # As large as the ring, but of its pages only the header's are ever touched.
        self._host = mmap.mmap(-1, self.num_bytes)
        host_address = ctypes.addressof(ctypes.c_char.from_buffer(self._host))
        self._header_mirror = _native.Ring.create_at(host_address, self.num_bytes, sizes)
        self._header_mirror.bundle_id = bundle_id
        self.header = ctypes.string_at(host_address, abi.size_of("blink_ring_header"))
        with ExitStack() as made:
            self._allocate(made)
            self._made = made.pop_all()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _allocate(self, made: ExitStack) -> None:
        # The export is of whole pages: none of them may hold anything else.
        page = os.sysconf("SC_PAGE_SIZE")
        whole = -(-self.num_bytes // page) * page
        buffer = DeviceBuffer(whole + page, "the ring")
        made.callback(buffer.close)
        self.address = -(-buffer.address // page) * page
        self.exported = made.enter_context(
            export_dmabuf(self._context.spec, self.address, self.num_bytes)
        )
        buffer.fill(0)
        self.memory = made.enter_context(CopiedBytes(self.address))
        self._mirror_copies = made.enter_context(CopiedBytes(self.address))
        self.memory.write(0, self.header)

    def request_stop(self) -> None:
        """Tell the scheduler to finish and return."""
        stop = abi.offset_of("blink_ring_header", "stop")
        self.memory.write(stop, (1).to_bytes(4, "little"))

    def follow_header(self) -> _native.Ring:
        """Return a ring in host memory whose header, and nothing else, is a copy of this one's:
        made now, and again every `MIRROR_INTERVAL_S` until `close()`.

        Raises:
            BlinkError: the GPU does not answer.
        """
        self._copy_header()
        self._thread = threading.Thread(target=self._follow, name="blink-mirror", daemon=True)
        self._thread.start()
        return self._header_mirror

    def _follow(self) -> None:
        try:
            self._context.make_current()
            while not self._stop.wait(MIRROR_INTERVAL_S):
                self._copy_header()
        except BlinkError as error:
            self._notice(f"the ring's header cannot be read any more: {error}")

    def _copy_header(self) -> None:
        """Copy word by word: the watchdog, in another thread, finds each one whole."""
        copied = self._mirror_copies.read(0, len(self.header))
        words = (ctypes.c_uint64 * (len(copied) // 8)).from_buffer_copy(copied)
        mirror = (ctypes.c_uint64 * len(words)).from_address(self._header_mirror.address)
        for number, word in enumerate(words):
            mirror[number] = word

    def close(self) -> None:
        """Give the memory back; the scheduler must have returned and no card may know it.

        Raises:
            BlinkError: a copy does not return.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
            if self._thread.is_alive():
                raise BlinkError(f"the GPU does not end a copy within {_PATIENCE_S:.0f} s")
            self._thread = None
        self._made.close()
