"""The process that builds plans: a job file -> plan files, with progress as JSON lines on stdout.

A process of its own, so that Ctrl-C ends a build at once, whatever TensorRT is doing; so that a
crash of it is an error message; and so that plans come out the same each time: TensorRT-RTX orders
parts of a plan by address, hence the layout of this process's memory is not random.

Needs Python's own library and TensorRT, neither onnx nor numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blinkc.build_folder import write_atomically
from blinkc.engine.tensorrt_api import TensorRtApi, load_tensorrt
from blinkc.engine.tensorrt_build import BuildStopped, TensorRtConfig, build_plan
from blinkc.engine.tensorrt_model import EngineInput, EngineModel
from blinkc.engine.tensorrt_profiles import RowRange
from blinkc.errors import BlinkError

_FIXED_LAYOUT = "BLINK_FIXED_LAYOUT"
_ADDR_NO_RANDOMIZE = 0x0040000  # personality(2)
_PR_SET_PDEATHSIG = 1  # prctl(2)
_MIN_LINE_INTERVAL_S = 0.2
MIN_LEVEL = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanJob:
    """One plan to build."""

    name: str
    model: str  # file of the ONNX model
    out: str  # file of the plan; beside it `<out>.json` says what it took
    activations: tuple[EngineInput, ...]
    weights: tuple[EngineInput, ...]
    outputs: tuple[EngineInput, ...]
    ranges: tuple[RowRange, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJob:
    """What one worker does, in this order."""

    engine: str
    targets: tuple[str, ...]
    optimization_level: int
    max_workspace_bytes: int
    timing_cache: str  # file; empty: none
    budget_s: float  # for all plans together; 0: as long as it takes
    plans: tuple[PlanJob, ...]


def job_to_json(job: WorkerJob) -> str:
    """Write a job as text."""
    return json.dumps(asdict(job), indent=1)


def job_from_json(text: str) -> WorkerJob:
    """Read what `job_to_json` wrote."""
    data: dict[str, Any] = json.loads(text)
    plans = []
    for entry in data["plans"]:
        tensors = {
            kind: tuple(EngineInput(**{**x, "shape": tuple(x["shape"])}) for x in entry[kind])
            for kind in ("activations", "weights", "outputs")
        }
        ranges = tuple(RowRange(**item) for item in entry["ranges"])
        plans.append(PlanJob(**{**entry, **tensors, "ranges": ranges}))
    return WorkerJob(**{**data, "targets": tuple(data["targets"]), "plans": tuple(plans)})


def main(path: str) -> int:
    """Build a job's plans; the exit status is 0 when all are there."""
    _end_with_parent()
    _fix_layout()
    job = job_from_json(Path(path).read_text(encoding="utf-8"))
    try:
        api = load_tensorrt(job.engine)
        deadline = time.monotonic() + job.budget_s if job.budget_s else 0.0
        level = job.optimization_level
        for number, plan in enumerate(job.plans):
            level = _build(api, job, number, plan, level, deadline)
    except BlinkError as error:
        _say(error=error.message, hint=error.hint, log=error.log)
        return 1
    return 0


def _build(
    api: TensorRtApi, job: WorkerJob, number: int, plan: PlanJob, level: int, deadline: float
) -> int:
    """Build one plan at `level`, or lower when the time budget asks for it; return the level."""
    started = time.monotonic()
    model = EngineModel(
        name=plan.name,
        model=Path(plan.model).read_bytes(),
        activations=plan.activations,
        weights=plan.weights,
        outputs=plan.outputs,
    )
    while True:
        config = TensorRtConfig(
            targets=job.targets,
            optimization_level=level,
            max_workspace_bytes=job.max_workspace_bytes,
            timing_cache=Path(job.timing_cache) if job.timing_cache else None,
        )
        # The lowest level is never stopped: a plan comes out in any case.
        stops_at = deadline if level > MIN_LEVEL else 0.0
        try:
            built = build_plan(api, model, plan.ranges, config, _Reporter(number, stops_at))
            break
        except BuildStopped:
            level = MIN_LEVEL
    out = Path(plan.out)
    write_atomically(out, built.data)
    facts = {
        "version": api.version_text,
        "level": level,
        "seconds": round(built.seconds, 3),
        "scratch_bytes": built.scratch_bytes,
    }
    write_atomically(out.with_name(out.name + ".json"), json.dumps(facts).encode())
    _say(done=number, **facts)
    took = time.monotonic() - started
    left = len(job.plans) - number - 1
    if deadline and left and time.monotonic() + took * left > deadline:
        return max(MIN_LEVEL, level - 1)
    return level


class _Reporter:
    """Prints progress, not too often; says False once the time is over."""

    def __init__(self, number: int, stops_at: float) -> None:
        self._number = number
        self._stops_at = stops_at
        self._last = 0.0

    def __call__(self, phase: str, step: int, num_steps: int) -> bool:
        now = time.monotonic()
        if now - self._last >= _MIN_LINE_INTERVAL_S:
            self._last = now
            _say(plan=self._number, phase=phase, step=step, num_steps=num_steps)
        return not self._stops_at or now < self._stops_at


def _say(**data: Any) -> None:
    print(json.dumps(data), flush=True)


def _end_with_parent() -> None:
    """End when the compiler does, however it is ended: nobody else would stop a long build."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _fix_layout() -> None:
    """Start over with a memory layout that is not random, where the kernel lets us."""
    if os.environ.get(_FIXED_LAYOUT):
        return
    os.environ[_FIXED_LAYOUT] = "1"
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if libc.personality(_ADDR_NO_RANDOMIZE) != -1:
            os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
