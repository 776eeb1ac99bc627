"""What a server takes before it loads anything: its port, keys, certificate, log, and a link's."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from blink_runtime import serve_roles
from blink_runtime.front_end import FrontEnd, FrontEndOptions, open_entrance
from blink_runtime.process_control import reload_on_signal, stop_event
from blink_runtime.serve import serve
from blink_runtime.serve_config import ServeConfig
from blink_runtime.serve_roles import LinkConfig, serve_dpu, serve_gpu
from blinkc.bundle.front_end_copy import copy_front_end
from blinkc.errors import BlinkError
from tests.bundle.small_bundle import write_small_bundle

from .certificates import make_certificate
from .fake_server import ByteCodec, Server, _native, ring_sizes
from .test_gpu_memory_ring import write_gpu_bundle
from .test_signals import own_signals

__all__ = ["own_signals"]  # a fixture for each test here


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose code is not real: whoever loads it finds that out, or hashes it."""
    path = tmp_path_factory.mktemp("small") / "bundle"
    write_small_bundle(path)
    return path


def serve_here(role: str, bundle: Path, config: ServeConfig) -> str:
    """Start a role that cannot serve; return why, having seen that nothing was loaded before."""
    link = LinkConfig(transport="shm", address=f"/blink-nobody-{os.getpid()}", wait_s=0)
    with pytest.raises(BlinkError) as caught:
        serve(bundle, config) if role == "run" else serve_dpu(bundle, config, link)
    return str(caught.value)


@pytest.mark.parametrize("role", ["run", "serve-dpu"])
def test_a_taken_port_is_said_before_anything_is_loaded(
    role: str, bundle: Path, taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bug: it was said after the model had been loaded, or the ring waited for."""
    message = serve_here(role, bundle, ServeConfig(port=taken))
    assert f"cannot listen on 127.0.0.1:{taken}" in message and "another process" in message
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("role", ["run", "serve-dpu"])
def test_bad_files_are_said_before_anything_is_loaded(
    role: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, words = tmp_path / "empty", tmp_path / "words"
    empty.write_text("# nobody yet\n", encoding="utf-8")
    words.write_text("three words here\n", encoding="utf-8")
    good = make_certificate(tmp_path, "good")
    for options, said in (
        ({"api_key_file": empty}, f"API keys: {empty} holds none"),
        ({"api_key_file": words}, f"{words}:1: more than a name and a key"),
        ({"api_key_file": tmp_path / "no"}, f"{tmp_path / 'no'}: No such file"),
        ({"api_key_file": tmp_path}, f"{tmp_path}: Is a directory"),
        ({"access_log": str(tmp_path)}, f"cannot open the access log: {tmp_path}: Is a directory"),
        ({"access_log": str(tmp_path / "no/log")}, "cannot open the access log"),
        ({"tls_certificate": good.certificate, "tls_key": empty}, f"TLS key {empty}"),
        ({"tls_certificate": empty, "tls_key": good.key}, f"TLS certificate {empty}"),
        ({"host": "example.org"}, "'example.org' is no IP address"),
        ({"host": "203.0.113.1"}, "this machine has no such address"),
        ({"api_keys": ("two words",)}, "key-1: a key must be of visible ASCII"),
    ):
        message = serve_here(role, bundle, ServeConfig(**{"port": 0, **options}))
        assert said in message, options
        assert capsys.readouterr().out == "", options


def test_a_certificate_without_its_key_is_refused_in_the_options_words(tmp_path: Path) -> None:
    with pytest.raises(BlinkError, match="--tls-cert and --tls-key need each other"):
        ServeConfig(tls_certificate=tmp_path)


def test_the_command_says_it_in_one_line(bundle: Path, taken: int) -> None:
    command = [sys.executable, "-m", "blink_runtime.cli", "run", str(bundle), "--port", str(taken)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("blink-runtime: cannot listen on ")
    assert done.stderr.count("\n") == 1


def test_a_log_whose_pipe_nobody_reads(tmp_path: Path) -> None:
    """The bug: the server waited for a reader, without a word, before it served."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RuntimeError, match=f"{pipe}: a pipe that nobody reads"):
        open_entrance(FrontEndOptions(port=0, access_log=str(pipe)))


def free_port() -> int:
    """Return a port that nobody else takes by chance: none of those that the system hands out to
    whoever asks for any, such as other tests' clients."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    for _ in range(1000):
        port = random.SystemRandom().randrange(10_000, max(int(given[0]), 20_000))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def test_a_held_port_takes_nobody_until_it_is_served(bundle: Path) -> None:
    """Nobody connects to a server that still loads, and no other server gets its port."""
    options = FrontEndOptions(port=free_port())
    entrance = open_entrance(options)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", options.port), timeout=10)
    with pytest.raises(RuntimeError, match="another process"):
        open_entrance(options)
    ring = _native.Ring.create(f"/blink-test-{os.getpid()}-entrance", ring_sizes())
    with FrontEnd(ring, ByteCodec(), None, options, entrance) as front_end:
        assert front_end.port == options.port
        assert httpx.get(f"{front_end.url}/health", timeout=60).json() == {"status": "starting"}
        with pytest.raises(RuntimeError, match="a FrontEnd has it"):
            FrontEnd(ring, ByteCodec(), None, options, entrance)
    # Connections of that server may still be ending: they hold up no next one.
    open_entrance(options).close()


def test_a_log_rotated_while_the_model_was_loaded(
    make_server: Callable[..., Server], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is open from the start on, so a hang-up before the first request counts as well."""
    stop_event()
    log = tmp_path / "log"
    server = make_server(access_log=str(log))
    log.rename(tmp_path / "old")
    os.kill(os.getpid(), signal.SIGHUP)
    assert not log.exists()
    reload_on_signal(server.front_end)
    assert log.exists()
    assert "read again" in capsys.readouterr().out


@pytest.mark.parametrize("role", ["run", "serve-gpu"])
def test_options_of_another_target_are_refused(
    role: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bug: they were ignored in silence."""
    write_gpu_bundle(tmp_path / "gpu", prompt=(1, 2))
    link = LinkConfig(transport="shm", address=f"/blink-test-options-{os.getpid()}")
    for path, config, said in (
        (bundle, ServeConfig(port=0, scheduler="host"), "--scheduler host: on cpu"),
        (tmp_path / "gpu", ServeConfig(port=0, num_threads=3), "--threads 3: sm_90"),
    ):
        with pytest.raises(BlinkError, match=said):
            serve(path, config) if role == "run" else serve_gpu(path, config, link)
        assert capsys.readouterr().out == ""


def test_a_name_that_another_owner_has(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"/blink-test-taken-{os.getpid()}"
    owner = _native.Ring.create(name, ring_sizes())
    with pytest.raises(BlinkError, match="another process has it"):
        serve_gpu(bundle, ServeConfig(), LinkConfig(transport="shm", address=name))
    assert capsys.readouterr().out == ""
    del owner
    _native.Ring.check_name(name)


def test_a_card_that_is_not_here(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if _native.rdma_device()[0]:
        pytest.skip("this machine has an RDMA device")
    with pytest.raises(BlinkError, match="hint: "):
        serve_gpu(bundle, ServeConfig(), LinkConfig(transport="verbs", address="127.0.0.1:0"))
    assert capsys.readouterr().out == ""


def test_an_address_that_is_not_of_this_machine(bundle: Path) -> None:
    """The bug: the hint asked for another serve-gpu there."""
    if _native.rdma_device()[0]:
        pytest.skip("this machine has an RDMA device")
    link = LinkConfig(transport="verbs", address="192.0.2.1:7471")  # RFC 5737: nobody's
    with pytest.raises(BlinkError) as raised:
        serve_gpu(bundle, ServeConfig(), link)
    assert "address of this machine" in raised.value.hint


@pytest.mark.parametrize("option", [{"device": "mlx5_0"}, {"gid_index": 0}])
def test_options_of_another_transport_are_refused(option: dict[str, Any]) -> None:
    """The bug: they were ignored in silence."""
    with pytest.raises(BlinkError, match="--transport shm is none"):
        LinkConfig(transport="shm", address="/blink-a", **option)


def test_a_front_end_s_copy_is_no_bundle_to_run(bundle: Path, tmp_path: Path) -> None:
    copy_front_end(bundle, tmp_path / "slim")
    with pytest.raises(BlinkError, match="is missing") as raised:
        serve(tmp_path / "slim", ServeConfig(port=0))
    assert "is for serve-dpu alone" in raised.value.hint


@pytest.mark.parametrize("role", ["run", "serve-dpu"])
def test_a_bundle_without_a_tokenizer_is_refused_before_its_weights_are_read(
    role: str, bundle: Path
) -> None:
    """The bug: it was refused when all was loaded, or the ring waited for."""
    assert f"{bundle} has no tokenizer" in serve_here(role, bundle, ServeConfig(port=0))


def test_serve_dpu_holds_its_port_while_it_waits(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_roles, "load_text", lambda _: None)  # the small bundle has none
    copy_front_end(bundle, tmp_path / "slim")
    config = ServeConfig(port=free_port())
    address = f"/blink-nobody-{os.getpid()}"
    link = LinkConfig(transport="shm", address=address, wait_s=3600)
    stop = stop_event()
    waits = threading.Event()

    def hear(text: str) -> None:
        if text.startswith("waiting"):
            waits.set()

    def look() -> str:
        try:
            assert waits.wait(300)
            with pytest.raises(RuntimeError) as caught:
                open_entrance(FrontEndOptions(port=config.port))
            return str(caught.value)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(serve_roles, "say", hear)
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(look)
        assert serve_dpu(tmp_path / "slim", config, link) == 0
        assert not stop.is_set() and "another process" in said.result()
