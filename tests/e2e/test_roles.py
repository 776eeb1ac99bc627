"""A bundle in two processes: serve-gpu and serve-dpu over shared memory, with a slim front end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from .server import BIN, DEMO_BUNDLE, run

RING = f"/blink-roles-{os.getpid()}"
LISTEN = ("--listen", "127.0.0.1:0")


class Role:
    """One of the two commands in a process of its own; its output goes to a file."""

    def __init__(self, stack: ExitStack, log: Path, *words: object) -> None:
        self.log = log
        command = [str(BIN / "blink-runtime"), *map(str, words)]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)

    def wait_for(self, phrase: str) -> str:
        """Return the output once `phrase` is in it."""
        deadline = time.monotonic() + 600
        while phrase not in (text := self.log.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.05)
        return text


def serve_gpu(stack: ExitStack, log: Path) -> Role:
    return Role(stack, log, "serve-gpu", DEMO_BUNDLE, "--transport", "shm", "--listen", RING)


def ask(url: str) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_two_processes(stack: ExitStack, tmp_path: Path) -> None:
    """The front end starts first and has no weights; the owner dies and comes back."""
    slim = tmp_path / "slim"
    assert "for serve-dpu" in run(BIN / "blink-runtime", "slim", DEMO_BUNDLE, "-o", slim)
    assert sum(path.stat().st_size for path in slim.iterdir()) < 10_000_000
    options = ("--transport", "shm", "--connect", RING)
    front_end = Role(stack, tmp_path / "dpu", "serve-dpu", slim, *options, *LISTEN)
    front_end.wait_for("waiting: shared memory")
    owner = serve_gpu(stack, tmp_path / "gpu")
    owner.wait_for("ready after")
    url = "http://" + front_end.wait_for("http://").split("http://")[1].split("/")[0]
    answer = ask(url)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"], answer.text

    # The bug: a second front end took the range away, and the first one waited for ever.
    second = subprocess.run(
        [str(BIN / "blink-runtime"), "serve-dpu", str(slim), *options, *LISTEN],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert second.returncode == 1 and "is another process" in second.stderr
    assert ask(url).json()["choices"] == answer.json()["choices"]

    owner.process.kill()
    front_end.wait_for("the ring is lost")
    assert httpx.get(f"{url}/health", timeout=300).status_code == 503
    assert ask(url).status_code == 503
    owner = serve_gpu(stack, tmp_path / "gpu2")
    front_end.wait_for("the ring is back")
    assert ask(url).json()["choices"] == answer.json()["choices"]

    for role in (front_end, owner):
        role.process.send_signal(signal.SIGTERM)
        assert role.process.wait(300) == 0, role.log.read_text()


def test_a_front_end_of_another_bundle_is_refused(stack: ExitStack, tmp_path: Path) -> None:
    slim = tmp_path / "slim"
    run(BIN / "blink-runtime", "slim", DEMO_BUNDLE, "-o", slim)
    path = slim / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256", None)  # bundles of older releases have none
    (weights,) = [f for f in manifest["files"] if f["path"].startswith("weights")]
    weights["sha256"] = "0" * 64  # as if another checkpoint had been bundled
    path.write_text(json.dumps(manifest))
    serve_gpu(stack, tmp_path / "gpu").wait_for("ready after")
    done = subprocess.run(
        [
            str(BIN / "blink-runtime"), "serve-dpu", str(slim),
            "--transport", "shm", "--connect", RING, *LISTEN,
        ],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1
    assert "another bundle" in done.stderr


def test_run_keeps_its_slots(stack: ExitStack, tmp_path: Path) -> None:
    """The bug: serve-dpu took the slots of a server in one process, which then waited for ever."""
    server = Role(stack, tmp_path / "run", "run", DEMO_BUNDLE, "--port", "0", "--no-golden")
    text = server.wait_for("(ring ")
    url = "http://" + text.split("http://")[1].split("/")[0]
    ring = text.split("(ring ")[1].split(")")[0]
    done = subprocess.run(
        [
            str(BIN / "blink-runtime"), "serve-dpu", str(DEMO_BUNDLE),
            "--transport", "shm", "--connect", ring, *LISTEN,
        ],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1 and "is another process" in done.stderr
    assert ask(url).status_code == 200
