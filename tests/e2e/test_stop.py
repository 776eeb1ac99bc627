"""SIGTERM to a served model, in every state: the process ends by itself and leaves nothing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from blink_runtime.shared_ring import SHARED_MEMORY
from tests.e2e.server import DEMO_BUNDLE, Server

LONG_PROMPT = [7] * 1800


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_it_ends_and_leaves_nothing(state: str) -> None:
    """Guards a stop while requests decode, prefill and wait, with no patience for any."""
    num_streams = 10 if state == "busy" else 0  # more than lanes
    with (
        ThreadPoolExecutor(max(num_streams, 1)) as pool,
        Server(DEMO_BUNDLE, "--no-golden", "--drain", "0") as server,
    ):
        ring = SHARED_MEMORY / f"blink-{server.process.pid}"
        assert ring.exists()
        model = server.model_name()
        decodes = threading.Event()

        def stream(prompt: list[int]) -> str:
            body = {  # none ends by itself before the stop
                "model": model, "prompt": prompt, "max_tokens": 2000 - len(prompt), "stream": True,
                "ignore_eos": True,
            }  # fmt: skip
            with httpx.stream(
                "POST", server.url + "/v1/completions", json=body, timeout=600
            ) as answer:
                lines = []
                for line in answer.iter_lines():
                    lines.append(line)
                    decodes.set()
            return "\n".join(lines)

        streams = []
        if state == "busy":
            streams.append(pool.submit(stream, [5, 6]))
            assert decodes.wait(300)
            streams += [pool.submit(stream, LONG_PROMPT) for _ in range(num_streams - 1)]
            # All are with the server: who comes later finds nobody. Some prefill, one waits.
            server.wait_for(
                lambda: (
                    any(future.done() for future in streams)
                    or (
                        server.metric("blink_requests_running") == num_streams
                        and server.metric("blink_requests_waiting") > 0
                    )
                ),
                "all requests to be there",
            )
            assert not any(future.done() for future in streams), streams
        assert server.close() == 0
        endings = [future.result(300) for future in streams]  # raises what the client met
        assert not ring.exists()
    for text in endings:  # not as if it were whole
        assert '"error"' in text and '"finish_reason":"' not in text
