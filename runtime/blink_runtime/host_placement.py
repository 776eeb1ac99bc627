"""The `host` placement: a host thread launches the graph that the scheduler's kernel names, every
step.

The baseline that the other placements are measured against, and what a GPU without device launch
gets.
"""

from __future__ import annotations

import ctypes
import threading
import time
from ctypes import c_uint32
from dataclasses import replace
from typing import TYPE_CHECKING

from blink_runtime.cuda_graphs import Launch, launch
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blink_runtime.cuda_driver import MappedBuffer, Stream
    from blink_runtime.cuda_graphs import GraphExec

_IDLE_PAUSE_S = 50e-6
_IDLE, _LAUNCH, _STOP = 0, 1, 2  # SchedulerAction of state.cuh


class _Mailbox(ctypes.Structure):
    """HostMailbox of launch.cuh."""

    _fields_ = (
        ("turn", ctypes.c_uint64),
        ("action", ctypes.c_uint32),
        ("action_key", ctypes.c_uint32),
    )


class HostPlacement:
    """One thread that alternates the scheduler's kernel and the graph it chose."""

    def __init__(
        self, step: Launch, execs: Sequence[GraphExec], mailbox: MappedBuffer, stream: Stream
    ) -> None:
        self._step = step
        self._execs = execs
        self._mailbox = _Mailbox.from_address(mailbox.host_address)
        self._stream = stream
        self._thread = threading.Thread(target=self._run, name="blink-host-placement", daemon=True)
        self.error = ""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        from blink_runtime.cuda_driver import make_primary_current

        make_primary_current()
        launch_error = 0
        while True:
            step = replace(self._step, args=(self._step.args[0], c_uint32(launch_error)))
            launch_error = 0
            try:
                launch(step, self._stream)
                self._stream.synchronize()
            except BlinkError as error:  # sticky: nothing runs on this GPU any more
                self.error = str(error)
                return
            action = self._mailbox.action
            if action == _STOP:
                return
            if action == _IDLE:
                time.sleep(_IDLE_PAUSE_S)
                continue
            try:
                self._execs[self._mailbox.action_key].launch(self._stream)
            except BlinkError:
                launch_error = 1  # the scheduler fails the step's requests

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; True if it did in time."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
