"""Has plans built, and keeps them: segments + row ranges -> plan files in the BUILD folder.

A plan's file is named by everything that decides its content. What is there is not built again, so
a killed build goes on where it was.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import blinkc
from blinkc.build_folder import digest_of, hash_file
from blinkc.engine.options import EngineOptions
from blinkc.engine.tensorrt_api import TensorRtApi
from blinkc.engine.tensorrt_build import OTHER_ENGINE
from blinkc.engine.tensorrt_model import EngineModel
from blinkc.engine.tensorrt_profiles import RowRange
from blinkc.engine.tensorrt_worker import MIN_LEVEL, PlanJob, WorkerJob, job_to_json
from blinkc.errors import BlinkError
from blinkc.usable_cores import usable_cores

DEFAULT_WORKSPACE_BYTES = 4 << 30
_MAX_LOG_CHARS = 8000
_MAX_WORKERS = 4  # each takes half a gigabyte of host memory
_GRACE_S = 2.0  # a version that reports progress ends by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltPlan:
    """A plan that lies in `path`, and what its building took."""

    segment: str
    path: Path
    version: str  # of the TensorRT that built it
    level: int
    seconds: float
    scratch_bytes: int  # 0: only the GPU can tell

    @property
    def sha256(self) -> str:
        """Return the digest of the plan."""
        return hash_file(self.path)


def build_plans(
    api: TensorRtApi,
    models: Sequence[EngineModel],
    ranges: Sequence[RowRange],
    folder: Path,
    *,
    targets: tuple[str, ...],
    gpu: str,
    options: EngineOptions,
    say: Callable[[str], None] = lambda text: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[BuiltPlan]:
    """Return a plan for each model, built now or found in `folder`.

    Args:
        api: the TensorRT of this process; the workers import the same.
        ranges: an optimization profile each.
        folder: where plans and the timing cache are kept.
        targets: GPUs to build for that need not be here; empty: the GPU of this machine.
        gpu: GPU and driver of this machine, which decide what is built for it; else empty.
        say: gets progress that passes.
        note: gets a line for each plan that is done.

    Raises:
        BlinkError: a plan cannot be built. Those before it are kept.
        KeyboardInterrupt: Ctrl-C; the worker is gone then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    level = api.traits.default_level if options.level is None else options.level
    job = WorkerJob(
        engine=api.engine,
        targets=targets,
        optimization_level=level,
        max_workspace_bytes=options.max_workspace_bytes or DEFAULT_WORKSPACE_BYTES,
        timing_cache="" if targets else str(folder / f"timing-{api.engine}-{api.version_text}"),
        budget_s=options.budget_s,
        plans=(),
    )
    facts = (api.engine, api.version_text, targets, gpu, level, job.max_workspace_bytes, ranges)
    outs = [folder / f"{digest_of(facts, model)[:32]}.plan" for model in models]
    missing = [number for number, out in enumerate(outs) if _read_plan("", out) is None]
    if missing:
        with tempfile.TemporaryDirectory(prefix="blinkc-plans-") as scratch:
            jobs = [
                _plan_job(models[number], ranges, outs[number], Path(scratch) / f"{number}.onnx")
                for number in missing
            ]
            # Where nothing is timed, plans are built side by side: on level 0 TensorRT takes the
            # first tactic that works, and for a GPU that is not here it cannot time anything.
            # Elsewhere neighbours would disturb the timing.
            is_timed = not targets and level > MIN_LEVEL
            groups = [jobs] if is_timed else [[job] for job in jobs]
            with _Workers(api, Path(scratch), say, note) as workers:
                workers.run([replace(job, plans=tuple(group)) for group in groups])
    plans = []
    for model, out in zip(models, outs, strict=True):
        plan = _read_plan(model.name, out)
        if plan is None:
            raise BlinkError(f"{api.title} wrote no plan for segment {model.name}")
        plans.append(plan)
    return plans


def _plan_job(
    model: EngineModel, ranges: Sequence[RowRange], out: Path, model_path: Path
) -> PlanJob:
    model_path.write_bytes(model.model)
    return PlanJob(
        name=model.name,
        model=str(model_path),
        out=str(out.resolve()),
        activations=model.activations,
        weights=model.weights,
        outputs=model.outputs,
        ranges=tuple(ranges),
    )


def _read_plan(segment: str, out: Path) -> BuiltPlan | None:
    """Return a plan that is there; its facts are written after it, so half of it is none."""
    try:
        facts = json.loads(out.with_name(out.name + ".json").read_text(encoding="utf-8"))
        if not out.stat().st_size:
            return None
        return BuiltPlan(segment=segment, path=out, **facts)
    except (OSError, ValueError, TypeError):
        return None


class _Workers:
    """Worker processes, a few at a time; leaving the `with` block ends those that still run."""

    def __init__(
        self,
        api: TensorRtApi,
        scratch: Path,
        say: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._api = api
        self._scratch = scratch
        self._say = say
        self._note = note
        self._running: set[subprocess.Popen[str]] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def run(self, jobs: Sequence[WorkerJob]) -> None:
        """Run all jobs.

        Raises:
            BlinkError: of the first job that failed; plans of the others are kept.
        """
        with ThreadPoolExecutor(max(1, min(len(jobs), usable_cores(), _MAX_WORKERS))) as pool:
            try:
                waiting = [pool.submit(self._run, job, n) for n, job in enumerate(jobs)]
                for done in waiting:
                    done.result()
            except BaseException:
                self._end(close=True)
                raise

    def _run(self, job: WorkerJob, number: int) -> None:
        """Run one job; one that takes too long goes on at the lowest level."""
        deadline = time.monotonic() + job.budget_s if job.budget_s else 0.0
        if self._run_once(job, number, deadline):
            return
        left = tuple(plan for plan in job.plans if _read_plan("", Path(plan.out)) is None)
        lowest = replace(job, plans=left, optimization_level=MIN_LEVEL, budget_s=0.0)
        self._run_once(lowest, number, 0.0)

    def _run_once(self, job: WorkerJob, number: int, deadline: float) -> bool:
        """Return False when the time was over before the plans were there."""
        job_path = self._scratch / f"job{number}.json"
        job_path.write_text(job_to_json(job), encoding="utf-8")
        log_path = self._scratch / f"log{number}.txt"
        timer: threading.Timer | None = None
        late = threading.Event()
        with log_path.open("wb") as log:
            process = self._start(job_path, log)

            def end() -> None:
                late.set()
                process.kill()

            if deadline and job.optimization_level > MIN_LEVEL:
                timer = threading.Timer(max(deadline - time.monotonic(), 0.0) + _GRACE_S, end)
                timer.start()
            refusal: dict[str, Any] = {}
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    refusal = _hear(line, job, self._say, self._note) or refusal
            status = process.wait()
        if timer is not None:
            timer.cancel()
        with self._lock:
            self._running.discard(process)
        if late.is_set():
            return False
        if refusal:
            raise BlinkError(refusal["error"], hint=refusal["hint"], log=refusal["log"])
        if status != 0 and not self._is_closed:
            names = ", ".join(plan.name for plan in job.plans)
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise BlinkError(
                f"{self._api.title} ended with {how} while building segment {names}",
                hint=OTHER_ENGINE,
                log=log_path.read_text(encoding="utf-8", errors="replace")[-_MAX_LOG_CHARS:],
            )
        return True

    def _start(self, job_path: Path, log: IO[bytes]) -> subprocess.Popen[str]:
        root = str(Path(blinkc.__file__).resolve().parents[1])
        paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment.pop("BLINK_FIXED_LAYOUT", None)
        with self._lock:
            if self._is_closed:
                raise BlinkError("the build was ended")
            process = subprocess.Popen(
                [sys.executable, "-m", "blinkc.engine.tensorrt_worker", str(job_path)],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                text=True,
                start_new_session=True,  # a terminal's Ctrl-C comes to us, and we end it
            )
            self._running.add(process)
        return process

    def _end(self, *, close: bool) -> None:
        with self._lock:
            self._is_closed = self._is_closed or close
            for process in self._running:
                process.kill()

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(close=True)


def _hear(
    line: str, job: WorkerJob, say: Callable[[str], None], note: Callable[[str], None]
) -> dict[str, Any] | None:
    """Pass on a worker's line; return it when it says why it stops."""
    try:
        data: dict[str, Any] = json.loads(line)
    except ValueError:
        return None  # something that a library printed
    if "error" in data:
        return data
    if "done" in data:
        name = job.plans[int(data["done"])].name
        note(f"{name}: {data['seconds']:.1f} s at level {data['level']}")
    elif "phase" in data:
        name = job.plans[int(data["plan"])].name
        say(f"{name}: {data['phase']}, {data['step']} of {data['num_steps']}")
    return None
