"""`blink-runtime run` in a process of its own, and a client of a few lines, for tests on a GPU."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any


class GpuServer:
    """A served bundle; `output` holds what the process has printed."""

    def __init__(self, bundle: Path, *options: str) -> None:
        command = [sys.executable, "-m", "blink_runtime.cli", "run", str(bundle), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output = ""
        self._is_ready = threading.Event()
        self.port = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._is_ready.wait(600)
        assert self.port, f"the server ended before it was ready:\n{self.output}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if "http://127.0.0.1:" in line:
                self.port = int(line.split("http://127.0.0.1:")[1].split("/")[0])
                self._is_ready.set()
        self._is_ready.set()

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body."""
        return self._ask("GET", path, None)

    def complete(self, prompt: str, num_tokens: int, **fields: Any) -> dict[str, Any]:
        """Return the JSON of a greedy completion, whatever its status."""
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, **fields}
        answer: dict[str, Any] = json.loads(self._ask("POST", "/v1/completions", body)[1])
        return answer

    def stream(self, prompt: str, num_tokens: int, **fields: Any) -> str:
        """Return the text of a streamed greedy completion."""
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
        text = self._ask("POST", "/v1/completions", {**body, **fields})[1]
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return "".join(
            choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"]
        )

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        data = response.read().decode()
        connection.close()
        return response.status, data

    def open_stream(self, prompt: str, num_tokens: int) -> http.client.HTTPResponse:
        """Start a streamed completion and return once its first bytes are there."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
        headers = {"Content-Type": "application/json"}
        connection.request(
            "POST", "/v1/completions", json.dumps(body | {"ignore_eos": True}), headers
        )
        response = connection.getresponse()
        response.read(1)
        return response

    def stop(self) -> tuple[int, float]:
        """Send SIGTERM; return the exit status and the seconds until then."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(30)
        return status, time.monotonic() - started

    def thread_ticks(self) -> dict[str, tuple[str, int]]:
        """Return name and CPU time, in clock ticks, of each thread."""
        found = {}
        for thread in os.listdir(f"/proc/{self.process.pid}/task"):
            text = Path(f"/proc/{self.process.pid}/task/{thread}/stat").read_text()
            fields = text.rpartition(")")[2].split()
            name = text[text.index("(") + 1 : text.rindex(")")]
            found[thread] = (name, int(fields[11]) + int(fields[12]))
        return found

    def __enter__(self) -> GpuServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
