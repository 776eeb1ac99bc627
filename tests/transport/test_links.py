"""Two processes and a ring in shared memory between them: either may die, and comes back.

The same deaths over verbs: tests/rdma.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.runtime_frontend.native_build import build_program

_native = pytest.importorskip("blink_runtime._native", reason="the native module is not built")

from blink_runtime.shared_ring import SHARED_MEMORY  # noqa: E402

_numbers = itertools.count()
# `hang`'s thousand tokens take 20 s: it is in flight until somebody is killed.
SLOW = "--token-interval-us=20000"


class Link:
    """The programs of one ring, `link_owner` and `link_front_end`, and how to start them."""

    def __init__(self, stack: ExitStack, owner: Path, front_end: Path) -> None:
        self._stack = stack
        self._owner = owner
        self._front_end = front_end
        # Not of the family "/blink-": a server that starts clears what its dead have left.
        self.name = f"/test-link-{os.getpid()}-{next(_numbers)}"
        ring = SHARED_MEMORY / self.name.lstrip("/")
        stack.callback(ring.unlink, missing_ok=True)  # a killed owner leaves it

    def start_owner(self, *options: str) -> subprocess.Popen[str]:
        process = self._start(self._owner, "--transport=shm", f"--name={self.name}", *options)
        assert process.stdout is not None
        assert process.stdout.readline() == "owner ready\n"
        return process

    def start_front_end(self, *options: str) -> tuple[subprocess.Popen[str], httpx.Client]:
        process = self._start(self._front_end, f"--name={self.name}", *options)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, line + process.stdout.read()
        client = httpx.Client(base_url="http" + line.split("http")[1].strip(), timeout=300)
        return process, self._stack.enter_context(client)

    def wait_for_running(self, count: int) -> None:
        """Wait until the ring's owner has taken so many requests, of which none has ended."""
        ring = _native.Ring.open(self.name)
        wait_for(lambda: len(ring.slots()) == count, f"{count} requests in flight")

    def refused(self, *options: str) -> str:
        """Return what a front end says that may not come."""
        done = subprocess.run(
            [str(self._front_end), f"--name={self.name}", *options],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 1, done.stdout
        return done.stderr

    def _start(self, program: Path, *options: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(program), *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


@pytest.fixture
def link() -> Iterator[Link]:
    with ExitStack() as stack:
        yield Link(stack, build_program("link_owner"), build_program("link_front_end"))


def ask(client: httpx.Client, text: str) -> None:
    """Ask until a slot is free; the answer must be whole."""

    def answer() -> bool:
        response = client.post("/v1/completions", json={"prompt": text, "max_tokens": 300})
        if response.status_code == 429:
            return False
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == text
        return True

    wait_for(answer, f"an answer to {text!r}")


def hang(client: httpx.Client) -> int:
    """A long request, tried again while the ring is full: slots of an earlier life are looked at
    for a while before they are used. Return its status, 0 where the server went away."""
    body = {"prompt": "in flight", "max_tokens": 1000, "ignore_eos": True}
    try:
        while (status := client.post("/v1/completions", json=body).status_code) == 429:
            time.sleep(0.02)
        return status
    except httpx.HTTPError:
        return 0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


def health(client: httpx.Client) -> str:
    return str(client.get("/health").json()["status"])


def test_owner_dies_and_comes_back(link: Link) -> None:
    """The bug: slots of requests that went with the ring never used again, or a 200 for half an
    answer."""
    owner = link.start_owner(SLOW)
    _, client = link.start_front_end()
    wait_for(lambda: health(client) == "serving", "health")
    for life in range(3):
        ask(client, f"life {life}")
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(hang, client) for _ in range(3)]
            link.wait_for_running(3)
            owner.kill()
            assert [future.result() for future in running] == [503] * 3
        assert health(client) == "lost"
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
        owner = link.start_owner(SLOW)
        wait_for(lambda: health(client) == "serving", "recovery")
        for i in range(9):  # more than the range has slots
            ask(client, f"after life {life}, {i}")


def test_front_end_dies_and_comes_back(link: Link) -> None:
    owner = link.start_owner(SLOW)
    for life in range(3):
        front_end, client = link.start_front_end()
        wait_for(lambda c=client: health(c) == "serving", "health")  # type: ignore[misc]
        for i in range(9):
            ask(client, f"life {life}, {i}")
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(hang, client) for _ in range(3)]
            link.wait_for_running(3)
            front_end.kill()
            assert [future.result() for future in running] == [0] * 3
        front_end.wait()
    assert owner.poll() is None


def test_front_ends_share_a_ring(link: Link) -> None:
    link.start_owner("--bundle-id=5", "--front-ends=2", "--slots=5")
    _, first = link.start_front_end("--bundle-id=5")
    second_process, second = link.start_front_end("--bundle-id=5", "--front-end=1")
    for client in (first, second):
        wait_for(lambda c=client: health(c) == "serving", "health")  # type: ignore[misc]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: ask((first, second)[i % 2], f"request {i}"), range(60)))
    assert "is another process" in link.refused("--bundle-id=5")
    assert "indices start at 0" in link.refused("--bundle-id=5", "--front-end=2")
    assert "another bundle" in link.refused("--bundle-id=6", "--front-end=1")
    second_process.kill()
    second_process.wait()
    _, third = link.start_front_end("--bundle-id=5", "--front-end=1")
    wait_for(lambda: health(third) == "serving", "health")
    ask(third, "the range is free again")
    ask(first, "the other front end has seen nothing of it")


def test_nobody_is_there(link: Link) -> None:
    assert "cannot open" in link.refused()
    owner = link.start_owner()
    owner.kill()
    owner.wait()
    assert "the process that owned it has ended" in link.refused()
