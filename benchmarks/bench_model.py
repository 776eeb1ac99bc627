"""Runs a compiled model's graphs on the GPU: files in a folder -> time a step, served tokens.

`PYTHONPATH=.:runtime python3 benchmarks/bench_model.py FOLDER [replay=CASES]
[serve=PLACEMENT]...`. The folder holds kernels.cu, kernels.cubin, scheduler.cubin, launches.json,
plan.json, config.json and inline.npz (computed weights); all other weights are made on the GPU at
random. `benchmarks/prepare_model.py` writes such a folder without a GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blink_runtime.cuda_driver import Context, Event, MappedBuffer
from blink_runtime.cuda_graphs import launch as cuda_driver_launch
from blink_runtime.cuda_kernels import choose_gemv as chosen_by_size
from blink_runtime.cuda_target import CudaFiles, CudaTarget, fill_random
from blink_runtime.manual_step import (
    write_pages,
    write_step,
)
from blink_runtime.ring_memory import RingMemory
from blinkc.capture.grid import GraphKey
from blinkc.capture.plan import CapturePlan, plan_from_json
from blinkc.engine.cuda_source import compile_kernels as compile_source
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blink_runtime.cuda_driver import Stream
    from blink_runtime.cuda_graphs import Launch
    from blink_runtime.gpu_ring import GpuRing

PEAK_BYTES_PER_S = 4.3e12  # copy, read + write, one H200
RESULTS: list[dict[str, Any]] = []


def report(name: str, **facts: Any) -> None:
    """Print and keep one line of results."""
    print(
        name,
        " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in facts.items()),
        flush=True,
    )
    RESULTS.append({"name": name, **facts})


def load_plan(folder: Path, keys: Sequence[GraphKey] | None = None) -> CapturePlan:
    """Read the plan; with `keys`, only those are captured (and the scheduler cannot run)."""
    data = json.loads((folder / "plan.json").read_text())
    plan = plan_from_json(data)
    if keys is not None:
        data["keys"] = [list(key) for key in keys]
        plan = replace(plan, keys=tuple(keys))
    return plan


def compile_kernels(folder: Path) -> None:
    """Compile kernels.cu unless that has been done."""
    cubin = folder / "kernels.cubin"
    if not cubin.exists():
        source = (folder / "kernels.cu").read_text()
        cubin.write_bytes(compile_source(source, "sm_90a"))


def load(
    folder: Path,
    placement: str,
    ring: MappedBuffer | GpuRing | None = None,
    keys: Sequence[GraphKey] | None = None,
    context: Context | None = None,
) -> CudaTarget:
    """Load the model with random weights."""
    inline = np.load(folder / "inline.npz")
    algorithms = folder / "algorithms.json"
    compile_kernels(folder)
    files = CudaFiles(
        kernels=(folder / "kernels.cubin").read_bytes(),
        scheduler=(folder / "scheduler.cubin").read_bytes(),
        launches=json.loads((folder / "launches.json").read_text()),
        algorithms=json.loads(algorithms.read_text()) if algorithms.exists() else {},
    )

    def fill(target: CudaTarget) -> None:
        from blink_runtime.cuda_driver import check, driver

        for number, entry in enumerate(target.launches["weights"]):
            if entry["name"] in inline:
                data = np.ascontiguousarray(inline[entry["name"]]).tobytes()
                holder = ctypes.create_string_buffer(data, len(data))
                check(
                    driver().cuMemcpyHtoD(
                        target.addresses.weights[number], ctypes.addressof(holder), len(data)
                    ),
                    "weight",
                )
            else:
                fill_random(target, number, entry, 1)

    return CudaTarget(
        files=files,
        plan=load_plan(folder, keys),
        ring_address=ring.address if ring else 0,
        ring_bytes=ring.num_bytes if ring else 0,
        fill_weights=fill,
        placement=placement,
        context=context,
        progress=print,
    )


def count_edges(target: CudaTarget, key: GraphKey) -> dict[str, int]:
    """Count a graph's edges, and how many of them are programmatic."""
    from blink_runtime.cuda_driver import check, driver
    from blink_runtime.cuda_graphs import Capture

    cu = driver()
    with Capture(target.stream) as capture:
        target.steps.enqueue(key, target.stream)
    assert capture.graph is not None
    name = "cuGraphGetEdges_v2" if hasattr(cu, "cuGraphGetEdges_v2") else "cuGraphGetEdges"
    found = check(getattr(cu, name)(capture.graph.handle, 0), "edges")
    count = int(found[-1])
    found = check(getattr(cu, name)(capture.graph.handle, count), "edges")
    data = found[2] if len(found) > 3 else []
    return {"edges": count, "programmatic": sum(int(getattr(e, "type", 0)) == 1 for e in data)}


def replay(folder: Path, cases: Sequence[tuple[str, int, int, int]]) -> None:
    """Time graphs launched back to back by the host: (kind, batch, key seqlen, tokens a row)."""
    keys = tuple(GraphKey(kind, batch, seqlen) for kind, batch, seqlen, _ in cases)
    target = load(folder, "none", keys=keys)
    report("load", **{name: getattr(target.report, name) for name in target.report.__slots__})
    report("edges", **count_edges(target, keys[0]))
    (folder / "algorithms.json").write_text(json.dumps(target.products.algorithms))
    rng = np.random.default_rng(1)
    vocab = target.launches["vocab_size"]
    for key, exec_, (_, _, _, length) in zip(keys, target.execs, cases, strict=True):
        lanes = key.batch
        write_pages(
            target, lanes, min(target.plan.max_pages_per_lane, target.plan.num_kv_pages // lanes)
        )
        if key.kind == "decode":
            rows = [(rng.integers(0, vocab, 1).tolist(), length - 1) for _ in range(lanes)]
        else:
            rows = [(rng.integers(0, vocab, length).tolist(), 0) for _ in range(lanes)]
        write_step(target, key, rows, 1)
        repeats = 60 if key.kind == "decode" else 10
        times = []
        for trial in range(4):
            start, end = Event(), Event()
            start.record(target.stream)
            for _ in range(repeats):
                exec_.launch(target.stream)
            end.record(target.stream)
            if trial:
                times.append(end.milliseconds_since(start) / repeats)
        report(
            f"replay {key.kind} batch={key.batch} seqlen={key.seqlen} length={length}",
            ms=statistics.median(times),
        )
    target.close()


def _launch_early(early: bool, item: Launch, stream: Stream) -> None:
    cuda_driver_launch(replace(item, early=early), stream)


def _always(chosen: Any, *_sizes: int) -> Any:
    return chosen


def override(settings: str) -> None:
    """Try variants: `early=0` (no programmatic launch), `gemv=NAME` (an instance for every small
    product),
    `stream=N` (streaming products up to N rows), `narrow=N` (warpgroup products from N rows on),
    `warps=N` (of a block of decode attention)."""
    from blink_runtime import cuda_kernels, cuda_steps
    from blinkc.engine.cuda_instances import GEMV_INSTANCES

    for setting in settings.split("+"):
        name, _, value = setting.partition(":")
        if name == "early":
            cuda_steps.launch = partial(_launch_early, value == "1")
        elif name == "gemv":
            chosen = next(g for g in GEMV_INSTANCES if g.name == value)
            cuda_kernels.choose_gemv = partial(_always, chosen)
        elif name == "stream":
            cuda_steps.MAX_STREAM_ROWS = int(value)
        elif name == "warps":
            cuda_kernels.choose_decode_warps = partial(_always, int(value))
        elif name == "narrow":
            cuda_steps.MIN_NARROW_ROWS = int(value)
        elif name == "reset":
            cuda_steps.launch = cuda_driver_launch
            cuda_kernels.choose_gemv = chosen_by_size
            cuda_steps.MAX_STREAM_ROWS = 16
    print("variant:", settings, flush=True)


def profile(folder: Path, key: GraphKey, length: int) -> None:
    """Time each kind of operation of a step alone, in a graph of its own, to see where a step's
    time goes."""
    from collections import defaultdict

    from blink_runtime.cuda_graphs import Capture, GraphExec, launch

    target = load(folder, "none", keys=(key,))
    write_pages(
        target,
        key.batch,
        min(target.plan.max_pages_per_lane, target.plan.num_kv_pages // key.batch),
    )
    # Tokens at random, and one whole step first, so that routing sees what it would see.
    rng = np.random.default_rng(1)
    new = 1 if key.kind == "decode" else length
    vocab = target.launches["vocab_size"]
    rows = [(rng.integers(0, vocab, new).tolist(), length - new) for _ in range(key.batch)]
    write_step(target, key, rows, 1)
    target.execs[0].launch(target.stream)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in target.launches["steps"]:
        name = entry.get("kernel") or (
            f"gemm {entry['n']}x{entry['k']}" if entry["op"] == "gemm" else entry["op"]
        )
        groups[name].append(entry)
    for name, entries in groups.items():
        with Capture(target.stream) as capture:
            for entry in entries:
                if entry["op"] == "gemm":
                    target.steps._product(
                        entry,
                        key.batch
                        if entry["rows"] == "samples" or key.kind == "decode"
                        else key.seqlen,
                        target.stream,
                    )
                else:
                    for item in target.steps._expand(entry, key):
                        launch(item, target.stream)
        run = GraphExec(capture.graph, device_launch=False, name=name)
        times = []
        for _ in range(8):
            start, end = Event(), Event()
            start.record(target.stream)
            run.launch(target.stream)
            end.record(target.stream)
            times.append(end.milliseconds_since(start))
        report(
            f"profile {key.kind} {key.batch}x{key.seqlen}: {name} x{len(entries)}",
            total_ms=statistics.median(times),
            each_us=statistics.median(times) / len(entries) * 1000,
        )
        run.close()
    target.close()


def compare_chained(folder: Path, cases: Sequence[tuple[str, int, int, int]]) -> None:
    """Say what the scheduler as last node adds: the graph with it against the graph without,
    interleaved.

    The scheduler's kernel runs its policy on a ring without requests, and launches nothing.
    """
    from blink_runtime.cuda_graphs import Capture, GraphExec, launch

    keys = tuple(GraphKey(kind, batch, seqlen) for kind, batch, seqlen, _ in cases)
    context = Context()
    plan = load_plan(folder)
    ring = RingMemory(plan, lambda size: MappedBuffer(size, "the ring"))
    target = load(folder, "chained", ring=ring.memory, keys=plan.keys, context=context)
    ring.stop()  # the policy then chooses to stop: no graph is launched
    rng = np.random.default_rng(1)
    for key, (_, _, _, length) in zip(keys, cases, strict=True):
        write_pages(target, key.batch, min(plan.max_pages_per_lane, plan.num_kv_pages // key.batch))
        new = 1 if key.kind == "decode" else length
        rows = [(rng.integers(0, plan.vocab_size, new).tolist(), length - new)] * key.batch
        write_step(target, key, rows, 1)
        execs = []
        for with_scheduler in (False, True):
            with Capture(target.stream) as capture:
                target.steps.enqueue(key, target.stream)
                if with_scheduler:
                    state = ctypes.c_uint64(target._state.address)
                    launch(target._scheduler_launch("blink_scheduler_step", state), target.stream)
            execs.append(GraphExec(capture.graph, device_launch=False, name="compare"))
        ratios, plain = [], []
        for _ in range(20):
            times = []
            for run in execs:
                start, end = Event(), Event()
                start.record(target.stream)
                for _ in range(4):
                    run.launch(target.stream)
                end.record(target.stream)
                times.append(end.milliseconds_since(start) / 4)
            ratios.append(times[1] / times[0] - 1)
            plain.append(times[0])
        report(
            f"scheduler as last node {key.kind} {key.batch}x{key.seqlen}",
            plain_ms=statistics.median(plain),
            added_percent=100 * statistics.median(ratios),
        )
    target.close()


def serve(
    folder: Path, placement: str, jobs: Sequence[tuple[int, int, int]], keys_limit: int = 0
) -> None:
    """Serve requests from a ring in mapped memory: (requests at once, prompt tokens, output
    tokens)."""
    context = Context()
    plan = load_plan(folder)
    ring = RingMemory(plan, lambda size: MappedBuffer(size, "the ring"))
    started = time.monotonic()
    target = load(folder, placement, ring=ring.memory, context=context)
    report(
        f"load {placement}",
        total_s=time.monotonic() - started,
        **{name: getattr(target.report, name) for name in target.report.__slots__},
    )
    target.start()
    rng = np.random.default_rng(2)
    try:
        for number, prompt, output in jobs:
            prompts = [rng.integers(0, plan.vocab_size, prompt).tolist() for _ in range(number)]
            result = ring.run(prompts, output, timeout_s=60.0)
            report(f"serve {placement} {number} x {prompt}->{output}", **result)
    finally:
        started = time.monotonic()
        ring.stop()
        stopped = target.join(10.0)
        report(
            f"stop {placement}",
            stopped=stopped,
            seconds=time.monotonic() - started,
            **ring.summary(),
        )
        if not stopped:
            os._exit(3)
    target.close()


def write_results(folder: Path) -> None:
    """Keep what was reported as JSON in the folder that OUT names."""
    if "OUT" in os.environ and RESULTS:
        parts = [Path(sys.argv[0]).stem, folder.name, *(a.split("=")[0] for a in sys.argv[2:3])]
        name = "_".join(Path(part).name for part in parts)
        data = {"command": sys.argv, "results": RESULTS}
        Path(os.environ["OUT"], f"{name}.json").write_text(json.dumps(data, indent=1))


def main() -> None:
    """Run the named parts over a folder."""
    if len(sys.argv) < 3 or not Path(sys.argv[1]).is_dir():
        sys.exit(
            "bench_model.py: give a folder that prepare_model.py wrote and what to run on it, such "
            "as serve=host,1:64:64"
        )
    folder = Path(sys.argv[1])
    for part in sys.argv[2:]:
        name, _, value = part.partition("=")
        if name == "compile":
            compile_kernels(folder)
        elif name == "replay":
            cases = [c.split(":") for c in value.split(",")]
            replay(folder, [(k, int(b), int(s), int(n)) for k, b, s, n in cases])
        elif name == "variant":
            override(value)
        elif name == "profile":
            kind, batch, seqlen, length = value.split(":")
            profile(folder, GraphKey(kind, int(batch), int(seqlen)), int(length))
        elif name == "compare":
            cases = [c.split(":") for c in value.split(",")]
            compare_chained(folder, [(k, int(b), int(s), int(n)) for k, b, s, n in cases])
        elif name == "serve":
            placement, *jobs = value.split(",")
            serve(folder, placement, [tuple(map(int, j.split(":"))) for j in jobs])  # type: ignore[misc]
    write_results(folder)


if __name__ == "__main__":
    try:
        main()
    except BlinkError as error:  # such as: there is no GPU
        sys.exit(f"bench_model.py: {error}")
