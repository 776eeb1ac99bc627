"""HTTP itself, byte by byte: framing, limits, deadlines, keys, methods."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .fake_server import Server

BODY = b'{"prompt": "hello", "max_tokens": 20}'


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.front_end.port), timeout=120)


def receive_until(connection: socket.socket, end: bytes) -> bytes:
    """Read until `end` has come; the server must send it before it closes."""
    data = b""
    while end not in data:
        part = connection.recv(65536)
        assert part, data
        data += part
    return data


def receive_all(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def exchange(server: Server, request: bytes) -> bytes:
    with connect(server) as connection:
        connection.sendall(request)
        return receive_all(connection)


def exchange_late(server: Server, request: bytes) -> bytes:
    """Send a part of a request to a server with a short deadline, until that part was heard.

    Where this process gets no core between two of its lines nothing was sent in time, and the
    server closes without a word. Nor does it wait long for the rest of what it refused: a second.
    Whoever was faster than that has no excuse.
    """
    deadline = time.monotonic() + 300
    while True:
        begun = time.monotonic()
        answer = b""
        try:
            answer = exchange(server, request)
        except ConnectionError:
            if time.monotonic() - begun < 0.5:
                raise
        if answer or time.monotonic() - begun < 0.5:
            return answer
        assert time.monotonic() < deadline, f"never answered: {request[:100]!r}"


def post(body: bytes = BODY, *, extra: str = "", version: str = "1.1", close: bool = True) -> bytes:
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: application/json\r\n{extra}"
    )
    if close and version == "1.1":
        head += "Connection: close\r\n"
    return head.encode() + b"\r\n" + body


def split_response(data: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


def test_plain_post(server: Server) -> None:
    status, headers, body = split_response(exchange(server, post()))
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)
    assert headers["connection"] == "close"
    assert json.loads(body)["choices"][0]["text"] == "hello"


def test_request_in_single_bytes(server: Server) -> None:
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post():
            connection.send(bytes([byte]))
        assert split_response(receive_all(connection))[0] == 200


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    bodies = [f'{{"prompt": "answer {i}", "max_tokens": 20}}'.encode() for i in range(5)]
    requests = [post(body, close=i == 4) for i, body in enumerate(bodies)]
    data = exchange(server, b"".join(requests)).decode()
    places = [data.index(f"answer {i}") for i in range(5)]
    assert places == sorted(places)
    assert data.count("HTTP/1.1 200") == 5


def test_chunked_body(server: Server) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\n\r\n"
    )
    chunks = b"".join(b"%x\r\n%s\r\n" % (1, BODY[i : i + 1]) for i in range(len(BODY)))
    assert split_response(exchange(server, head + chunks + b"0\r\n\r\n"))[0] == 200


def test_http_1_0(server: Server) -> None:
    # Closed after the answer unless the client asks otherwise; a stream's end is the connection's.
    keep = post(version="1.0", extra="Connection: keep-alive\r\n")
    data = exchange(server, keep + post(version="1.0"))
    assert data.count(b"HTTP/1.0 200 OK") == 2
    assert data.count(b"Connection: keep-alive") == data.count(b"Connection: close") == 1
    status, headers, body = split_response(exchange(server, post(version="1.0")))
    assert status == 200
    assert json.loads(body)["choices"][0]["text"] == "hello"
    streamed = exchange(server, post(b'{"prompt": "hello", "stream": true}', version="1.0"))
    status, headers, body = split_response(streamed)
    assert "transfer-encoding" not in headers
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")


def test_expect_continue(server: Server) -> None:
    request = post(extra="Expect: 100-continue\r\n")
    head, body = request[: -len(BODY)], BODY
    with connect(server) as connection:
        connection.sendall(head)
        assert receive_until(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert split_response(receive_all(connection))[0] == 200
    assert split_response(exchange(server, post(extra="Expect: magic\r\n")))[0] == 417


def test_head_and_methods(server: Server) -> None:
    response = server.http.head("/health")
    assert response.status_code == 200
    assert response.content == b""
    assert int(response.headers["content-length"]) > 0
    for method, path, allow in (
        ("GET", "/v1/completions", "POST, OPTIONS"),
        ("DELETE", "/v1/chat/completions", "POST, OPTIONS"),
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("BREW", "/v1/models", "GET, HEAD, OPTIONS"),
    ):
        response = server.http.request(method, path)
        assert response.status_code == 405
        assert response.json()["error"]["code"] == "method_not_allowed"
        assert response.headers["allow"] == allow
        response = server.http.options(path)
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["allow"] == allow
    assert b" 204 " in exchange(server, b"OPTIONS * HTTP/1.0\r\n\r\n")
    response = server.http.get("/nowhere")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    assert not any("access-control" in name for name in response.headers)


def test_absolute_targets(server: Server) -> None:
    data = exchange(server, b"GET http://other:1/health?x HTTP/1.0\r\n\r\n")
    assert split_response(data)[0] == 200


def test_query_strings_are_ignored(server: Server) -> None:
    assert server.http.get("/health?x=1").status_code == 200


def test_chat_page(server: Server) -> None:
    response = server.http.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in response.text
    assert response.text.rstrip().endswith("</html>")


def test_host_that_is_no_address_is_named(make_server: Callable[..., Server]) -> None:
    """The bug: it said "Invalid argument"."""
    with pytest.raises(RuntimeError, match=r"'nosuch\.invalid' is no IP address"):
        make_server(host="nosuch.invalid")


def test_content_type(server: Server) -> None:
    # Forms and plain text could come from any web page a user visits.
    for kind, status in (
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
    ):
        response = server.http.post("/v1/completions", content=BODY, headers={"Content-Type": kind})
        assert response.status_code == status, kind
    assert server.http.post("/v1/completions", content=BODY).status_code == 200


@pytest.mark.parametrize(
    ("encoding", "status"), [("gzip", 415), ("br", 415), ("identity", 200), ("IDENTITY", 200)]
)
def test_content_encoding(server: Server, encoding: str, status: int) -> None:
    """The bug: the field was not looked at, so that a compressed body was called no JSON."""
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    response = server.http.post("/v1/completions", content=BODY, headers=headers)
    assert response.status_code == status
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_content_encoding"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/0.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),  # TLS on a plain port
    ],
)
def test_malformed_requests(server: Server, request_bytes: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(request_bytes)
        data = receive_all(connection)
    status, headers, body = split_response(data)
    assert status in (400, 501, 505)
    assert headers["connection"] == "close"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert server.http.get("/health").status_code == 200


def test_nothing_is_smuggled(server: Server) -> None:
    """The bug: a request hidden in the body of one that two readers frame differently."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    for fields in (
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 4\r\nContent-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"X: y\r\n Transfer-Encoding: chunked\r\n",
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n"
        data = exchange(server, head + b"0\r\n\r\n" + hidden)
        assert data.count(b"HTTP/1.1 ") == 1, fields
        assert split_response(data)[0] == 400


def metric_values(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            yield name, float(value)


def test_metrics_are_prometheus_text(server: Server) -> None:
    before = dict(metric_values(server.http.get("/metrics").text))
    server.complete("count me")
    text = server.http.get("/metrics").text
    after = dict(metric_values(text))
    assert after["blink_healthy"] == 1
    assert after["blink_output_tokens_total"] - before["blink_output_tokens_total"] == 9
    assert after["blink_ttft_seconds_count"] - before["blink_ttft_seconds_count"] == 1
    assert after["blink_itl_seconds_count"] - before["blink_itl_seconds_count"] == 8
    stopped = 'blink_requests_total{finish_reason="stop"}'
    assert after[stopped] - before[stopped] == 1
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    base = {
        name.split("{")[0].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for name in after
    }
    assert base == names
    buckets = [v for n, v in after.items() if n.startswith("blink_ttft_seconds_bucket")]
    assert buckets == sorted(buckets)


def test_garbage(server: Server) -> None:
    """Random bytes and mutated requests: any answer or none, but the server lives."""
    import random

    random.seed(7)
    seeds: list[Any] = [post(), post(b'{"prompt": [1, 2, 3], "stop": ["x"], "seed": 5}')]
    for _ in range(150):
        data = bytearray(random.choice(seeds))
        for _ in range(random.randrange(1, 8)):
            place = random.randrange(len(data))
            kind = random.randrange(3)
            if kind == 0:
                data[place] = random.randrange(256)
            elif kind == 1:
                del data[place : place + random.randrange(1, 9)]
            else:
                data[place:place] = bytes(random.randrange(256) for _ in range(3))
        with connect(server) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            receive_all(connection)
    assert server.complete("alive").json()["choices"][0]["text"] == "alive"
    server.wait_until_empty()
