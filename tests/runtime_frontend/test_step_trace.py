"""What `blink-runtime trace` makes of step records and slots, without a server."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from blinkc import abi

_native = pytest.importorskip("blink_runtime._native", reason="the native module is not built")

from blink_runtime import shared_ring  # noqa: E402
from blink_runtime.cli import main  # noqa: E402
from blink_runtime.step_trace import (  # noqa: E402
    Recording,
    SlotWatch,
    Step,
    describe,
    trace_document,
)

_numbers = itertools.count()


@pytest.fixture
def ring() -> Iterator[Any]:
    import os

    sizes = _native.RingSizes(
        num_slots=8, max_prompt_tokens=16, max_output_tokens=16, max_seqlen=32, max_batch=4,
        vocab_size=100, page_size_tokens=16, num_kv_pages=8, trace_capacity=16,
    )  # fmt: skip
    yield _native.Ring.create(f"/blink-steptrace-{os.getpid()}-{next(_numbers)}", sizes)


def write_steps(ring: Any, count: int) -> None:
    """Write records as a scheduler would: step n takes [1000 n, 1000 n + 900) ns."""
    header = abi.structs()["blink_ring_header"].from_address(ring.address)
    for _ in range(count):
        number = header.trace_count + 1
        place = (number - 1) % header.trace_capacity * abi.size_of("blink_trace_record")
        record = abi.structs()["blink_trace_record"].from_address(
            ring.address + header.trace_offset + place
        )
        record.step, record.start_ns, record.end_ns = number, 1000 * number, 1000 * number + 900
        record.kind, record.batch, record.seqlen = number % 2, 4, 32
        record.num_lanes, record.num_tokens, record.pages_free = 3, 3, 5
        header.trace_count = number


def step(number: int, kind: int = 1) -> Step:
    return Step(number, 1000 * number, 1000 * number + 900, kind, 0, 4, 32, 3, 3, 0, 5)


def test_reader_counts_what_it_missed(ring: Any) -> None:
    trace = _native.StepTrace(ring)
    write_steps(ring, 5)
    assert [Step._make(r).step for r in trace.poll()] == [1, 2, 3, 4, 5]
    assert trace.poll() == []
    write_steps(ring, 40)
    steps = [Step._make(r) for r in trace.poll()]
    assert [s.step for s in steps] == list(range(31, 46))
    assert trace.num_missed == 25
    assert steps[0] == step(31)
    write_steps(ring, 2)
    trace.skip_to_newest()
    assert trace.poll() == []
    assert trace.num_missed == 25


def test_gaps_are_marked() -> None:
    """Steps that were overwritten must not look like idle time."""
    recording = Recording(steps=[step(1), step(2), step(9, 0)], num_missed=6, pages_total=8)
    document = trace_document(recording, "/blink-x")
    marks = [e for e in document["traceEvents"] if e["ph"] == "i"]
    assert [e["name"] for e in marks] == ["6 steps missed"]
    assert document["otherData"]["missed"] == 6
    assert "6 steps were overwritten" in describe(recording)
    used = {e["args"]["pages used"] for e in document["traceEvents"] if e["name"] == "pages used"}
    assert used == {3}
    first = next(e for e in document["traceEvents"] if e["ph"] == "X")
    assert (first["ts"], first["dur"]) == (0, 0.9)


def test_slots_become_spans() -> None:
    watch = SlotWatch()
    watch.see([(0, 7, 1, 0, 0, 0)], 100)
    watch.see([(0, 7, 3, 1, 0, 0), (2, 1, 1, 0, 0, 0)], 200)
    watch.see([(0, 7, 3, 4, 0, 0)], 300)  # slot 2 was emptied
    watch.see([(0, 8, 1, 0, 0, 0)], 400)  # slot 0 was taken again
    spans = [
        (s.slot, s.sequence, s.state, s.start_ns, s.end_ns, s.num_generated)
        for s in watch.finish(500)
    ]
    assert spans == [
        (0, 7, 1, 100, 200, 1),
        (0, 7, 3, 200, 400, 4),
        (2, 1, 1, 200, 300, 0),
        (0, 8, 1, 400, 500, 0),
    ]


def test_request_spans_share_the_clock_of_steps() -> None:
    watch = SlotWatch()
    watch.see([(0, 1, 3, 0, 0, 0)], 50_001_000)
    recording = Recording(
        steps=[step(1)], spans=watch.finish(50_003_000), clock_offset_ns=50_000_000
    )
    events = [e for e in trace_document(recording, "x")["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["ts"]) for e in events] == [(1, 0), (2, 0)]


def test_command_writes_a_file(ring: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    words = ["trace", "--ring", ring.name, "-o", str(output), "--seconds", "0.05"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "no steps: the server was idle" in done.output
    assert json.loads(output.read_text())["otherData"]["steps"] == 0


def test_command_names_a_missing_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ring, "SHARED_MEMORY", tmp_path)  # where no server's ring is
    done = CliRunner().invoke(main, ["trace", "--ring", "/blink-none", "--seconds", "0"])
    assert done.exit_code == 1
    assert "ring /blink-none: " in done.output
    assert "no server is running; start one: blink-runtime run BUNDLE" in done.output


def test_command_names_the_rings_there_are(ring: Any) -> None:
    done = CliRunner().invoke(main, ["trace", "--ring", "/blink-none", "--seconds", "0"])
    assert done.exit_code == 1
    running = done.output.split("running here: ")[1].split()
    assert ring.name in [name.rstrip(",") for name in running]


def test_a_file_that_cannot_be_written_is_named_before_the_watch(ring: Any) -> None:
    words = ["trace", "--ring", ring.name, "-o", "/nonexistent/out.json", "--seconds", "3600"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert done.output == "blink-runtime: /nonexistent/out.json: No such file or directory\n"


def test_metrics_follow_the_trace(server: Any) -> None:
    """The front end reads steps that it did not ask for, by kind."""

    def samples() -> dict[str, float]:
        lines = server.http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    before = samples()
    write_steps(server.ring, 7)
    after = samples()
    added = {name: after[name] - before[name] for name in after}
    assert added['blink_step_seconds_count{kind="prefill"}'] == 3
    assert added['blink_step_seconds_count{kind="decode"}'] == 4
    assert added['blink_step_seconds_sum{kind="decode"}'] == pytest.approx(4 * 900e-9)
    assert added['blink_step_lanes_bucket{kind="decode",le="2"}'] == 0
    assert added['blink_step_lanes_bucket{kind="decode",le="4"}'] == 4
    assert added["blink_steps_missed_total"] == 0
