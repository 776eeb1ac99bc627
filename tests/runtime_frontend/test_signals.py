"""Signals of a serving process: SIGHUP reads files again, SIGTERM drains, a second one ends it."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from blink_runtime import _native
from blink_runtime.front_end import FrontEnd, FrontEndOptions, open_entrance
from blink_runtime.process_control import StopEvent, drain, reload_on_signal, say, stop_event

from .fake_server import ByteCodec, Server, ring_sizes, wait_for
from .test_http import connect, post


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_hang_up_reloads(
    make_server: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice first-key\n", encoding="utf-8")
    server = make_server(api_key_file=str(keys))

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return server.http.get("/v1/models", headers=headers).status_code

    reload_on_signal(server.front_end)
    keys.write_text("alice second-key\n", encoding="utf-8")
    os.kill(os.getpid(), signal.SIGHUP)
    assert (status("first-key"), status("second-key")) == (401, 200)
    assert "read again" in capsys.readouterr().out
    keys.unlink()
    os.kill(os.getpid(), signal.SIGHUP)
    said = capsys.readouterr().out
    assert "the old ones stay" in said and str(keys) in said
    assert status("second-key") == 200


def test_hang_up_during_the_start_ends_nothing() -> None:
    """The bug: a log rotated while the model was loaded ended the process."""
    stop = stop_event()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.is_set()


def test_keys_that_changed_during_the_start_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bug: the front end did not serve yet, so it dropped what it had read, and said that it
    had been read."""
    stop_event()
    keys = tmp_path / "keys"
    keys.write_text("alice first-key\n", encoding="utf-8")
    options = FrontEndOptions(port=0, api_key_file=str(keys))
    entrance = open_entrance(options)
    keys.write_text("alice second-key\n", encoding="utf-8")
    os.kill(os.getpid(), signal.SIGHUP)
    ring = _native.Ring.create(f"/blink-test-early-{os.getpid()}", ring_sizes())
    front_end = FrontEnd(ring, ByteCodec(), None, options, entrance)
    reload_on_signal(front_end)
    assert "read again" in capsys.readouterr().out
    with front_end:

        def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.get(f"{front_end.url}/v1/models", headers=headers, timeout=60).status_code

        assert (status("first-key"), status("second-key")) == (401, 200)


def test_a_signal_at_any_moment_of_a_wait_is_seen() -> None:
    """The bug: its handler wanted the lock that the waiting thread, the same one, held."""
    for moment in range(1, 1000):
        stop = stop_event()
        if not interrupt_at(moment, stop):
            break
        assert stop.is_set() and stop.wait() and stop.wait(0)
    assert moment > 10 and not stop.is_set()


def interrupt_at(moment: int, stop: StopEvent) -> bool:
    """Wait shortly, with a signal in front of that operation of the interpreter; False: the wait
    has not so many."""
    left = moment
    earlier = sys.gettrace()

    def count(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if what == "opcode":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return count

    sys.settrace(count)
    try:
        stop.wait(0.001)
    finally:
        sys.settrace(earlier)
    return left <= 0


def test_two_signals_at_once_are_seen_as_one() -> None:
    """The second comes while the first one's handler runs: in front of, or behind, its own mark."""
    stop = StopEvent()
    stop.set()
    stop.set()
    assert stop.wait() and stop.wait()


def test_a_second_signal_ends_a_server_that_drains(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: it was handled once the drain was over, as the native code was waited in."""

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", leave)
    server = make_server(owner={"token_interval_us": 500_000}, sizes={"max_output_tokens": 2000})
    body = b'{"prompt": "x", "max_tokens": 2000, "ignore_eos": true}'  # would take 1000 s
    stop = stop_event()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.is_set()
    with connect(server) as connection:
        connection.sendall(post(body))
        wait_for(lambda: bool(server.ring.slots()), "the request to be in the ring")
        with ThreadPoolExecutor(1) as pool:
            signalled = pool.submit(signal_once_it_drains)
            with pytest.raises(SystemExit, match="143"):
                drain(server.front_end, 600.0)
            signalled.result()
        assert server.front_end.stats()["requests_running"] == 1
    for thread in threading.enumerate():  # the client has left, so that the drain ends
        if thread.name == "blink-drain":
            thread.join()


def signal_once_it_drains() -> None:
    wait_for(lambda: any(t.name == "blink-drain" for t in threading.enumerate()), "the drain")
    os.kill(os.getpid(), signal.SIGTERM)


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_output_that_is_full_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: the next word about a token served, or a file read again, ended the process."""
    output = FullDisk()
    monkeypatch.setattr(sys, "stdout", output)
    say("ready")
    assert output.getvalue() == "ready\n"


class InterruptedOutput(io.RawIOBase):
    """Takes everything, and a signal comes while it does."""

    def __init__(self) -> None:
        self.taken = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        self.taken += bytes(data)
        return len(data)


def test_a_hang_up_while_something_is_said_ends_no_server(
    make_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: what its handler said raised an error, in the middle of what was being said."""
    log = tmp_path / "log"
    server = make_server(access_log=str(log))
    reload_on_signal(server.front_end)
    log.unlink()
    output = InterruptedOutput()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(output)))
    say("ready")
    monkeypatch.undo()
    assert output.taken.startswith(b"ready\n")
    assert log.exists()
