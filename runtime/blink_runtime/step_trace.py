"""`blink-runtime trace`: the steps of a running server -> a file for Perfetto (ui.perfetto.dev).

Reads the ring in shared memory beside the server, one-sidedly: the step records that the scheduler
leaves, and the slots' states. Written as Chrome trace events: tracks for prefill and decode steps,
counters for lanes, waiting requests and pages, one track for each slot.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from blink_runtime.process_control import StopEvent
from blink_runtime.shared_ring import open_ring
from blink_runtime.top import STATES

if TYPE_CHECKING:
    from blink_runtime import _native

POLL_INTERVAL_S = 0.001  # also the resolution of request spans
KINDS = ("prefill", "decode")
STEPS_PROCESS, REQUESTS_PROCESS = 1, 2
EMPTY, COMPLETED, FAILED = 0, 5, 6  # BLINK_STATE_*


class Step(NamedTuple):
    """A `blink_trace_record` of abi.h; times in ns on the scheduler's clock."""

    step: int
    start_ns: int
    end_ns: int
    kind: int
    key_index: int
    batch: int
    seqlen: int
    num_lanes: int
    num_tokens: int
    requests_waiting: int
    pages_free: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpan:
    """A slot in one state; times in ns on this process's monotonic clock, as polled."""

    slot: int
    sequence: int
    state: int
    start_ns: int
    end_ns: int
    num_generated: int


@dataclass(kw_only=True, slots=True)
class Recording:
    """What was seen of a ring in a while."""

    steps: list[Step] = field(default_factory=list)
    spans: list[RequestSpan] = field(default_factory=list)
    num_missed: int = 0
    pages_total: int = 0
    clock_offset_ns: int = 0  # host clock minus the scheduler's; too large by a poll at most


def run_trace(ring_name: str | None, output: Path, seconds: float) -> None:
    """Record for `seconds` or until interrupted, write `output`, say what is in it.

    Raises:
        BlinkError: there is no such ring, or several and none was named.
    """
    from blink_runtime import _native

    ring, name = open_ring(ring_name)
    stop = StopEvent()
    with output.open("w", encoding="utf-8") as file:  # before the watch, which would be for nothing
        previous = signal.signal(signal.SIGINT, lambda *_: stop.set())
        try:
            trace = _native.StepTrace(ring)
            trace.skip_to_newest()
            # From here on no step is missed, so that whoever waits for this may begin.
            click.echo(f"recording {name} for {seconds:g} s; Ctrl-C ends it", err=True)
            recording = record(ring, trace, seconds, stop)
        except BaseException:
            if output.is_file():
                output.unlink()
            raise
        finally:
            signal.signal(signal.SIGINT, previous)
        file.write(json.dumps(trace_document(recording, name)))
    click.echo(f"{output}: {describe(recording)}")


def record(
    ring: _native.Ring, trace: _native.StepTrace, seconds: float, stop: threading.Event
) -> Recording:
    """Follow the ring for `seconds`; ends early on `stop` or when the scheduler has stopped."""
    recording = Recording(pages_total=ring.counters()["pages_total"])
    slots = SlotWatch()
    offset: int | None = None
    deadline = time.monotonic() + seconds
    is_over = False
    while not is_over:
        is_stopped = stop.wait(POLL_INTERVAL_S) or ring.header()["stopped"]
        is_over = bool(is_stopped) or time.monotonic() >= deadline
        records = trace.poll()
        now_ns = time.monotonic_ns()
        slots.see(ring.slots(), now_ns)
        if records:
            recording.steps += map(Step._make, records)
            lag = now_ns - recording.steps[-1].end_ns
            offset = lag if offset is None else min(offset, lag)
    recording.spans = slots.finish(now_ns)
    recording.num_missed = trace.num_missed
    recording.clock_offset_ns = offset or 0
    return recording


class SlotWatch:
    """Turns sightings of slots into spans of one state each."""

    def __init__(self) -> None:
        self._open: dict[int, RequestSpan] = {}
        self._spans: list[RequestSpan] = []

    def see(self, slots: Sequence[tuple[int, int, int, int, int, int]], now_ns: int) -> None:
        """Take what `Ring.slots()` gave at `now_ns`."""
        seen = {slot: (sequence, state, count) for slot, sequence, state, count, _, _ in slots}
        for slot in self._open.keys() - seen.keys():
            self._close(slot, now_ns, self._open[slot].num_generated)
        for slot, (sequence, state, count) in seen.items():
            span = self._open.get(slot)
            if span is not None and (span.sequence, span.state) != (sequence, state):
                same = span.sequence == sequence
                self._close(slot, now_ns, count if same else span.num_generated)
                span = None
            self._open[slot] = RequestSpan(
                slot=slot,
                sequence=sequence,
                state=state,
                start_ns=now_ns if span is None else span.start_ns,
                end_ns=now_ns,
                num_generated=count,
            )

    def _close(self, slot: int, now_ns: int, num_generated: int) -> None:
        span = self._open.pop(slot)
        self._spans.append(
            RequestSpan(
                slot=slot,
                sequence=span.sequence,
                state=span.state,
                start_ns=span.start_ns,
                end_ns=now_ns,
                num_generated=num_generated,
            )
        )

    def finish(self, now_ns: int) -> list[RequestSpan]:
        """Close what is open and return all spans, by their start."""
        for slot in list(self._open):
            self._close(slot, now_ns, self._open[slot].num_generated)
        return sorted(self._spans, key=lambda span: (span.start_ns, span.slot))


def trace_document(recording: Recording, name: str) -> dict[str, Any]:
    """Return the recording as a Chrome trace ("JSON object format"); times start at 0."""
    starts = [step.start_ns + recording.clock_offset_ns for step in recording.steps[:1]]
    starts += [span.start_ns for span in recording.spans[:1]]
    origin_ns = min(starts, default=0)
    events = [
        *_names(recording),
        *_step_events(recording, origin_ns - recording.clock_offset_ns),
        *_span_events(recording, origin_ns),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"ring": name, "steps": len(recording.steps), "missed": recording.num_missed},
    }


def _names(recording: Recording) -> Iterator[dict[str, Any]]:
    def name(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}

    yield name("process_name", STEPS_PROCESS, 0, "steps")
    for kind, text in enumerate(KINDS):
        yield name("thread_name", STEPS_PROCESS, kind + 1, text)
    if recording.spans:
        yield name("process_name", REQUESTS_PROCESS, 0, "requests")
    for slot in sorted({span.slot for span in recording.spans}):
        yield name("thread_name", REQUESTS_PROCESS, slot + 1, f"slot {slot}")


def _step_events(recording: Recording, origin_ns: int) -> Iterator[dict[str, Any]]:
    last = None
    for step in recording.steps:
        start_us = (step.start_ns - origin_ns) / 1000
        if last is not None and step.step != last + 1:
            yield {
                "name": f"{step.step - last - 1} steps missed",
                "ph": "i", "s": "p", "pid": STEPS_PROCESS, "tid": 0, "ts": start_us,
            }  # fmt: skip
        last = step.step
        kind = KINDS[step.kind] if step.kind < len(KINDS) else f"kind {step.kind}"
        yield {
            "name": f"{kind} {step.batch} x {step.seqlen}",
            "cat": kind, "ph": "X", "pid": STEPS_PROCESS, "tid": step.kind + 1,
            "ts": start_us, "dur": (step.end_ns - step.start_ns) / 1000,
            "args": {
                "step": step.step, "key_index": step.key_index, "lanes": step.num_lanes,
                "tokens": step.num_tokens,
            },
        }  # fmt: skip
        values = {
            "lanes": step.num_lanes,
            "waiting": step.requests_waiting,
            "pages used": recording.pages_total - step.pages_free,
        }
        for counter, value in values.items():
            yield {
                "name": counter, "ph": "C", "pid": STEPS_PROCESS, "ts": start_us,
                "args": {counter: value},
            }  # fmt: skip


def _span_events(recording: Recording, origin_ns: int) -> Iterator[dict[str, Any]]:
    for span in recording.spans:
        yield {
            "name": STATES[span.state],
            "cat": "request", "ph": "X", "pid": REQUESTS_PROCESS, "tid": span.slot + 1,
            "ts": (span.start_ns - origin_ns) / 1000,
            "dur": (span.end_ns - span.start_ns) / 1000,
            "args": {"sequence": span.sequence, "tokens": span.num_generated},
        }  # fmt: skip


def describe(recording: Recording) -> str:
    """Say in a line how many steps of which kind took how long."""
    parts = []
    for kind, name in enumerate(KINDS):
        times = sorted(s.end_ns - s.start_ns for s in recording.steps if s.kind == kind)
        if times:
            median = times[len(times) // 2] / 1e6
            noun = "step" if len(times) == 1 else "steps"
            parts.append(f"{len(times)} {name} {noun} (median {median:.3g} ms)")
    if not parts:
        parts.append("no steps: the server was idle")
    if recording.num_missed:
        parts.append(f"{recording.num_missed} steps were overwritten before they could be read")
    return ", ".join(parts)
