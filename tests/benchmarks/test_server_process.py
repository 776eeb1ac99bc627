"""Servers under measurement, with scripts in their place."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.server_process import ServerError, ServerProcess

READY = """
import json, sys, threading
print("loading ...", flush=True)
print(json.dumps({"event": "load", "graphs_s": 1.5}), flush=True)
print(json.dumps({"event": "ready", "url": "http://127.0.0.1:1"}), flush=True)
"""
ENDS = READY + "sys.stdin.read(); print(json.dumps({'event': 'end', 'stopped': True}), flush=True)"
TALKS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("stopping", flush=True), sys.exit(0)))
print("ready after 1.0 s: http://127.0.0.1:4567/  (ring /blink-1)", flush=True)
signal.pause()
"""
DIES = "import sys; print('no GPU here', file=sys.stderr); sys.exit(1)"
STAYS = READY + "\nimport time\nwhile True: time.sleep(1)"


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_events_are_kept() -> None:
    core = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(0)
    with ServerProcess(script(ENDS), core) as server:
        assert server.url == "http://127.0.0.1:1"
        assert server.events["load"] == {"graphs_s": 1.5}
        assert os.sched_getaffinity(server.pid) == core
        assert os.sched_getaffinity(0) == before
        server.allow_cores(before)
        assert os.sched_getaffinity(server.pid) == before
        assert server.end() == {"stopped": True}
    assert server.process.returncode == 0


def test_blink_runtime_is_understood() -> None:
    with ServerProcess(script(TALKS)) as server:
        assert server.url == "http://127.0.0.1:4567"
        server.end()
    assert server.process.returncode == 0
    assert server.output[-1] == "stopping\n"


def test_a_server_that_dies_says_why() -> None:
    with pytest.raises(ServerError, match="no GPU here"):
        ServerProcess(script(DIES))


def test_a_server_that_never_starts_is_killed() -> None:
    for timeout_s in (2, 10, 100):  # a shell says so in milliseconds, if it gets a core
        with pytest.raises(ServerError, match="the server ended") as caught:
            ServerProcess(["sh", "-c", "echo loading; exec sleep 600"], start_timeout_s=timeout_s)
        if "loading" in str(caught.value):
            return
    raise AssertionError("what it said is not told")


def test_a_server_that_stays_is_killed() -> None:
    """The bug it guards: a hung server that keeps the whole run waiting."""
    server = ServerProcess(script(STAYS))
    with pytest.raises(ServerError, match="did not end"):
        server.end(0.5)
    assert server.process.returncode != 0
