"""Front end and ring's owner as processes of their own, killed with requests in flight."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from blink_runtime.shared_ring import SHARED_MEMORY

from .fake_server import _native, wait_for
from .native_build import build_program
from .test_faults import stream_body
from .test_http import post, receive_all, receive_until

SLOTS = 4
# `start_streams`' thousand tokens take 150 s: they are in flight until somebody is killed, and
# their slots come back sooner than that.
TOKEN_INTERVAL_US = 150_000


@contextmanager
def owner(name: str) -> Iterator[subprocess.Popen[str]]:
    """Run a ring's owner, which makes the ring."""
    arguments = [f"--name={name}", f"--slots={SLOTS}", "--front-ends=1"]
    command = [build_program("link_owner"), "--transport=shm", *arguments]
    with started([*command, f"--token-interval-us={TOKEN_INTERVAL_US}"], "owner ready") as process:
        yield process[0]


@contextmanager
def front_end(name: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a front end over the ring; gives its process and port."""
    command = [build_program("link_front_end"), "--transport=shm", f"--name={name}"]
    with started([*command, "--http-port=0"], "front end over") as (process, line):
        port = int(line.rsplit(":", 1)[1])
        wait_for(lambda: health(port) == 200, "the front end to be healthy")
        yield process, port


@contextmanager
def started(command: list[Any], sign: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(sign), line
        yield process, line
    finally:
        process.kill()
        process.wait()


def health(port: int) -> int:
    return httpx.get(f"http://127.0.0.1:{port}/health", timeout=300).status_code


def complete(port: int, prompt: str, **fields: int) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 50, **fields}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300)


def start_streams(port: int, count: int, stack: ExitStack) -> list[socket.socket]:
    connections = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port), timeout=300)
        stack.enter_context(connection)
        connection.sendall(post(stream_body("old", ignore_eos=True, max_tokens=1000)))
        assert receive_until(connection, b"data: {").startswith(b"HTTP/1.1 200 ")
        connections.append(connection)
    return connections


def check_all_slots(port: int, ring: Any) -> None:
    """Complete as many requests at once as there are slots.

    Slots of an earlier life come back one by one, each when it was seen empty for a while: first
    all that a single request takes together, then all to requests with texts of their own.
    """
    wait_for(lambda: complete(port, "x", n=SLOTS).status_code == 200, "all slots to be free")
    wait_for(lambda: not ring.slots(), "slots to be empty")
    wait_for(lambda: "blink_requests_running 0\n" in metrics(port), "requests to end")
    with ThreadPoolExecutor(SLOTS) as pool:
        answers = list(pool.map(lambda i: complete(port, f"new {i}"), range(SLOTS)))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == [
        f"new {i}" for i in range(SLOTS)
    ], [answer.text for answer in answers]


def metrics(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=300).text


@pytest.fixture
def ring_name() -> Iterator[str]:
    name = f"/test-killed-{os.getpid()}"  # of a family that no server's start clears
    yield name
    (SHARED_MEMORY / name.lstrip("/")).unlink(missing_ok=True)  # a killed owner leaves it


def test_front_end_is_killed_with_requests_in_flight(ring_name: str) -> None:
    # The bug: slots of the dead front end never come back, or the owner stumbles over them.
    with owner(ring_name) as owner_process, ExitStack() as stack:
        ring = _native.Ring.open(ring_name)
        for _ in range(3):
            with front_end(ring_name) as (process, port):
                start_streams(port, SLOTS, stack)
                assert len(ring.slots()) == SLOTS
                process.send_signal(signal.SIGKILL)
                process.wait()
            beats = ring.header()["heartbeat"]
            wait_for(lambda b=beats: ring.header()["heartbeat"] > b, "a heartbeat")  # type: ignore[misc]
            with front_end(ring_name) as (_, port):
                wait_for(lambda: not ring.slots(), "slots to come back")
                check_all_slots(port, ring)
        assert owner_process.poll() is None


def test_owner_is_killed_and_another_comes(ring_name: str) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(owner(ring_name))
        process, port = stack.enter_context(front_end(ring_name))
        streams = start_streams(port, SLOTS, stack)
        first.send_signal(signal.SIGKILL)
        for stream in streams:  # they end, and not as if they were whole
            rest = receive_all(stream)
            assert b'"finish_reason":"' not in rest
        wait_for(lambda: health(port) == 503, "the loss to be noticed")
        answer = complete(port, "x")
        assert answer.status_code == 503
        assert json.loads(answer.text)["error"]["code"] in ("unavailable", "stalled", "lost")
        first.wait()
        stack.enter_context(owner(ring_name))
        wait_for(lambda: health(port) == 200, "the new owner to be found")
        check_all_slots(port, _native.Ring.open(ring_name))
        assert process.poll() is None
