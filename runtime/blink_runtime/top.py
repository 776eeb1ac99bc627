"""`blink-runtime top`: a live view of a ring, read from shared memory beside the server.

Reading is one-sided: the server neither knows nor waits.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from blink_runtime.shared_ring import open_ring

if TYPE_CHECKING:
    from blink_runtime import _native

STATES = (
    "empty", "prefill pending", "prefilling", "decoding", "paused", "completed", "failed",
)  # fmt: skip
SCHEDULER = ("starting", "idle", "running", "stopped")
BAR_CELLS = 40
MAX_SLOT_LINES = 24
NUM_STEPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Counters at one moment; two of them give rates."""

    time_s: float
    steps: int
    output_tokens: int
    prompt_tokens: int


def run_top(ring_name: str | None, *, once: bool, interval_s: float) -> None:
    """Print the view once, as also where no terminal shows it, or redraw it until interrupted.

    Raises:
        BlinkError: there is no such ring, or several and none was named.
    """
    ring, name = open_ring(ring_name)
    previous = take_sample(ring)
    try:
        while True:
            time.sleep(interval_s)
            sample = take_sample(ring)
            lines = render(ring, name, previous, sample)
            if once or not sys.stdout.isatty():
                click.echo("\n".join(lines))
                return
            sys.stdout.write("\x1b[H\x1b[J" + "\n".join(lines) + "\n")
            sys.stdout.flush()
            previous = sample
    except KeyboardInterrupt:
        return


def take_sample(ring: _native.Ring) -> Sample:
    """Read the counters that rates are made of."""
    counters = ring.counters()
    return Sample(
        time_s=time.monotonic(),
        steps=counters["steps"],
        output_tokens=counters["output_tokens"],
        prompt_tokens=counters["prompt_tokens"],
    )


def render(ring: _native.Ring, name: str, before: Sample, now: Sample) -> list[str]:
    """Return the view as lines of text."""
    header, counters, slots = ring.header(), ring.counters(), ring.slots()
    seconds = max(now.time_s - before.time_s, 1e-6)
    used = counters["pages_total"] - counters["pages_free"]
    lines = [
        f"ring {name}  scheduler {SCHEDULER[header['scheduler_state']]}  "
        f"heartbeat {header['heartbeat']}  step {header['step']}",
        "",
        _bar("lanes", counters["lanes_running"], header["max_batch"]),
        _bar("pages", used, counters["pages_total"]),
        _bar("slots", len(slots), header["num_slots"]),
        "",
        f"steps/s {(now.steps - before.steps) / seconds:9.1f}   "
        f"output tok/s {(now.output_tokens - before.output_tokens) / seconds:9.1f}   "
        f"prompt tok/s {(now.prompt_tokens - before.prompt_tokens) / seconds:9.1f}",
        f"waiting {counters['requests_waiting']}   finished {counters['finished']}   "
        f"aborted {counters['aborted']}   failed {counters['failed']}   "
        f"paused {counters['paused']}   off the cache {counters['off_cache_steps']}",
        _step_line(ring),
        "",
        f"{'slot':>5} {'state':<16} {'tokens':>7}",
    ]
    lines += [
        f"{slot:>5} {STATES[state]:<16} {num_generated:>7}"
        for slot, _, state, num_generated, _, _ in slots[:MAX_SLOT_LINES]
    ]
    if len(slots) > MAX_SLOT_LINES:
        lines.append(f"      and {len(slots) - MAX_SLOT_LINES} more")
    return lines


def _step_line(ring: _native.Ring) -> str:
    """Draw the newest steps, oldest first: P a prefill, a bar of the decode's lanes else."""
    records = ring.trace(NUM_STEPS)
    if not records:
        return "steps   none yet"
    cells = ""
    for record in records:
        level = min(7, record["num_lanes"] * 8 // max(record["batch"], 1))
        cells += "P" if record["kind"] == 0 else "▁▂▃▄▅▆▇█"[level]
    newest = records[-1]
    milliseconds = (newest["end_ns"] - newest["start_ns"]) / 1e6
    return f"steps   {cells}  last {milliseconds:.2f} ms"


def _bar(label: str, value: int, limit: int) -> str:
    cells = BAR_CELLS * value // max(limit, 1)
    return f"{label:<6} [{'#' * cells}{' ' * (BAR_CELLS - cells)}] {value}/{limit}"
