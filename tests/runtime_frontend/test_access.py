"""Who may ask, from where, and what is written down: keys, origins, request ids, the access log."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .fake_server import NAN, Server, frozen, wait_for
from .test_http import (
    BODY,
    connect,
    exchange,
    exchange_late,
    post,
    receive_all,
    split_response,
)


@pytest.fixture(scope="module")
def locked(make_server: Callable[..., Server]) -> Server:
    return make_server(api_keys=("first-key", "second-key"))


def test_api_keys(locked: Server) -> None:
    for key, status in (
        ("Bearer first-key", 200),
        ("bearer second-key", 200),
        ("Bearer first-ke", 401),
        ("Bearer first-keyx", 401),
        ("Bearer first-keyfirst-key", 401),
        ("Bearer", 401),
        ("first-key", 401),
        ("Basic first-key", 401),
        (None, 401),
    ):
        headers = {"Authorization": key} if key is not None else {}
        response = locked.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert response.status_code == status, key
        if status == 401:
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
    assert locked.http.get("/v1/models").status_code == 401
    for path in ("/health", "/metrics", "/openapi.json", "/"):
        assert locked.http.get(path).status_code == 200


def test_without_a_key_no_large_body_is_read(locked: Server) -> None:
    for field in (b"Content-Length: 1000000\r\n", b"Transfer-Encoding: chunked\r\n"):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + field
        assert split_response(exchange(locked, head + b"\r\n"))[0] == 401
        # Nor is it asked for.
        data = exchange(locked, head + b"Expect: 100-continue\r\n\r\n")
        assert split_response(data)[0] == 401


def test_keys_are_read_again(make_server: Callable[..., Server], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# who may\nalice key-of-alice\n", encoding="utf-8")
    server = make_server(api_key_file=str(keys))

    def statuses() -> list[int]:
        answers = (
            server.http.get("/v1/models", headers={"Authorization": f"Bearer key-of-{name}"})
            for name in ("alice", "bob")
        )
        return [answer.status_code for answer in answers]

    assert statuses() == [200, 401]
    keys.write_text("bob key-of-bob\n", encoding="utf-8")
    assert statuses() == [200, 401]
    server.front_end.reload()
    assert statuses() == [401, 200]
    for bad in ("three words here\n", "bob key-of-bob\nbob other\n"):
        keys.write_text(bad, encoding="utf-8")
        with pytest.raises(RuntimeError, match=f"{keys}:") as caught:
            server.front_end.reload()
        assert "key-of" not in str(caught.value)
        assert statuses() == [401, 200]  # the old ones stay
    # The bug: a file that was just being written locked everybody out, without a word.
    for empty in ("", "# all gone\n"):
        keys.write_text(empty, encoding="utf-8")
        with pytest.raises(RuntimeError, match=f"API keys: {keys} holds none"):
            server.front_end.reload()
        assert statuses() == [401, 200]
        with pytest.raises(RuntimeError, match="holds none"):
            make_server(api_key_file=str(keys))
    with pytest.raises(RuntimeError, match="missing"):
        make_server(api_key_file=str(tmp_path / "missing"))


def test_request_ids(server: Server) -> None:
    response = server.http.get("/health", headers={"X-Request-Id": "mine-1.2:3_4"})
    assert response.headers["x-request-id"] == "mine-1.2:3_4"
    made = set()
    for sent in ("", "a b", "x" * 65, '"quoted"', "a,b"):
        response = server.http.get("/health", headers={"X-Request-Id": sent})
        made.add(response.headers["x-request-id"])
    assert len(made) == 5
    assert all(name.startswith("req-") and len(name) == 36 for name in made)
    # Streams, refusals and requests that are no HTTP have one too.
    stream = exchange(server, post(b'{"prompt": "x", "stream": true}', extra="X-Request-Id: s\r\n"))
    assert split_response(stream)[1]["x-request-id"] == "s"
    for request in (b"nonsense\r\n", post(b"{", extra="X-Request-Id: bad\r\n")):
        assert split_response(exchange(server, request))[1]["x-request-id"]


ORIGIN = "http://page.example"


@pytest.mark.parametrize("allowed", [(), (ORIGIN, "https://other.example"), ("*",)])
def test_cors(make_server: Callable[..., Server], allowed: tuple[str, ...]) -> None:
    server = make_server(cors_origins=allowed)
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    answer = server.http.options("/v1/completions", headers=preflight)
    assert answer.status_code == 204
    asked = server.http.post("/v1/completions", content=BODY, headers={"Origin": ORIGIN})
    for response in (answer, asked):
        assert response.headers.get("access-control-allow-origin") == (ORIGIN if allowed else None)
        assert response.headers.get("vary") == ("Origin" if allowed else None)
    assert ("access-control-allow-headers" in answer.headers) == bool(allowed)
    assert asked.status_code == (200 if allowed else 403)
    if not allowed:
        assert asked.json()["error"]["code"] == "origin_not_allowed"
        assert "--cors-origin" in asked.json()["error"]["message"]
    foreign = server.http.post("/v1/completions", content=BODY, headers={"Origin": "null"})
    assert foreign.status_code == (200 if allowed == ("*",) else 403)
    assert ("access-control-allow-origin" in foreign.headers) == (allowed == ("*",))
    # The page that this server itself sends, and what is no page.
    own = server.http.post(
        "/v1/completions", content=BODY, headers={"Origin": server.front_end.url}
    )
    assert own.status_code == 200
    assert server.http.post("/v1/completions", content=BODY).status_code == 200


def log_of(path: Path, count: int) -> list[dict[str, Any]]:
    """Wait for `count` whole lines."""
    wait_for(lambda: path.read_text().count("\n") >= count, f"{count} lines of the log")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_access_log(make_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    server = make_server(api_keys=("very-secret",), access_log=str(path))
    key = {"Authorization": "Bearer very-secret"}
    begun_ns = time.monotonic_ns()
    with httpx.Client(base_url=server.front_end.url, headers=key, timeout=300) as client:
        client.get("/health?token=very-secret", headers={"X-Request-Id": "one"})
        client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 20})
        body = {"prompt": "hello", "max_tokens": 3, "stream": True}
        client.post("/v1/completions", json=body)
        client.post("/v1/completions", json={"prompt": [65, NAN], "stream": True, "max_tokens": 9})
    server.http.post("/v1/completions", json={"prompt": "x"})
    exchange(server, b"nonsense\r\n")
    lines = log_of(path, 6)
    elapsed_us = (time.monotonic_ns() - begun_ns) / 1000
    assert "very-secret" not in path.read_text()
    health, whole, stream, failed, refused, nonsense = lines
    assert {k: health[k] for k in ("id", "peer", "method", "path", "status", "complete")} == {
        "id": "one", "peer": "127.0.0.1", "method": "GET", "path": "/health", "status": 200,
        "complete": True,
    }  # fmt: skip
    assert health["key"] == whole["key"] == "key-1"
    assert "prompt_tokens" not in health and "key" not in refused
    assert (whole["prompt_tokens"], whole["output_tokens"]) == (5, 6)
    assert (stream["prompt_tokens"], stream["output_tokens"]) == (5, 3)
    assert 0 < stream["ttft_us"] <= stream["e2e_us"] <= elapsed_us
    assert stream["sent_bytes"] > stream["received_bytes"] > 0
    assert (failed["status"], failed["complete"]) == (200, True)  # it ends with an error event
    assert [line["status"] for line in (refused, nonsense)] == [401, 400]
    assert (nonsense["method"], nonsense["path"]) == ("-", "")
    assert lines == sorted(lines, key=lambda line: line["time"])
    # Rotation: what comes later goes into a new file.
    path.rename(tmp_path / "old.log")
    server.front_end.reload()
    server.http.get("/health")
    assert [line["path"] for line in log_of(path, 1)] == ["/health"]
    assert "blink_access_log_dropped_total 0" in server.http.get("/metrics").text


def test_who_leaves_is_in_the_log(make_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    # The first token comes at once, the second in ten minutes.
    server = make_server(
        owner={"token_interval_us": 600_000_000}, api_keys=("very-secret",), access_log=str(path)
    )
    with connect(server) as connection:
        body = b'{"prompt": [65, 66, 67], "max_tokens": 20}'
        connection.sendall(post(body, extra="Authorization: Bearer very-secret\r\n"))
        wait_for(lambda: server.front_end.stats()["output_tokens"] == 1, "the first token")
        connection.close()
        (left,) = log_of(path, 1)
    assert (left["status"], left["complete"], left["output_tokens"]) == (499, False, 1)
    assert (left["key"], left["path"]) == ("key-1", "/v1/completions")
    assert "very-secret" not in path.read_text()


def test_who_is_late_is_in_the_log(make_server: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    server = make_server(access_log=str(path), header_timeout_ms=1000)
    assert split_response(exchange_late(server, b"GET /slow"))[0] == 408
    for late in log_of(path, 1):
        assert (late["status"], late["complete"]) == (408, True)


def test_log_that_nobody_reads(make_server: Callable[..., Server], tmp_path: Path) -> None:
    """The bug: a full disk or a stuck pipe holds up the requests."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        server = make_server(access_log=str(pipe))
        with connect(server) as connection:
            request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            connection.sendall(request * 1500)  # far over the 64 KiB of a pipe
            received = b""
            while received.count(b"HTTP/1.1 200") < 1500:
                received += connection.recv(1 << 20)
    finally:
        os.close(reader)


def test_draining(make_server: Callable[..., Server]) -> None:
    server = make_server(owner={"token_interval_us": 5000}, header_timeout_ms=600_000)
    long = post(b'{"prompt": "%s", "max_tokens": 401}' % (b"A" * 400), close=False)
    with (
        connect(server) as idle,
        connect(server) as running,
        connect(server) as beginning,
        ThreadPoolExecutor(1) as pool,
    ):
        beginning.sendall(post(close=False)[:30])
        with frozen(server.owner):
            running.sendall(long)
            server.wait_for_running(1)
            wait_for(lambda: server.front_end.stats()["connections_open"] == 3, "connections")
            drained = pool.submit(server.front_end.close, 600.0)
            assert idle.recv(1) == b""  # nothing was asked there
            with connect(server) as late:  # who asks now is told, not left alone
                late.sendall(post(close=False))
                status, headers, body = split_response(receive_all(late))
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            assert json.loads(body)["error"]["code"] == "stopping"
            with connect(server) as probe:
                probe.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b'{"status":"stopping"}' in receive_all(probe)
            beginning.sendall(post(close=False)[30:])
            assert split_response(receive_all(beginning))[0] == 503
        status, headers, body = split_response(receive_all(running))
        assert (status, headers["connection"]) == (200, "close")
        assert json.loads(body)["choices"][0]["text"] == "A" * 400
        drained.result()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.front_end.port))


def test_draining_is_bounded(make_server: Callable[..., Server]) -> None:
    server = make_server(owner={"token_interval_us": 50_000}, sizes={"max_output_tokens": 2000})
    body = b'{"prompt": "x", "max_tokens": 2000, "ignore_eos": true}'  # would take 100 s
    with connect(server) as connection:
        connection.sendall(post(body))
        wait_for(lambda: bool(server.ring.slots()), "the request to be in the ring")
        server.front_end.close(0.3)
        assert split_response(receive_all(connection))[0] == 503
