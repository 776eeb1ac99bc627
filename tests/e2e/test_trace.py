"""`blink-runtime trace` and the step histograms beside a served bundle."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from blinkc import abi

_native = pytest.importorskip("blink_runtime._native", reason="the native module is not built")

from .server import BIN, DEMO_BUNDLE, Server  # noqa: E402

NUM_REQUESTS, NUM_TOKENS = 3, 48


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, float]]:
    """The trace document of a few requests, and what /metrics said they added."""
    if not DEMO_BUNDLE.exists():
        pytest.skip("the demo bundle is not there")
    output = tmp_path_factory.mktemp("trace") / "trace.json"
    with Server(DEMO_BUNDLE, "--no-golden") as server:
        before = metrics(server)
        ring = server.output.rsplit("(ring ", 1)[1].split(")")[0]  # others may run beside
        words = [BIN / "blink-runtime", "trace", "--ring", ring, "-o", output, "--seconds", "3600"]
        tracer = subprocess.Popen(
            list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert tracer.stderr is not None
            assert "recording" in tracer.stderr.readline()
            with ThreadPoolExecutor(NUM_REQUESTS) as pool:
                asked = [pool.submit(ask, server, n) for n in range(NUM_REQUESTS)]
                show_them_decoding(ring, server, tracer, asked)
                for future in asked:
                    future.result()
            server.wait_until_idle()
            tracer.send_signal(signal.SIGINT)  # what was recorded is written all the same
            said, errors = tracer.communicate(timeout=300)
        finally:
            tracer.kill()  # has no effect on one that has ended
        assert tracer.returncode == 0, said + errors
        after = metrics(server)
    document = json.loads(output.read_text())
    document["said"] = said
    return document, {name: value - before.get(name, 0) for name, value in after.items()}


def ask(server: Server, number: int) -> None:
    body = {"prompt": f"Story {number}:", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    httpx.post(server.url + "/v1/completions", json=body, timeout=600).raise_for_status()


def show_them_decoding(
    ring: str, server: Server, tracer: subprocess.Popen[str], asked: list[Future[None]]
) -> None:
    """Stop the server while all requests decode, until a tracer that got no core has looked."""
    decoding = abi.constants()["BLINK_STATE_DECODE_PROCESSING"]
    slots = _native.Ring.open(ring).slots
    while [slot[2] for slot in slots()] != [decoding] * NUM_REQUESTS:
        if any(future.done() for future in asked):
            return
        time.sleep(0.001)
    server.process.send_signal(signal.SIGSTOP)
    try:
        before, deadline = num_sleeps(tracer), time.monotonic() + 300
        while num_sleeps(tracer) <= before + 2:
            assert time.monotonic() < deadline, "the tracer does not look"
            time.sleep(0.001)
    finally:
        server.process.send_signal(signal.SIGCONT)


def num_sleeps(process: subprocess.Popen[str]) -> int:
    """How often a process has waited: the tracer does between two looks."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def metrics(server: Server) -> dict[str, float]:
    lines = httpx.get(server.url + "/metrics", timeout=300).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def steps_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]


def test_events_are_well_formed(recorded: Any) -> None:
    """What Perfetto wants of each phase; a negative time or duration hides an event silently."""
    document, _ = recorded
    assert document["displayTimeUnit"] == "ms"
    for event in document["traceEvents"]:
        assert event["ph"] in "XCMi"
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "M":
            continue
        assert event["ts"] >= -2000  # a slot is seen up to a poll late
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["tid"], int)
        if event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())


def test_every_step_once(recorded: Any) -> None:
    document, added = recorded
    steps = steps_of(document)
    numbers = [step["args"]["step"] for step in steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert document["otherData"]["missed"] == 0
    kinds = Counter(step["cat"] for step in steps)
    assert kinds["prefill"] == added["blink_prefill_steps_total"]
    assert kinds["decode"] == added["blink_decode_steps_total"]
    decoded = sum(step["args"]["lanes"] for step in steps if step["cat"] == "decode")
    assert decoded == NUM_REQUESTS * (NUM_TOKENS - 1)
    assert f"{kinds['decode']} decode steps" in document["said"]


def test_steps_do_not_overlap(recorded: Any) -> None:
    steps = steps_of(recorded[0])
    for one, other in itertools.pairwise(steps):
        assert one["ts"] + one["dur"] <= other["ts"] + 0.002  # microseconds of rounding


def test_requests_have_tracks(recorded: Any) -> None:
    document, _ = recorded
    spans = [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 2]
    assert len({span["args"]["sequence"] * 1000 + span["tid"] for span in spans}) == NUM_REQUESTS
    decoding = [span for span in spans if span["name"] == "decoding"]
    assert len(decoding) == NUM_REQUESTS
    steps = steps_of(document)
    end = steps[-1]["ts"] + steps[-1]["dur"]
    for span in decoding:  # one clock: a request decodes while steps run
        assert span["ts"] < end + 100_000
        assert span["ts"] + span["dur"] > steps[0]["ts"]


def test_histograms_count_every_step(recorded: Any) -> None:
    _, added = recorded
    for kind in ("prefill", "decode"):
        steps = added[f"blink_{kind}_steps_total"]
        assert added[f'blink_step_seconds_count{{kind="{kind}"}}'] == steps
        assert added[f'blink_step_lanes_count{{kind="{kind}"}}'] == steps
        assert added[f'blink_step_seconds_bucket{{kind="{kind}",le="+Inf"}}'] == steps
    assert added['blink_step_lanes_sum{kind="decode"}'] == NUM_REQUESTS * (NUM_TOKENS - 1)
    assert added["blink_tpot_seconds_count"] == NUM_REQUESTS
    assert added["blink_steps_missed_total"] == 0
