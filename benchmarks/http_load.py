"""Streams completions from an OpenAI server and times them: a load -> when each token came.

One process, one thread, no asyncio: the client must not be what is measured. Prompts are token ids,
so that their lengths are exact; times are CLOCK_MONOTONIC. Two shapes: `concurrency` requests at a
time (what vLLM's client calls max-concurrency), or a fixed rate, where a request's clock starts
when it was due, sent or not.

`python -m benchmarks.http_load URL --prompt-tokens 64 --tokens 32 --requests 100 --concurrency 8`
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from blinkc.closing import Closing

_FIRST, _DONE, _END = b"data: ", b"data: [DONE]", b"0\r\n\r\n"
_RECEIVE_BYTES = 1 << 16
SPIN_S = 0.001  # epoll's timeouts are rounded up to this


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What to send. `concurrency` or `rate_per_s`; the other one is 0."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int = 0
    rate_per_s: float = 0.0
    vocab_size: int = 32000
    model: str = "model"
    seed: int = 1
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if (self.concurrency > 0) == (self.rate_per_s > 0):
            raise ValueError("give either a concurrency or a rate")


@dataclass(kw_only=True, slots=True)
class RequestTimes:
    """When one request was due, and when its answer's parts came; ns."""

    due_ns: int
    first_ns: int = 0
    last_ns: int = 0
    num_tokens: int = 0  # as the server's usage says
    arrivals_ns: list[int] = field(default_factory=list)  # of every read that brought events

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return (self.first_ns - self.due_ns) * 1e-9

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return (self.last_ns - self.first_ns) * 1e-9 / max(self.num_tokens - 1, 1)

    @property
    def e2e_s(self) -> float:
        """Time to the last token."""
        return (self.last_ns - self.due_ns) * 1e-9


class _Connection:
    """A keep-alive connection with at most one request on it."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.times: RequestTimes | None = None
        self._received = bytearray()

    def send(self, request: bytes, due_ns: int) -> None:
        self.times = RequestTimes(due_ns=due_ns)
        self._received.clear()
        self.socket.sendall(request)

    def receive(self) -> RequestTimes | None:
        """Take what is there; return the request's times once its answer is complete.

        Raises:
            RuntimeError: the server refused or broke off.
        """
        data = self.socket.recv(_RECEIVE_BYTES)
        now_ns = time.monotonic_ns()
        times = self.times
        if times is None or not data:
            raise RuntimeError(f"the server closed a connection: {bytes(self._received[-300:])!r}")
        self._received += data
        if times.first_ns == 0:
            if not self._received.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server answered {bytes(self._received[:500])!r}")
            if _FIRST not in self._received:
                return None
            times.first_ns = now_ns
        if _FIRST in data:
            times.arrivals_ns.append(now_ns)
        tail = bytes(self._received[-64:])
        if _DONE in tail and tail.endswith(_END):
            times.last_ns = now_ns
            times.num_tokens = self._count_tokens()
            self.times = None
            return times
        return None

    def _count_tokens(self) -> int:
        place = self._received.rfind(b'"completion_tokens":')
        if place < 0:
            raise RuntimeError("the answer has no usage")
        return int(self._received[place + 20 : place + 30].split(b",")[0].split(b"}")[0])


class LoadClient(Closing):
    """Runs loads against one server.

    Args:
        url: where the server listens, e.g. http://127.0.0.1:8000.

    Raises:
        RuntimeError: a request was refused, broken off, or took longer than the load's timeout.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._selector = selectors.DefaultSelector()
        self._idle: list[_Connection] = []
        self._open: list[_Connection] = []

    def run(self, load: Load) -> list[RequestTimes]:
        """Send the load, wait for all answers; times in the order in which answers ended."""
        requests = self._requests(load)
        done: list[RequestTimes] = []
        due = self._due_times(load, time.monotonic_ns())
        next_due = next(due)
        num_sent = 0
        deadline = time.monotonic() + load.timeout_s
        gc.collect()
        gc.disable()  # a collection would look like the server's jitter
        try:
            while len(done) < load.num_requests:
                now = time.monotonic_ns()
                while num_sent < load.num_requests and (
                    now >= next_due if next_due else num_sent - len(done) < load.concurrency
                ):
                    self._connection().send(next(requests), next_due or now)
                    num_sent += 1
                    next_due = next(due)
                wait_s = 1.0
                if next_due and num_sent < load.num_requests:
                    # The last bit is spun away, so that a request goes out when it is due.
                    wait_s = max(0.0, (next_due - time.monotonic_ns()) * 1e-9 - SPIN_S)
                for connection in self._ready(wait_s):
                    times = connection.receive()
                    if times is None:
                        continue
                    done.append(times)
                    if num_sent < load.num_requests:
                        self._idle.append(connection)
                    else:  # a server closes what is idle for long, perhaps just as it is used again
                        self._drop(connection)
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{load.num_requests - len(done)} of {load.num_requests} requests are open "
                        f"after {load.timeout_s} s"
                    )
        finally:
            gc.enable()
        return done

    def _requests(self, load: Load) -> Iterator[bytes]:
        """Make all requests before the clock starts."""
        draw = random.Random(load.seed)
        requests = []
        for _ in range(load.num_requests):
            body = json.dumps(
                {
                    "model": load.model,
                    "prompt": [draw.randrange(load.vocab_size) for _ in range(load.prompt_tokens)],
                    "max_tokens": load.output_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            requests.append(head.encode() + body)
        return iter(requests)

    @staticmethod
    def _due_times(load: Load, start_ns: int) -> Iterator[int]:
        """Yield when each request is due, or 0: as soon as fewer than `concurrency` are open."""
        number = 0
        while True:
            yield start_ns + round(number * 1e9 / load.rate_per_s) if load.rate_per_s else 0
            number += 1

    def _connection(self) -> _Connection:
        if self._idle:
            return self._idle.pop()
        connection = _Connection(self._host, self._port)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._open.append(connection)
        return connection

    def _ready(self, wait_s: float) -> list[_Connection]:
        """Wait for connections with something to read; drop idle ones, which the server closed."""
        found = [key.data for key, _ in self._selector.select(wait_s)]
        for connection in [c for c in found if c.times is None]:
            self._idle.remove(connection)
            self._drop(connection)
            found.remove(connection)
        return found

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._open.remove(connection)

    def close(self) -> None:
        """Close every connection."""
        for connection in self._open:
            connection.socket.close()
        self._selector.close()


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the values lie, interpolated; values non-empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(times: Sequence[RequestTimes]) -> dict[str, Any]:
    """Return the figures that vLLM's client prints: throughput, TTFT, TPOT and ITL in ms."""
    span_s = (max(t.last_ns for t in times) - min(t.due_ns for t in times)) * 1e-9
    num_tokens = sum(t.num_tokens for t in times)
    gaps = [
        later - earlier
        for t in times
        for earlier, later in zip(t.arrivals_ns, t.arrivals_ns[1:], strict=False)
    ]
    result: dict[str, Any] = {
        "num_requests": len(times),
        "output_tokens": num_tokens,
        "duration_s": round(span_s, 3),
        "tokens_per_s": round(num_tokens / span_s, 1),
    }
    values = {
        "ttft_ms": [t.ttft_s * 1e3 for t in times],
        "tpot_ms": [t.tpot_s * 1e3 for t in times],
        "itl_ms": [gap * 1e-6 for gap in gaps] or [0.0],
    }
    for name, numbers in values.items():
        result[name] = {
            f"p{str(p).replace('.', '')}": round(percentile(numbers, p), 3) for p in (50, 99, 99.9)
        }
    return result


def first_model(url: str) -> str:
    """Return the name of the first model that the server at `url` lists."""
    with urlopen(f"{url.rstrip('/')}/v1/models", timeout=30) as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


def main() -> None:
    """Run one load and print its summary as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--model", help="default: the first that the server lists")
    options = parser.parse_args()
    model = options.model or first_model(options.url)
    try:
        load = Load(
            num_requests=options.requests,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.tokens,
            concurrency=options.concurrency,
            rate_per_s=options.rate,
            vocab_size=options.vocab_size,
            model=model,
        )
    except ValueError as error:
        parser.error(str(error))
    with LoadClient(options.url) as client:
        print(json.dumps(summary(client.run(load)), indent=1))


if __name__ == "__main__":
    main()
