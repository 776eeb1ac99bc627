"""What goes wrong: clients that leave, a full ring, a dead scheduler, restarts. Nothing leaks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .fake_server import (
    EOS,
    NAN,
    ByteCodec,
    FrontEnd,
    FrontEndOptions,
    Server,
    _native,
    frozen,
    ring_sizes,
    start_owner,
    stop_owner,
    wait_for,
)
from .test_http import connect, post, receive_all, receive_until


@pytest.fixture(scope="module")
def slow(make_server: Callable[..., Server]) -> Server:
    """A token every 5 ms."""
    return make_server(owner={"token_interval_us": 5000}, sizes={"num_slots": 4})


def stream_body(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, "stream": True, "max_tokens": 500, **fields}).encode()


def test_client_that_leaves_frees_its_slot(slow: Server) -> None:
    # Closed after the first chunk of a long answer: the slot is free at once, not at its end.
    for _ in range(6):  # more than there are slots
        with connect(slow) as connection:
            connection.sendall(post(stream_body("x" * 100, ignore_eos=True)))
            receive_until(connection, b"data: {")
        slow.wait_until_empty()


def test_client_that_leaves_before_a_whole_answer(slow: Server) -> None:
    with connect(slow) as connection:
        connection.sendall(post(json.dumps({"prompt": "x" * 400, "max_tokens": 400}).encode()))
        wait_for(lambda: bool(slow.ring.slots()), "the request to be in the ring")
    slow.wait_until_empty()


def test_client_that_leaves_at_every_byte(make_server: Callable[..., Server]) -> None:
    server = make_server(owner={"token_interval_us": 200})
    whole = len(receive_all_of(server, post(stream_body("hello"))))
    for size in range(0, whole, 23):
        with connect(server) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(post(stream_body("hello")))
            received = 0
            # Tokens that come together share an event: this answer may be shorter than the first.
            while received < size and (piece := connection.recv(size - received)):
                received += len(piece)
    server.wait_until_empty()
    wait_for(lambda: server.front_end.stats()["connections_open"] <= 1, "connections to end")
    assert server.complete("alive").status_code == 200


def receive_all_of(server: Server, request: bytes) -> bytes:
    with connect(server) as connection:
        connection.sendall(request)
        return receive_all(connection)


def test_full_ring(slow: Server) -> None:
    held = [connect(slow) for _ in range(4)]
    try:
        with frozen(slow.owner):  # none of them ends meanwhile
            for connection in held:
                connection.sendall(post(stream_body("y" * 100, ignore_eos=True)))
            slow.wait_for_running(4)
            response = slow.complete("one too many")
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "ring_full"
    finally:
        for connection in held:
            connection.close()
    slow.wait_until_empty()
    assert slow.complete("abc").status_code == 200


def test_stop_string_aborts_the_rest(slow: Server) -> None:
    response = slow.complete("abc" + "x" * 300, stop=["bc"], max_tokens=400)
    assert response.json()["choices"][0]["text"] == "a"
    slow.wait_until_empty()


def test_nan_fails_one_request_only(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(server.complete, f"good {i}") for i in range(6)]
        bad = [pool.submit(server.complete, [65, 66, NAN, 67]) for _ in range(2)]
        for i, future in enumerate(good):
            assert future.result().json()["choices"][0]["text"] == f"good {i}"
        for future in bad:
            assert future.result().status_code == 500
            assert future.result().json()["error"]["code"] == "nan_logits"
    server.wait_until_empty()


def test_failure_inside_a_stream(server: Server) -> None:
    # The status line is out already: the stream ends with an error event, not as if it were whole.
    data = receive_all_of(server, post(stream_body([65, 66, NAN])))
    assert b'"text":"A"' in data
    assert b"nan_logits" in data
    assert b'"finish_reason":"' not in data
    server.wait_until_empty()


def test_failure_before_the_first_token_is_a_status(server: Server) -> None:
    data = receive_all_of(server, post(stream_body([NAN])))
    assert data.startswith(b"HTTP/1.1 500 ")


def code_of_failure(answer: httpx.Response) -> str:
    """Return the error's code; it says to come again."""
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    code: str = answer.json()["error"]["code"]
    return code


def test_stalled_scheduler(make_server: Callable[..., Server]) -> None:
    # The request would take 200 s.
    server = make_server(owner={"token_interval_us": 200_000}, stall_timeout_ms=1000)
    with ThreadPoolExecutor(1) as pool:
        stalled = pool.submit(server.complete, "x" * 1000, max_tokens=1000)
        wait_for(lambda: bool(server.ring.slots()), "the request to be in the ring")
        with frozen(server.owner):
            wait_for(lambda: server.front_end.health == "stalled", "the stall to be noticed")
            assert server.http.get("/health").status_code == 503
            assert server.http.get("/health").json() == {"status": "stalled"}
            refused = server.complete("x")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert code_of_failure(stalled.result()) == "stalled"
    # It comes back: health follows, the slot of the failed request is cleaned up.
    wait_for(lambda: server.front_end.health == "serving", "recovery")
    server.wait_until_empty()
    while (answer := server.complete("back")).status_code == 503:
        # The owner got no core for another second.
        wait_for(lambda: server.front_end.health == "serving", "another recovery")
    assert answer.json()["choices"][0]["text"] == "back"


def test_killed_scheduler(make_server: Callable[..., Server]) -> None:
    server = make_server(owner={"token_interval_us": 200_000}, stall_timeout_ms=1000)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.complete, "x" * 1000, max_tokens=1000)
        wait_for(lambda: bool(server.ring.slots()), "the request to be in the ring")
        server.owner.kill()
        assert code_of_failure(running.result()) == "stalled"
    assert server.http.get("/health").status_code == 503


def test_stopped_scheduler(make_server: Callable[..., Server]) -> None:
    server = make_server(owner={"token_interval_us": 200_000}, stall_timeout_ms=600_000)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, "x" * 1000, max_tokens=1000)
        wait_for(lambda: bool(server.ring.slots()), "the request to be in the ring")
        server.ring.request_stop()
        wait_for(lambda: server.front_end.health == "stopped", "the stop to be noticed")
        assert code_of_failure(running.result()) == "stopped"
    assert server.http.get("/health").json() == {"status": "stopped"}
    assert server.complete("x").status_code == 503


def test_ring_without_scheduler(make_server: Callable[..., Server]) -> None:
    ring = _native.Ring.create(f"/blink-test-empty-{os.getpid()}", ring_sizes())
    with FrontEnd(ring, ByteCodec(), None, FrontEndOptions(port=0)) as front_end:
        response = httpx.get(f"{front_end.url}/health", timeout=300)
        assert response.status_code == 503
        assert response.json() == {"status": "starting"}


def test_front_end_restarts_with_requests_in_flight() -> None:
    """The bug: slots of the first life never released, or its tokens in the second's answers."""
    ring = _native.Ring.create(f"/blink-test-restart-{os.getpid()}", ring_sizes(num_slots=4))
    owner = start_owner(ring.name, {"token_interval_us": 100_000})
    options = FrontEndOptions(
        port=0, model_name="fake", eos_token_ids=(EOS,), stall_timeout_ms=600_000
    )
    try:
        for life in range(3):
            with FrontEnd(ring, ByteCodec(), None, options) as front_end:
                wait_for(lambda f=front_end: f.health == "serving", "health")  # type: ignore[misc]
                url = f"{front_end.url}/v1/completions"
                for i in range(2):  # slots come back only after the first life's requests are gone
                    wait_for(lambda: not ring.slots(), "slots to be empty")
                    body = {"prompt": f"life {life} {i}", "max_tokens": 50}
                    answer = httpx.post(url, json=body, timeout=300).json()
                    assert answer["choices"][0]["text"] == f"life {life} {i}"
                for _ in range(3):
                    body = {"prompt": "old" * 100, "max_tokens": 1700, "ignore_eos": True}  # 170 s
                    thread = threading.Thread(target=post_and_forget, args=(url, body), daemon=True)
                    thread.start()
                wait_for(lambda: len(ring.slots()) == 3, "requests in flight")
                front_end.close(0.0) if life else None
    finally:
        stop_owner(ring, owner)


def post_and_forget(url: str, body: dict[str, Any]) -> None:
    """Post, again while the ring is full: slots of an earlier life are looked at for a while."""
    with contextlib.suppress(httpx.HTTPError):  # the server goes away: that is the test
        while httpx.post(url, json=body, timeout=300).status_code == 429:
            time.sleep(0.02)


def test_draining_lets_running_requests_end(make_server: Callable[..., Server]) -> None:
    server = make_server(owner={"token_interval_us": 3000})
    with connect(server) as idle, ThreadPoolExecutor(2) as pool:
        with frozen(server.owner):
            running = pool.submit(server.complete, "z" * 150, max_tokens=200)
            server.wait_for_running(1)
            drained = pool.submit(server.front_end.close, 300.0)
            assert idle.recv(1) == b""  # it drains
        assert running.result().json()["choices"][0]["text"] == "z" * 150
        drained.result()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.front_end.url}/health", timeout=300)


def test_what_draining_has_no_time_for_may_come_again(make_server: Callable[..., Server]) -> None:
    server = make_server(owner={"token_interval_us": 200_000})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, "x" * 1000, max_tokens=1000)
        server.wait_for_running(1)
        server.front_end.close(0.0)
        assert code_of_failure(running.result()) == "aborted"


def test_a_front_end_that_is_replaced(make_server: Callable[..., Server]) -> None:
    """Another one takes over its slots: what ran there ends, and may come again."""
    server = make_server(owner={"token_interval_us": 50_000})
    body = stream_body("x" * 400)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(server.complete, "x" * 400, max_tokens=400)
        stream = pool.submit(receive_all_of, server, post(body))
        wait_for(lambda: len(server.ring.slots()) == 2, "both requests")
        with FrontEnd(server.ring, ByteCodec(), None, FrontEndOptions(port=0)):
            assert code_of_failure(whole.result()) == "epoch"
            assert b'"code":"epoch"' in stream.result()


def test_a_whole_answer_is_no_slow_reader(make_server: Callable[..., Server]) -> None:
    """The bug: it was thrown away at its end where it was longer than what is kept of a stream."""
    server = make_server(max_buffered_bytes=1024)
    answer = server.complete("y" * 1000, max_tokens=1000, n=2)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["y" * 1000] * 2


def test_slow_reader_is_cut_off_and_others_go_on(make_server: Callable[..., Server]) -> None:
    server = make_server(max_buffered_bytes=100_000)
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post(stream_body("w" * 1000, max_tokens=1000)))
        wait_for(lambda: server.front_end.stats()["prompt_tokens"] == 1000, "the request")
        server.wait_until_empty()
        assert server.complete("others").json()["choices"][0]["text"] == "others"
    wait_for(lambda: server.front_end.stats()["requests_running"] == 0, "requests to end")


def test_many_streams_at_once(make_server: Callable[..., Server]) -> None:
    # One for each client's request, and one that the owner has yet to empty.
    server = make_server(sizes={"num_slots": 2 * 48})

    def one(i: int) -> str:
        data = receive_all_of(server, post(stream_body(f"stream {i} " * 10)))
        events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    with ThreadPoolExecutor(48) as pool:
        texts = list(pool.map(one, range(400)))
    assert texts == [f"stream {i} " * 10 for i in range(400)]
    server.wait_until_empty()
    assert server.front_end.stats()["sequence_mismatches"] == 0


def test_requests_that_wait_for_a_lane(make_server: Callable[..., Server]) -> None:
    server = make_server(owner={"max_running": 1, "token_interval_us": 500})
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(server.complete, f"number {i}") for i in range(8)]
        texts = [future.result().json()["choices"][0]["text"] for future in futures]
    assert texts == [f"number {i}" for i in range(8)]
