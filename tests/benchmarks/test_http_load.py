"""The load client against a front end whose owner answers with the prompt."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.http_load import (
    Load,
    LoadClient,
    RequestTimes,
    first_model,
    percentile,
    summary,
)

fake_server = pytest.importorskip("tests.runtime_frontend.fake_server")

TOKEN_INTERVAL_US = 2000


@pytest.fixture(scope="module")
def make_server() -> Iterator[Callable[..., Any]]:
    with ExitStack() as stack:
        yield fake_server.make_servers(stack)


@pytest.fixture(scope="module")
def url(make_server: Callable[..., Any]) -> str:
    return str(make_server(owner={"token_interval_us": TOKEN_INTERVAL_US}).front_end.url)


def load(**changes: Any) -> Load:
    values: dict[str, Any] = {
        "num_requests": 12, "prompt_tokens": 9, "output_tokens": 10, "vocab_size": 128,
        "model": "fake", "concurrency": 4, "timeout_s": 600.0,
    }  # fmt: skip
    return Load(**{**values, **changes})


def test_the_server_may_close_idle_connections(make_server: Callable[..., Any]) -> None:
    """The bug: a long run ended where the server closed connections that had nothing more to do."""
    owner = {"token_interval_us": 20_000}
    server = make_server(owner=owner, idle_timeout_ms=300)
    with LoadClient(server.front_end.url) as client:
        # The last one takes 800 ms alone; the other connections have done their part by then.
        times = client.run(load(num_requests=9, concurrency=8, output_tokens=40))
        server.http.close()
        fake_server.wait_for(
            lambda: server.front_end.stats()["connections_open"] == 0,
            "idle connections to be closed",
        )
        times += client.run(load(num_requests=2, concurrency=2))
    assert len(times) == 11


def test_closed_loop(url: str) -> None:
    """The bug it guards: a first token timed at the headers, a last one before the stream's end."""
    with LoadClient(url) as client:
        times = client.run(load())
    assert len(times) == 12
    assert {t.num_tokens for t in times} == {10}
    for t in times:
        assert t.due_ns < t.first_ns < t.last_ns
        assert t.arrivals_ns == sorted(t.arrivals_ns)
        # Nine intervals of the owner lie between its first token and its last; a late reader sees
        # the first one late, never the last one early.
        assert t.last_ns - t.due_ns >= 9 * TOKEN_INTERVAL_US * 1000
    assert max(overlaps(times)) == 4
    figures = summary(times)
    assert figures["output_tokens"] == 120
    assert figures["tpot_ms"]["p50"] == pytest.approx(
        statistics.median((t.last_ns - t.first_ns) / 9e6 for t in times), abs=0.001
    )


def overlaps(times: list[RequestTimes]) -> list[int]:
    """How many requests were open at each request's start."""
    return [sum(o.due_ns <= t.due_ns < o.last_ns for o in times) for t in times]


def test_the_model_is_asked_for(url: str) -> None:
    """The bug: a name that no server has."""
    assert first_model(url) == "fake"


def test_fixed_rate_counts_from_when_a_request_was_due(url: str) -> None:
    with LoadClient(url) as client:
        times = client.run(load(concurrency=0, rate_per_s=100.0))
    due = sorted(t.due_ns for t in times)
    gaps = {later - earlier for earlier, later in itertools.pairwise(due)}
    assert all(abs(gap - 10_000_000) <= 1 for gap in gaps)


def test_refusal_is_told(url: str) -> None:
    with LoadClient(url) as client, pytest.raises(RuntimeError, match="400"):
        client.run(load(num_requests=1, output_tokens=100_000))


def test_a_silent_server_ends_the_run(make_server: Callable[..., Any]) -> None:
    silent = make_server(owner={"max_running": 1, "token_interval_us": 5_000_000})
    with LoadClient(silent.front_end.url) as client, pytest.raises(RuntimeError, match="are open"):
        client.run(load(num_requests=2, concurrency=2, timeout_s=0.5))


def test_load_has_one_shape() -> None:
    with pytest.raises(ValueError, match="either"):
        load(rate_per_s=1.0)
    with pytest.raises(ValueError, match="either"):
        load(concurrency=0)


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert percentile([5.0], 99) == 5.0
