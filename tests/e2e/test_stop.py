"""SIGTERM to a served model, in every state: the process ends by itself and leaves nothing."""

from __future__ import annotations

import threading

import httpx
import pytest

from blink_runtime.shared_ring import SHARED_MEMORY
from tests.e2e.server import DEMO_BUNDLE, Server

LONG_PROMPT = [7] * 1800


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_it_ends_and_leaves_nothing(state: str) -> None:
    """Guards a stop while requests decode, prefill and wait, with no patience for any."""
    endings: list[str] = []
    with Server(DEMO_BUNDLE, "--no-golden", "--drain", "0") as server:
        ring = SHARED_MEMORY / f"blink-{server.process.pid}"
        assert ring.exists()
        model = server.model_name()
        decodes = threading.Event()

        def stream(prompt: list[int]) -> None:
            body = {  # none ends by itself before the stop
                "model": model, "prompt": prompt, "max_tokens": 2000 - len(prompt), "stream": True,
                "ignore_eos": True,
            }  # fmt: skip
            with httpx.stream(
                "POST", server.url + "/v1/completions", json=body, timeout=60
            ) as answer:
                lines = []
                for line in answer.iter_lines():
                    lines.append(line)
                    decodes.set()
            endings.append("\n".join(lines))

        threads = []
        if state == "busy":
            threads = [threading.Thread(target=stream, args=([5, 6],))]
            threads[0].start()
            assert decodes.wait(60)
            more = [threading.Thread(target=stream, args=(LONG_PROMPT,)) for _ in range(9)]
            for thread in more:
                thread.start()
            threads += more
            wait_for_prefill(server)
        assert server.close() == 0
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not ring.exists()
    assert len(endings) == len(threads)
    for text in endings:  # not as if it were whole
        assert '"error"' in text and '"finish_reason":"' not in text


def wait_for_prefill(server: Server) -> None:
    """Wait until requests prefill and, as there are more than lanes, one waits."""
    for _ in range(600):
        if server.metric("blink_requests_waiting") > 0:
            return
        threading.Event().wait(0.05)
    raise AssertionError("no request waits for a lane")
