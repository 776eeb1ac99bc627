"""A serving process and its operator: what it prints, and what signals do."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blink_runtime.front_end import FrontEnd


class StopEvent(threading.Event):
    """An event that a handler of signals may set, once, in the thread that waits for it.

    A `threading.Event` would take the lock that its own `wait` holds at some moments: a handler
    that ran just then would wait for its thread for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_come = False
        self._wakes: SimpleQueue[None] = SimpleQueue()  # whose `put` may interrupt any `get`

    def is_set(self) -> bool:
        return self._has_come

    def set(self) -> None:
        self._has_come = True
        self._wakes.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        with suppress(Empty):
            self._wakes.get(timeout=timeout)
            self._wakes.put(None)  # for whoever waits next
        return self._has_come


def stop_event() -> StopEvent:
    """Return an event that SIGINT and SIGTERM set; a second signal ends the process at once.

    SIGHUP, which would end the process too, is kept for `reload_on_signal`.
    """
    event = StopEvent()

    def on_signal(number: int, _frame: object) -> None:
        if event.is_set():
            os._exit(128 + number)
        event.set()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGHUP, _HangUpLater())
    return event


class _HangUpLater:
    """A handler of SIGHUP for as long as there is nothing to reload."""

    was_sent = False

    def __call__(self, _number: int, _frame: object) -> None:
        self.was_sent = True


def reload_on_signal(front_end: FrontEnd) -> None:
    """On SIGHUP read keys and certificate again and open the access log anew; at once, if one came
    since `stop_event`."""

    def on_signal(_number: int, _frame: object) -> None:
        try:
            front_end.reload()
        except RuntimeError as error:
            say(f"not reloaded, the old ones stay: {error}")
        else:
            say("keys and certificate read again, access log opened anew")

    if threading.current_thread() is threading.main_thread():
        earlier = signal.signal(signal.SIGHUP, on_signal)
        if isinstance(earlier, _HangUpLater) and earlier.was_sent:
            os.kill(os.getpid(), signal.SIGHUP)


def drain(front_end: FrontEnd, patience_s: float) -> None:
    """Close the front end; a second signal still ends the process at once.

    A thread of its own waits inside the native code, where no handler of Python's runs.
    """
    closing = threading.Thread(
        target=front_end.close, args=(patience_s,), name="blink-drain", daemon=True
    )
    closing.start()
    closing.join()


def say(text: str) -> None:
    """Tell the operator; a full disk, or a pipe that nobody reads any more, ends no server.

    A handler of signals that interrupts this very function is not heard: Python raises RuntimeError
    where the output is written to already.
    """
    with suppress(OSError, RuntimeError):
        print(text, flush=True)


def process_age_s() -> float:
    """Return the seconds since this process began, the interpreter's start included."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
