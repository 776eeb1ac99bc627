"""Measures plans against this project's kernels, segment by segment, on the GPU that serves.

Calls of a segment are captured in a row and replayed: what is timed is what the step's graph will
do, without the host's part in it. Weights are random; only their size matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blink_runtime.cuda_driver import Event
from blink_runtime.cuda_graphs import Capture, GraphExec
from blink_runtime.cuda_steps import CudaSteps
from blink_runtime.cuda_target import CudaFiles, CudaTarget, random_weights
from blinkc.engine.segment_engines import (
    OWN_KERNELS,
    SegmentEngine,
    choice_name,
    choose_narrowest,
    segment_engine_from_json,
)
from blinkc.engine.tensorrt_profiles import key_rows

if TYPE_CHECKING:
    from blinkc.capture.grid import GraphKey
    from blinkc.capture.plan import CapturePlan
    from blinkc.engine.tensorrt_api import TensorRtApi

MAX_CALLS, REPEATS = 8, 2  # calls of different layers in a row, and how often
REPLAYS = 3
Timings = dict[tuple[int, int], dict[int, float]]  # (tokens, samples) -> choice -> microseconds
MAX_MEASURED_KEYS = 6
# A plan must be this much faster: kernels of ours need no scratch and no second library.
ADVANTAGE = 1.02


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredChoice:
    """Engines with a choice for every key, and the microseconds behind it.

    `timings`: segment -> "<n> rows" -> "kernels" or "profile <n>" -> microseconds a call.
    """

    engines: tuple[SegmentEngine, ...]
    timings: dict[str, dict[str, dict[str, float]]]


def measured_keys(keys: Sequence[GraphKey]) -> list[GraphKey]:
    """Choose keys that stand for all others: different row counts, spread over their range."""
    by_rows = {key_rows(key): key for key in reversed(keys)}
    rows = sorted(by_rows)
    if len(rows) > MAX_MEASURED_KEYS:
        last = len(rows) - 1
        places = {round(n * last / (MAX_MEASURED_KEYS - 1)) for n in range(MAX_MEASURED_KEYS)}
        rows = [rows[place] for place in sorted(places)]
    return [by_rows[pair] for pair in rows]


def choose(
    engine: SegmentEngine,
    keys: Sequence[GraphKey],
    timings: Mapping[tuple[int, int], Mapping[int, float]],
) -> tuple[int, ...]:
    """Give each key the fastest of what was measured at the nearest row count.

    Args:
        timings: (tokens, samples) -> choice -> microseconds.
    """
    choices = []
    for key in keys:
        tokens, _ = key_rows(key)
        nearest = min(timings, key=lambda rows: (abs(rows[0] - tokens), rows))
        fitting = {
            choice: us
            for choice, us in timings[nearest].items()
            if choice == OWN_KERNELS or engine.ranges[choice].holds(key)
        }
        kernels = fitting.get(OWN_KERNELS, float("inf"))
        best = min(fitting, key=lambda choice: (fitting[choice], choice))
        is_worth_it = fitting[best] * ADVANTAGE <= kernels
        choices.append(best if is_worth_it or OWN_KERNELS not in fitting else OWN_KERNELS)
    return tuple(choices)


def measure_choices(
    *,
    api: TensorRtApi,
    plan: CapturePlan,
    launches: dict[str, Any],
    kernels: bytes,
    plans: Mapping[str, bytes],
    say: Callable[[str], None] = lambda text: None,
) -> MeasuredChoice:
    """Time every segment on a few keys, with kernels and with every profile that holds the key.

    Args:
        kernels: the cubin of the launch list's kernels.
        plans: contents of the plan files, by the launch list's names.

    Raises:
        BlinkError: the GPU is not here, or the model does not fit it.
    """
    keys = tuple(measured_keys(plan.keys))
    engines = [segment_engine_from_json(entry) for entry in launches["engines"]]
    first = [
        replace(
            engine,
            choices=choose_narrowest(engine.segment, engine.ranges, keys, has_kernels=True),
        )
        for engine in engines
    ]
    files = CudaFiles(
        kernels=kernels,
        scheduler=b"",
        launches={**launches, "engines": [engine.to_json() for engine in first]},
        plans=dict(plans),
        tensorrt=api,
    )
    with CudaTarget(
        files=files,
        plan=replace(plan, keys=keys),
        ring_address=0,
        ring_bytes=0,
        fill_weights=random_weights(1),
        placement="none",
        progress=say,
    ) as target:
        results = []
        timings: dict[str, dict[str, dict[str, float]]] = {}
        for number, engine in enumerate(engines):
            measured: Timings = {}
            for key in keys:
                fitting = [n for n, item in enumerate(engine.ranges) if item.holds(key)]
                measured[key_rows(key)] = {
                    choice: _time(target, number, choice, key) for choice in (OWN_KERNELS, *fitting)
                }
            results.append(replace(engine, choices=choose(engine, plan.keys, measured)))
            timings[engine.segment] = {
                f"{tokens} rows": {
                    choice_name(choice): round(us, 2) for choice, us in by_choice.items()
                }
                for (tokens, _), by_choice in measured.items()
            }
            say(f"measured segment {engine.segment}")
    return MeasuredChoice(engines=tuple(results), timings=timings)


def _time(target: CudaTarget, engine: int, choice: int, key: GraphKey) -> float:
    """Return the microseconds of one call of a segment, of different layers one after another."""
    assert target.engines is not None
    stream = target.stream
    entries = calls_of(target.launches["steps"], engine, MAX_CALLS)
    num_calls = sum(entry["op"] == "engine" for entry in entries)
    steps = CudaSteps(
        {**target.launches, "steps": entries},
        target.kernels,
        target.products,
        target.addresses,
        target.step.addresses,
        target.plan.keys,
        target.engines,
    )
    with target.engines.forced(engine, choice):
        steps.tune(key, stream)
        steps.prepare(key, stream)
        with Capture(stream) as capture:
            for _ in range(REPEATS):
                steps.enqueue(key, stream)
    assert capture.graph is not None
    made = GraphExec(capture.graph, device_launch=False, name="measurement")
    capture.graph.close()
    best = float("inf")
    for _ in range(REPLAYS + 1):  # the first one warms up
        start, end = Event(), Event()
        start.record(stream)
        made.launch(stream)
        end.record(stream)
        best = min(best, end.milliseconds_since(start) * 1e3 / (REPEATS * num_calls))
    made.close()
    steps.close()
    return best


def calls_of(steps: Sequence[dict[str, Any]], engine: int, most: int) -> list[dict[str, Any]]:
    """Return the entries of up to `most` calls of a segment: its plan's, then its kernels'."""
    entries: list[dict[str, Any]] = []
    num_calls = 0
    for entry in steps:
        if entry.get("engine", entry.get("instead_of")) != engine:
            continue
        num_calls += entry["op"] == "engine"
        if num_calls > most:
            break
        entries.append(entry)
    return entries
