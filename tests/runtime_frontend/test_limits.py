"""Every row of the table of limits in runtime/frontend/README.md, at its edge and past it."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from .fake_server import Server, frozen, wait_for
from .native_build import ROOT
from .test_http import (
    BODY,
    connect,
    exchange,
    exchange_late,
    post,
    receive_all,
    split_response,
)

README = ROOT / "runtime" / "frontend" / "README.md"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
LONG = post(b'{"prompt": "x", "max_tokens": 100, "ignore_eos": true}')
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def small(make_server: Callable[..., Server]) -> Server:
    """A server with small limits."""
    return make_server(
        sizes={"num_slots": 4, "max_seqlen": 64, "max_prompt_tokens": 64},
        body_timeout_ms=600_000,
        max_header_bytes=2048,
        max_headers=20,
        max_body_bytes=200_000,
        max_total_body_bytes=300_000,
        max_connections=6,
        max_connections_per_address=4,
    )


@pytest.fixture(scope="module")
def hasty(make_server: Callable[..., Server]) -> Server:
    """A server with short deadlines: only for who means to miss them."""
    return make_server(header_timeout_ms=700, body_timeout_ms=700)


def answer_of(connection: socket.socket) -> tuple[int, str]:
    """The status and the code of the error that the server sends before it closes."""
    status, _, body = split_response(receive_all(connection))
    return status, json.loads(body)["error"]["code"] if status >= 400 else ""


def answer_to(server: Server, request: bytes) -> tuple[int, str]:
    with connect(server) as connection:
        connection.sendall(request)
        return answer_of(connection)


def late_answer_to(server: Server, request: bytes) -> tuple[int, str]:
    """As `answer_to`, to what may come too late itself: see `exchange_late`."""
    status, _, body = split_response(exchange_late(server, request))
    return status, json.loads(body)["error"]["code"]


def wait_for_no_connections(server: Server) -> None:
    server.http.close()
    wait_for(lambda: server.front_end.stats()["connections_open"] == 0, "connections to end")


def check_connections(make_server: Callable[..., Server]) -> None:
    server = make_server(max_connections=3)
    wait_for_no_connections(server)
    held = [connect(server) for _ in range(3)]
    try:
        wait_for(lambda: server.front_end.stats()["connections_open"] == 3, "connections")
        status, headers, body = split_response(exchange(server, b""))
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["code"] == "too_many_connections"
    finally:
        for connection in held:
            connection.close()
    wait_for_no_connections(server)
    assert answer_to(server, GET + b"\r\n")[0] == 200


def check_connections_of_an_address(small: Server) -> None:
    wait_for_no_connections(small)
    held = [connect(small) for _ in range(4)]
    try:
        wait_for(lambda: small.front_end.stats()["connections_open"] == 4, "connections")
        assert answer_to(small, b"") == (503, "too_many_connections")
        # Somebody else is not concerned.
        other = socket.create_connection(
            ("127.0.0.1", small.front_end.port), timeout=120, source_address=("127.0.0.2", 0)
        )
        with other:
            other.sendall(GET + b"\r\n")
            assert answer_of(other)[0] == 200
    finally:
        for connection in held:
            connection.close()
    wait_for_no_connections(small)


def check_header_bytes(small: Server) -> None:
    room = 2048 - len(GET + b"X: \r\n\r\n")
    assert answer_to(small, GET + b"X: " + b"y" * room + b"\r\n\r\n")[0] == 200
    large = GET + b"X: " + b"y" * (room + 1) + b"\r\n\r\n"
    assert answer_to(small, large) == (431, "headers_too_large")
    assert answer_to(small, b"GET /" + b"y" * 3000) == (414, "target_too_long")
    trailers = CHUNKED + b"%x\r\n%s\r\n0\r\nX: %s\r\n\r\n" % (len(BODY), BODY, b"y" * 3000)
    assert answer_to(small, trailers) == (431, "headers_too_large")


def check_headers(small: Server) -> None:
    fields = b"".join(b"X%d: y\r\n" % i for i in range(18))
    assert answer_to(small, GET + fields + b"\r\n")[0] == 200
    assert answer_to(small, GET + fields + b"Z: y\r\n\r\n") == (431, "headers_too_large")


def check_body_bytes(small: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    # Said by its length: refused before it is sent.
    too_long = head + b"Content-Length: 200001\r\nExpect: 100-continue\r\n\r\n"
    assert answer_to(small, too_long) == (413, "body_too_large")
    # The bug: one of more than 18 digits was 400.
    for length in (10**18, 2**64, 10**40):
        said = head + b"Content-Length: %d\r\n\r\n" % length
        assert answer_to(small, said) == (413, "body_too_large")
    chunk = b"19000\r\n" + bytes(0x19000) + b"\r\n"
    assert answer_to(small, CHUNKED + chunk * 2) == (413, "body_too_large")
    # All bytes are sent before anything is read: the answer must arrive all the same.
    large = head + b"Content-Length: 900000\r\n\r\n" + bytes(900_000)
    assert late_answer_to(small, large) == (413, "body_too_large")


def check_bytes_of_all_bodies(small: Server) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Length: 190000\r\n\r\n"
    )
    with connect(small) as first, connect(small) as second:
        first.sendall(head + b" " * 189_000)
        second.sendall(head + b" " * 189_000)
        # One of them is told; the other one may go on.
        (told,), _, _ = select.select([first, second], [], [], 300)
        assert answer_of(told) == (503, "body_memory")
        other = second if told is first else first
        other.sendall(BODY + b" " * (1000 - len(BODY)))
        assert split_response(receive_all(other))[0] == 200
    assert answer_to(small, post())[0] == 200


def check_header_time(hasty: Server) -> None:
    assert late_answer_to(hasty, b"GET /hea") == (408, "timeout")
    # A byte now and then does not help.
    with connect(hasty) as connection, pytest.raises(OSError):
        for byte in b"GET /health HTTP/1.1\r\nX: " + b"y" * 2000:
            connection.send(bytes([byte]))
            time.sleep(0.01)
    with connect(hasty) as connection:
        assert receive_all(connection) == b""  # nothing was asked, so nothing is said


def check_body_time(hasty: Server) -> None:
    assert late_answer_to(hasty, post()[:-5]) == (408, "timeout")
    assert late_answer_to(hasty, CHUNKED + b"5\r\nab") == (408, "timeout")


def check_idle_time(make_server: Callable[..., Server]) -> None:
    with connect(make_server(idle_timeout_ms=700)) as connection:
        connection.sendall(post(close=False))
        data = receive_all(connection)
    assert split_response(data)[1].get("connection") is None
    assert data.count(b"HTTP/1.1 ") == 1


def check_write_time(make_server: Callable[..., Server]) -> None:
    server = make_server(write_timeout_ms=300, max_buffered_bytes=64 * 1024 * 1024)
    with connect_narrow(server) as connection:
        request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        with pytest.raises(OSError):  # pages until no buffer takes more; then the end
            for _ in range(100_000):
                connection.sendall(request * 50)
        server.http.close()
        wait_for(lambda: server.front_end.stats()["connections_open"] == 0, "the cut")


def check_request_time(make_server: Callable[..., Server]) -> None:
    server = make_server(owner={"token_interval_us": 10_000_000}, request_timeout_ms=800)
    assert answer_to(server, LONG) == (504, "timeout")
    server.wait_until_empty()
    server = make_server(owner={"token_interval_us": 100_000}, request_timeout_ms=800)
    data = exchange(server, post(b'{"prompt": "xxxxxxxxxxxxxxxxxxxx", "stream": true}'))
    assert split_response(data)[0] == 200
    assert b'"code":"timeout"' in data and data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    server.wait_until_empty()


def check_requests(make_server: Callable[..., Server]) -> None:
    server = make_server(owner={"token_interval_us": 10_000_000}, max_requests=3)
    held = [connect(server) for _ in range(3)]
    try:
        for connection in held:
            connection.sendall(LONG)
        wait_for(lambda: server.front_end.stats()["requests_running"] == 3, "requests")
        assert answer_to(server, post()) == (429, "too_many_requests")
    finally:
        for connection in held:
            connection.close()
    wait_for(lambda: server.front_end.stats()["requests_running"] == 0, "requests to end")
    assert answer_to(server, post(b'{"prompt": "x", "max_tokens": 1}'))[0] == 200
    server.wait_until_empty()


def check_json_depth(server: Server) -> None:
    for depth, code in ((31, "unknown_parameter"), (33, "invalid_json")):
        body = {"prompt": "x", "nest": None}
        text = json.dumps(body).replace("null", "[" * (depth - 1) + "]" * (depth - 1))
        response = server.http.post("/v1/completions", content=text)
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)


def check_stop_strings(server: Server) -> None:
    assert server.complete("x", stop=["~" * 1024] * 16).status_code == 200
    for stop in (["~"] * 17, ["~" * 1025]):
        response = server.complete("x", stop=stop)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stop")


def check_stop_token_ids(server: Server) -> None:
    assert server.complete("x", stop_token_ids=list(range(200, 215))).status_code == 200
    for ids in (list(range(200, 216)), list(range(200, 217)), [300]):
        response = server.complete("x", stop_token_ids=ids)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stop_token_ids")


def check_tokens(small: Server) -> None:
    def ask(num_prompt: int, num_output: int) -> int:
        prompt = json.dumps({"prompt": [65] * num_prompt, "max_tokens": num_output}).encode()
        return answer_to(small, post(prompt))[0]

    assert [ask(32, 32), ask(63, 1), ask(32, 33), ask(64, 1)] == [200, 200, 400, 400]


def check_slots(make_server: Callable[..., Server]) -> None:
    server = make_server(sizes={"num_slots": 2})
    with ThreadPoolExecutor(2) as pool:
        with frozen(server.owner):  # neither of them ends meanwhile
            running = [pool.submit(answer_to, server, post()) for _ in range(2)]
            server.wait_for_running(2)
            assert answer_to(server, post()) == (429, "ring_full")
        assert [future.result()[0] for future in running] == [200, 200]


def check_slow_reader(make_server: Callable[..., Server]) -> None:
    # Little beside an answer of 200 kB: what is kept of an answer's end is not cut off.
    server = make_server(max_buffered_bytes=8_000, owner={"token_interval_us": 300})
    body = json.dumps({"prompt": "w" * 1000, "max_tokens": 1000, "stream": True}).encode()
    with connect_narrow(server) as connection:
        # After some answers the socket's buffers are full.
        connection.sendall(post(body, close=False) * 50)
        wait_for(lambda: server.front_end.stats()["requests_aborted"] > 0, "the cut", 600)
        server.wait_until_empty()
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                data += part
    # The answer that did not fit is cut off, and does not look whole.
    assert data.count(b"[DONE]") < 50 and b"data: " in data
    assert not data.endswith(b"0\r\n\r\n")


def connect_narrow(server: Server) -> socket.socket:
    """Connect with a small window, so that little is on its way."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    narrow.settimeout(300)
    narrow.connect(("127.0.0.1", server.front_end.port))
    return narrow


# By the first cell of the row.
CHECKS: dict[str, Callable[..., None]] = {
    "connections": check_connections,
    "connections of one address": check_connections_of_an_address,
    "header bytes; trailers": check_header_bytes,
    "header fields": check_headers,
    "body": check_body_bytes,
    "bodies of all connections": check_bytes_of_all_bodies,
    "time for a header": check_header_time,
    "time for a body": check_body_time,
    "time between two requests": check_idle_time,
    "time without a byte taken": check_write_time,
    "time for a whole request": check_request_time,
    "requests at a time": check_requests,
    "slots of the ring": check_slots,
    "JSON depth": check_json_depth,
    "stop strings": check_stop_strings,
    "stop token ids": check_stop_token_ids,
    "prompt + output tokens": check_tokens,
    "bytes of a stream kept for a client that does not read": check_slow_reader,
}


@pytest.mark.parametrize("row", list(CHECKS))
def test_limit(row: str, request: pytest.FixtureRequest) -> None:
    check = CHECKS[row]
    name = check.__code__.co_varnames[0]
    check(request.getfixturevalue(name))


def test_table_has_these_rows() -> None:
    table = README.read_text(encoding="utf-8").split("## Limits\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    assert rows[2:] == list(CHECKS)
