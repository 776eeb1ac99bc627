"""A served bundle for tests: compile and bundle once per set of limits, start it, stop it."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import httpx
from openai import OpenAI

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".demo" / "SmolLM2-135M-Instruct"
DEMO_BUNDLE = ROOT / ".demo" / "bundle"
BIN = Path(sys.executable).parent


def make_bundle(*limits: str, model: Path = MODEL) -> Path:
    """Compile and bundle `model` with these limits; kept in build/e2e for the next run."""
    name = hashlib.sha256("\0".join([str(model), *limits]).encode()).hexdigest()[:12]
    folder = ROOT / "build" / "e2e" / name
    build, bundle = folder / "build", folder / "bundle"
    run(BIN / "blinkc", "compile", model, "--target", "cpu", *limits, "-o", build)
    run(BIN / "blinkc", "bundle", build, "-o", bundle)
    return bundle


def run(*command: object) -> str:
    """Run a command, return its output; its whole output stands in the failure."""
    words = [str(word) for word in command]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"
    return result.stdout


class Server:
    """`blink-runtime run BUNDLE --port 0` in a process of its own."""

    def __init__(
        self, bundle: Path, *options: str, command: Sequence[object] = (BIN / "blink-runtime",)
    ) -> None:
        words = [*map(str, command), "run", str(bundle), "--port", "0", *options]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
        )
        self.output = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if "http://" in line:
                self.url = "http://" + line.split("http://")[1].split()[0].rstrip("/")
                return
        raise AssertionError(f"the server ended before it was ready:\n{self.output}")

    def client(self, api_key: str = "none", *, strict: bool = True) -> OpenAI:
        """Return an OpenAI client that does not retry and, if `strict`, validates what it reads.

        Chunks of text completions need `strict=False`: the API's own streams say `finish_reason`
        null before the end, which the client's type for them does not admit.
        """
        return OpenAI(
            base_url=self.url + "/v1",
            api_key=api_key,
            max_retries=0,
            timeout=600,
            _strict_response_validation=strict,
        )

    def model_name(self) -> str:
        """Return the served model's id."""
        return self.client().models.list().data[0].id

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        text = httpx.get(self.url + "/metrics", timeout=300).text
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((name + " ", name + "{"))
        ]
        assert values, f"no metric {name} in\n{text}"
        return sum(values)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds; fails with this server's metrics."""
        deadline = time.monotonic() + 300
        while not condition():
            if time.monotonic() > deadline:
                metrics = httpx.get(self.url + "/metrics", timeout=300).text
                raise AssertionError(f"waited 300 s for {what}\n{metrics}")
            time.sleep(0.02)

    def wait_until_idle(self) -> None:
        """Wait until no request has a lane or a page; fails where one is kept for good."""
        self.wait_for(
            lambda: (
                self.metric("blink_requests_running") == 0
                and self.metric("blink_lanes_running") == 0
                and self.metric("blink_requests_waiting") == 0
                and self.metric("blink_pages_free") == self.metric("blink_pages")
            ),
            "lanes and pages to be free",
        )

    def close(self) -> int:
        """Stop the server as a supervisor would and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(300)
        finally:
            self.process.kill()  # has no effect on one that has ended

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.close()
