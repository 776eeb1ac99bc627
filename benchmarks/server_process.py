"""A server under measurement as a child process: start it, find its URL, pin it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.host_facts import ThreadTime, thread_times

START_TIMEOUT_S = 180.0
ROOT = Path(__file__).resolve().parents[1]


class ServerError(RuntimeError):
    """The server did not start, or did not end as asked."""


def environment() -> dict[str, str]:
    """Return the environment that finds this checkout's packages."""
    paths = [str(ROOT), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "CUDA_MODULE_LOADING": "EAGER",
    }


class ServerProcess:
    """`benchmarks.gpu_server FOLDER ...` or `blink-runtime run BUNDLE ...`, ready to be asked.

    Args:
        command: what to run; `gpu_server(...)` and `bundle_server(...)` make it.
        cores: cores it may use; None: all.
        start_timeout_s: until it must be ready.

    Raises:
        ServerError: it ended before it was ready, or took too long; with its last output.
    """

    def __init__(
        self,
        command: Sequence[str],
        cores: set[int] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        before = os.sched_getaffinity(0)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        started = time.monotonic()
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, env=environment(), cwd=ROOT,
            )  # fmt: skip
        finally:
            os.sched_setaffinity(0, before)
        self.events: dict[str, dict[str, Any]] = {}
        self.output: list[str] = []
        self.url = ""
        timer = threading.Timer(start_timeout_s, self.process.kill)
        timer.start()
        try:
            self._await_url()
        finally:
            timer.cancel()
        self.start_s = time.monotonic() - started

    def _await_url(self) -> None:
        while not self.url:
            line = self._read_line()
            if "http://" in line and "url" not in line:  # blink-runtime's own words
                self.url = "http://" + line.split("http://")[1].split()[0].rstrip("/")
            elif "ready" in self.events:
                self.url = self.events["ready"]["url"]

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ServerError("the server ended:\n" + "".join(self.output[-25:]))
        self.output.append(line)
        if line.startswith('{"event"'):
            event = json.loads(line)
            self.events[event.pop("event")] = event
        return line

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def threads(self) -> dict[int, ThreadTime]:
        """CPU time of its threads so far."""
        return thread_times(self.pid)

    def allow_cores(self, cores: set[int]) -> None:
        """Let every thread of the server run on these cores from now on."""
        for tid in self.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(tid, cores)

    def end(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Ask it to end; return its `end` event, if it gave one.

        Raises:
            ServerError: it had to be killed.
        """
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            if "ready" not in self.events:
                self.process.terminate()
        try:
            assert self.process.stdout is not None
            self.process.stdin = None
            rest, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise ServerError(f"the server did not end within {timeout_s} s") from None
        for line in rest.splitlines():
            self.output.append(line + "\n")
            if line.startswith('{"event"'):
                event = json.loads(line)
                self.events[event.pop("event")] = event
        return self.events.get("end", {})

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            if kind is None:
                self.end()
            else:
                self.process.kill()
                self.process.wait()


def gpu_server(folder: Path, placement: str, *options: str) -> list[str]:
    """Return the command that serves a prepared folder."""
    module = [sys.executable, "-m", "benchmarks.gpu_server", str(folder)]
    return [*module, "--placement", placement, *options]


def bundle_server(bundle: Path, *options: str) -> list[str]:
    """Return the command that serves a bundle as a user would."""
    module = [sys.executable, "-m", "blink_runtime.cli", "run", str(bundle)]
    return [*module, "--port", "0", "--no-golden", *options]
