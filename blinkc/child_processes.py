"""Commands that a stage runs, from threads of its own: none outlives the stage, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from blinkc.closing import Closing
from blinkc.errors import BlinkError


class ChildProcesses(Closing):
    """Runs commands, each as the leader of a process group: a compiler's own children end with it.

    Any thread may run one; closing ends those that still run and lets no more begin.

    Args:
        temporary: folder for their temporary files, which they do not remove when they are ended.
    """

    def __init__(self, temporary: str) -> None:
        self._environment = {**os.environ, "TMPDIR": temporary}
        self._running: set[subprocess.Popen[str]] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def run(self, command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and return what it printed.

        Raises:
            BlinkError: `close()` was called.
            subprocess.TimeoutExpired: it took too long, and was ended.
        """
        with self._lock:
            if self._is_closed:
                raise BlinkError("the build was ended")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self._environment,
                start_new_session=True,  # a terminal's Ctrl-C comes to us, and we end it
            )
            self._running.add(process)
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            _end(process)
            process.communicate()
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def close(self) -> None:
        """End what still runs."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
