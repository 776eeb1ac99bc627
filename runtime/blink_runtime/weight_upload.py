"""Weights from files straight to the GPU: runs of bytes -> device memory, through pinned buffers.

Several threads read at once, each into two pinned buffers in turn: while one is copied to the GPU,
the other is filled. Nothing is mapped or kept on the host. Only weights that must be transposed,
cut or converted (`--weights reference`) are assembled in host memory first.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blink_runtime.cuda_driver import Event, MappedBuffer, Stream, check, driver
from blinkc.bundle.manifest import DTYPE_BYTES
from blinkc.bundle.weights import MappedSpan, assemble_weight
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from blink_runtime.cuda_driver import Context
    from blinkc.bundle.manifest import WeightEntry
    from blinkc.bundle.weights import FileSpan

CHUNK_BYTES = 16 << 20
NUM_READERS = 8
_REPORT_INTERVAL_S = 0.5
_BAR_CELLS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Bytes of a file that go to one device address as they are."""

    path: Path
    offset: int
    num_bytes: int
    address: int


def file_chunks(
    weight: WeightEntry, spans: dict[str, FileSpan], address: int
) -> list[Chunk] | None:
    """Return the runs of bytes that make up a weight; None where bytes must be changed on the way.

    Args:
        spans: where the files lie, by the name that parts use.
        address: of the weight on the GPU.
    """
    if any(part.transpose or part.dtype != weight.dtype for part in weight.parts):
        return None
    chunks = []
    for part in weight.parts:
        first, last = part.rows or (0, part.shape[0] if part.shape else 1)
        row_bytes = math.prod(part.shape[1:]) * DTYPE_BYTES[part.dtype]
        size = (last - first) * row_bytes
        start = spans[part.file].offset + part.offset + first * row_bytes
        for place in range(0, size, CHUNK_BYTES):
            num_bytes = min(CHUNK_BYTES, size - place)
            chunks.append(
                Chunk(
                    path=spans[part.file].path,
                    offset=start + place,
                    num_bytes=num_bytes,
                    address=address + place,
                )
            )
        address += size
    return chunks


class WeightUpload:
    """Uploads weights; `run()` returns when all are on the GPU.

    Args:
        weights: in the order of `addresses`; those without parts are skipped.
        say: gets a line of progress now and then, and the rate at the end.

    Raises:
        BlinkError: a file is too short, or a copy failed.
    """

    def __init__(
        self,
        context: Context,
        weights: Sequence[WeightEntry],
        spans: dict[str, FileSpan],
        addresses: Sequence[int],
        say: Callable[[str], None],
        *,
        num_readers: int = NUM_READERS,
    ) -> None:
        self._context = context
        self._weights = weights
        self._spans = spans
        self._addresses = addresses
        self._say = say
        self._num_readers = num_readers
        self._work: queue.SimpleQueue[Chunk | WeightEntry | None] = queue.SimpleQueue()
        self._address_of = {w.name: a for w, a in zip(weights, addresses, strict=True)}
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Upload everything; print a bar on a terminal, and the rate in any case."""
        total = self._queue_work()
        started = time.monotonic()
        threads = [
            threading.Thread(target=self._read, name=f"blink-load-{number}", daemon=True)
            for number in range(min(self._num_readers, self._work.qsize()))
        ]
        for thread in threads:
            self._work.put(None)
            thread.start()
        bar = _Bar(total)
        for thread in threads:
            while thread.is_alive():
                thread.join(_REPORT_INTERVAL_S)
                bar.show(self._done_bytes)
        bar.close()
        if self._errors:
            raise self._errors[0]
        seconds = max(time.monotonic() - started, 1e-9)
        self._say(
            f"weights: {total / 1e9:.2f} GB in {seconds:.2f} s, {total / 1e6 / seconds:.0f} MB/s"
        )

    def _queue_work(self) -> int:
        total = 0
        for weight, address in zip(self._weights, self._addresses, strict=True):
            if not weight.parts:
                continue
            total += weight.num_bytes
            chunks = file_chunks(weight, self._spans, address)
            for item in chunks if chunks is not None else (weight,):
                self._work.put(item)
        return total

    def _read(self) -> None:
        try:
            self._context.make_current()
            with _PinnedPair() as pair:
                for item in self._items():
                    if isinstance(item, Chunk):
                        pair.upload_file(item)
                        self._count(item.num_bytes)
                    else:
                        self._upload_assembled(item, pair)
        except BaseException as error:  # handed to the caller of run()
            self._errors.append(error)

    def _items(self) -> Iterator[Chunk | WeightEntry]:
        while not self._errors:
            item = self._work.get()
            if item is None:
                return
            yield item

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes

    def _upload_assembled(self, weight: WeightEntry, pair: _PinnedPair) -> None:
        names = {part.file for part in weight.parts}
        maps = {name: MappedSpan(self._spans[name]) for name in names}
        try:
            array = assemble_weight(weight, {name: span.view for name, span in maps.items()})
        finally:
            for span in maps.values():
                span.close()
        data = memoryview(array.reshape(-1).view("u1"))
        for place in range(0, len(data), CHUNK_BYTES):
            pair.upload(data[place : place + CHUNK_BYTES], self._address_of[weight.name] + place)
        self._count(weight.num_bytes)


class _PinnedPair:
    """Two pinned buffers and a stream: one is filled while the other is copied."""

    def __init__(self) -> None:
        self._stream = Stream()
        self._buffers = [MappedBuffer(CHUNK_BYTES, "loading weights") for _ in range(2)]
        self._events = [Event() for _ in range(2)]
        self._turn = 0
        self._file: Any = None
        self._path: Path | None = None

    def upload_file(self, chunk: Chunk) -> None:
        """Read a run of bytes and start its copy."""
        if self._path != chunk.path:
            self._close_file()
            self._file, self._path = os.open(chunk.path, os.O_RDONLY), chunk.path
        view = self._next_buffer()[: chunk.num_bytes]
        filled = 0
        while filled < chunk.num_bytes:
            count = os.preadv(self._file, [view[filled:]], chunk.offset + filled)
            if count == 0:
                raise BlinkError(
                    f"{chunk.path} ends at byte {chunk.offset + filled}",
                    hint="copy the bundle again, then blinkc verify",
                )
            filled += count
        self._start_copy(chunk.num_bytes, chunk.address)

    def upload(self, data: memoryview, address: int) -> None:
        """Start the copy of bytes that are in memory already."""
        self._next_buffer()[: len(data)] = data
        self._start_copy(len(data), address)

    def _next_buffer(self) -> memoryview:
        self._turn ^= 1
        self._events[
            self._turn
        ].synchronize()  # of this buffer's last copy; at once if there is none
        return self._buffers[self._turn].view

    def _start_copy(self, num_bytes: int, address: int) -> None:
        source = self._buffers[self._turn].host_address
        check(
            driver().cuMemcpyHtoDAsync(address, source, num_bytes, self._stream.handle),
            "copying weights to the GPU",
        )
        self._events[self._turn].record(self._stream)

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> _PinnedPair:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.synchronize()
        self._close_file()
        for buffer in self._buffers:
            buffer.close()
        self._stream.close()


class _Bar:
    """A line that grows; only on a terminal."""

    def __init__(self, total_bytes: int) -> None:
        self._total = max(total_bytes, 1)
        self._is_shown = sys.stderr.isatty()

    def show(self, done_bytes: int) -> None:
        """Redraw the line."""
        if self._is_shown:
            cells = done_bytes * _BAR_CELLS // self._total
            bar = "#" * cells + "." * (_BAR_CELLS - cells)
            sizes = f"{done_bytes / 1e9:.1f} of {self._total / 1e9:.1f} GB"
            print(f"\rweights [{bar}] {sizes}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Clear the line."""
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
