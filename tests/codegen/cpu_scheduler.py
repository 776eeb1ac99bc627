"""A compiled CPU scheduler on a thread of its own, over any ring, with a model that counts on."""

from __future__ import annotations

import ctypes
import threading

from tests.codegen.plans import make_plan
from tests.codegen.ring_in_memory import LAUNCH, StepBuffers

DEADLINE_S = 300


class CpuScheduler:
    """Serves the ring at `address`, whose sizes are `make_plan()`'s, until its stop word is set."""

    def __init__(self, library: ctypes.CDLL, address: int, num_bytes: int) -> None:
        self.launch_error = 0
        self._step = StepBuffers(make_plan())
        self._library = library
        self._scheduler = ctypes.c_void_p()
        self._launch = LAUNCH(self._run_step)  # kept: the library calls it from its thread
        error = ctypes.create_string_buffer(200)
        code = library.blink_cpu_scheduler_create(
            ctypes.c_void_p(address),
            ctypes.c_uint64(num_bytes),
            ctypes.byref(self._step.buffers),
            self._launch,
            None,
            ctypes.byref(self._scheduler),
            error,
            ctypes.c_uint32(len(error)),
        )
        assert code == 0, error.value.decode()
        run = library.blink_cpu_scheduler_run
        self._thread = threading.Thread(target=run, args=(self._scheduler,))
        self._thread.start()

    def _run_step(self, _: int, key_index: int) -> int:
        if self.launch_error:
            return self.launch_error
        self._step.echo_next_ids()
        return 0

    def close(self) -> None:
        """Wait for its end and free it; the stop word must have been set."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the scheduler does not stop"
        self._library.blink_cpu_scheduler_destroy(self._scheduler)
