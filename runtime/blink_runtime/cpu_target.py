"""Run a bundle's CPU target: weights and `target.so` -> a scheduler thread that serves a ring.

The thread is native from end to end; Python starts it, stops it and otherwise sleeps.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Sequence
from pathlib import Path

from blinkc.closing import Closing
from blinkc.errors import BlinkError
from blinkc.usable_cores import usable_cores

_ERROR_BYTES = 1024
# For the step at hand, which nothing interrupts: of a large model and a long prompt it may take a
# minute, and what it reads and writes must not be freed under it.
_STOP_PATIENCE_S = 300.0
_PR_SET_NAME = 15
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)


class CpuTarget(Closing):
    """The CPU's stand-in for the self-scheduling GPU: one native thread over one ring.

    Args:
        library: the bundle's `target.so`.
        weights: address of each weight, in the manifest's order.
        ring_address: address of the ring in this process.
        ring_bytes: its size.
        num_kv_pages: pages to allocate, the sink page included.
        num_threads: threads of the matrix products; 0: `usable_cores()`.

    Raises:
        BlinkError: the library cannot be loaded on this machine, or refuses its inputs.
    """

    def __init__(
        self,
        *,
        library: Path,
        weights: Sequence[int],
        ring_address: int,
        ring_bytes: int,
        num_kv_pages: int,
        num_threads: int = 0,
    ) -> None:
        try:
            self._library = ctypes.CDLL(str(library), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        except OSError as error:
            raise BlinkError(
                f"{library} does not load on this {platform.machine()} machine: {error}",
                hint="compile the model again on this machine: blinkc compile MODEL --target cpu",
            ) from error
        _declare(self._library)
        self._thread: threading.Thread | None = None
        self._model = ctypes.c_void_p()
        self._scheduler = ctypes.c_void_p()
        message = ctypes.create_string_buffer(_ERROR_BYTES)
        addresses = (ctypes.c_void_p * len(weights))(*weights)
        code = self._library.blink_cpu_model_create(
            addresses,
            len(weights),
            num_kv_pages,
            num_threads or usable_cores(),
            ctypes.byref(self._model),
            message,
            _ERROR_BYTES,
        )
        if code != 0:
            raise BlinkError(f"the model could not be loaded: {message.value.decode()}")
        # The launch goes from scheduler to model inside the library; Python is not called.
        launch = ctypes.cast(self._library.blink_cpu_model_launch, _LAUNCH)
        code = self._library.blink_cpu_scheduler_create(
            ring_address,
            ring_bytes,
            self._library.blink_cpu_model_buffers(self._model),
            launch,
            self._model,
            ctypes.byref(self._scheduler),
            message,
            _ERROR_BYTES,
        )
        if code != 0:
            self.close()
            raise BlinkError(f"the scheduler could not be started: {message.value.decode()}")

    def start(self) -> None:
        """Start the scheduler's thread; it runs until the ring's stop word is set."""
        self._thread = threading.Thread(target=self._run, name="blink-scheduler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"blink-scheduler", 0, 0, 0)  # for top and /proc
        self._library.blink_cpu_scheduler_run(self._scheduler)

    def join(self, timeout_s: float) -> bool:
        """Wait for the scheduler to return; True if it did in time."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Free the scheduler and the model; the ring must have been told to stop first."""
        if not self.join(_STOP_PATIENCE_S):
            raise BlinkError(
                f"the scheduler did not stop within {_STOP_PATIENCE_S:.0f} s of the stop word"
            )
        if self._scheduler:
            self._library.blink_cpu_scheduler_destroy(self._scheduler)
            self._scheduler = ctypes.c_void_p()
        if self._model:
            self._library.blink_cpu_model_destroy(self._model)
            self._model = ctypes.c_void_p()


def _declare(library: ctypes.CDLL) -> None:
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    text = ctypes.c_char_p
    library.blink_cpu_model_create.argtypes = [
        ctypes.POINTER(pointer), u32, u32, u32, ctypes.POINTER(pointer), text, u32,
    ]  # fmt: skip
    library.blink_cpu_model_buffers.argtypes = [pointer]
    library.blink_cpu_model_buffers.restype = pointer
    library.blink_cpu_model_destroy.argtypes = [pointer]
    library.blink_cpu_model_destroy.restype = None
    library.blink_cpu_scheduler_create.argtypes = [
        pointer, ctypes.c_uint64, pointer, _LAUNCH, pointer, ctypes.POINTER(pointer), text, u32,
    ]  # fmt: skip
    library.blink_cpu_scheduler_run.argtypes = [pointer]
    library.blink_cpu_scheduler_destroy.argtypes = [pointer]
    library.blink_cpu_scheduler_destroy.restype = None
