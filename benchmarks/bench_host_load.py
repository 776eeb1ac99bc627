"""Does load on the host reach the tail? A server at a fixed rate, its host idle and loaded in turn.

Front end and client have four cores to themselves (standing in for a DPU's); every other core gets
three processes that allocate and stream memory. Idle and loaded alternate (ABAB), so that drift
hits both. Then the same without the reservation, as a contrast.

`python -m benchmarks.bench_host_load --folder PREPARED` (GPU) or `--bundle BUNDLE` (CPU target).
Output: JSON with P99 time per output token and P99 time to first token, their loaded/idle ratios
with bootstrap intervals, steal time and the load's own CPU time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import host_facts
from benchmarks.http_load import Load, LoadClient, RequestTimes, percentile
from benchmarks.server_process import ServerProcess, bundle_server, gpu_server

RESERVED_CORES = 4
PROCESSES_PER_CORE = 3
WORKER_MEGABYTES = 64
SETTLE_S = 1.0  # after the load has started or ended
NUM_RESAMPLES = 2000
BAR_PERCENT = 5.0


def stream_memory() -> None:
    """Allocate, fill, copy and free, for ever: page faults, caches and memory bandwidth."""
    while True:
        source = np.empty(WORKER_MEGABYTES << 17)
        source.fill(1.5)
        copy = source.copy()
        copy += source
        del source, copy


class HostLoad:
    """Processes that keep `cores` busy, `PROCESSES_PER_CORE` each, while in `with`."""

    def __init__(self, cores: set[int], num_processes: int) -> None:
        self._cores = cores
        self._num_processes = num_processes
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self.cpu_s = 0.0

    def __enter__(self) -> HostLoad:
        context = multiprocessing.get_context("fork")
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        try:
            for _ in range(self._num_processes):
                process = context.Process(target=stream_memory, daemon=True)
                process.start()
                self._processes.append(process)
        finally:
            os.sched_setaffinity(0, before)
        time.sleep(SETTLE_S)
        return self

    def __exit__(self, *_error: object) -> None:
        before = _children_cpu_s()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        self.cpu_s = _children_cpu_s() - before
        time.sleep(SETTLE_S)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass(kw_only=True, slots=True)
class Segment:
    """One stretch of the run."""

    is_loaded: bool
    times: list[RequestTimes]
    seconds: float
    steal_s: float
    load_cpu_s: float
    server_threads: dict[str, float] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return what is worth keeping."""
        return {
            "state": "loaded" if self.is_loaded else "idle",
            "requests": len(self.times),
            "seconds": round(self.seconds, 2),
            "steal_s": round(self.steal_s, 3),
            "load_cpu_s": round(self.load_cpu_s, 1),
            "p50_tpot_ms": round(percentile([t.tpot_s * 1e3 for t in self.times], 50), 3),
            "p99_tpot_ms": round(percentile([t.tpot_s * 1e3 for t in self.times], 99), 3),
            "p50_ttft_ms": round(percentile([t.ttft_s * 1e3 for t in self.times], 50), 3),
            "p99_ttft_ms": round(percentile([t.ttft_s * 1e3 for t in self.times], 99), 3),
            "server_threads_percent": dict(list(self.server_threads.items())[:8]),
        }


def run_segment(
    server: ServerProcess, client: LoadClient, load: Load, cores: set[int], is_loaded: bool
) -> Segment:
    """Send one load, beside the host's load or not."""
    num_processes = PROCESSES_PER_CORE * len(cores) if is_loaded else 0
    with HostLoad(cores, num_processes) as host:
        threads, steal, started = server.threads(), host_facts.steal_s(), time.monotonic()
        times = client.run(load)
        seconds = time.monotonic() - started
        steal = host_facts.steal_s() - steal
        used = host_facts.used_by_threads(threads, server.threads(), seconds)
    return Segment(
        is_loaded=is_loaded,
        times=times,
        seconds=seconds,
        steal_s=steal,
        load_cpu_s=host.cpu_s,
        server_threads=used,
    )


def ratio_interval(
    idle: Sequence[float], loaded: Sequence[float], percent: float = 99.0, seed: int = 1
) -> dict[str, float]:
    """Return how a percentile grew, in percent, with a 95 % bootstrap interval over requests."""
    draw = np.random.default_rng(seed)

    def resampled(values: Sequence[float]) -> Any:
        picks = draw.integers(0, len(values), (NUM_RESAMPLES, len(values)))
        return np.percentile(np.asarray(values)[picks], percent, axis=1)

    grown = 100 * (resampled(loaded) / resampled(idle) - 1)
    point = 100 * (percentile(loaded, percent) / percentile(idle, percent) - 1)
    low, high = np.percentile(grown, [2.5, 97.5])
    return {
        "grown_percent": round(float(point), 2),
        "low_percent": round(float(low), 2),
        "high_percent": round(float(high), 2),
    }


def compare(segments: Sequence[Segment]) -> dict[str, Any]:
    """Return the tails of idle and loaded requests, all segments of a state together."""
    states = {
        state: [t for s in segments if s.is_loaded == state for t in s.times]
        for state in (False, True)
    }
    result: dict[str, Any] = {"segments": [segment.facts() for segment in segments]}
    for name in ("tpot", "ttft"):
        idle, loaded = (
            [getattr(t, f"{name}_s") * 1e3 for t in states[state]] for state in (False, True)
        )
        result[name] = {
            "idle_p99_ms": round(percentile(idle, 99), 3),
            "loaded_p99_ms": round(percentile(loaded, 99), 3),
            **ratio_interval(idle, loaded),
        }
    return result


def run(
    command: Sequence[str],
    load: Load,
    *,
    rounds: int,
    contrast_rounds: int,
    num_reserved: int = RESERVED_CORES,
) -> dict[str, Any]:
    """Serve with `command`, measure with and without reserved cores.

    Args:
        load: of one segment; `rounds` idle and as many loaded segments are run.
        contrast_rounds: the same without the reservation, of half the requests.
    """
    cores = os.sched_getaffinity(0)
    reserved = host_facts.reserve_cores(num_reserved, cores, host_facts.core_siblings())
    others = cores - reserved
    result: dict[str, Any] = {
        "reserved_cores": sorted(reserved),
        "load_processes": PROCESSES_PER_CORE * len(others),
        "rate_per_s": load.rate_per_s,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
    }
    os.sched_setaffinity(0, reserved)
    with ServerProcess(command, reserved) as server, LoadClient(server.url) as client:
        result["load"] = server.events.get("load", {})
        warm = Load(
            num_requests=16, prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens,
            concurrency=8, vocab_size=load.vocab_size, model=load.model,
        )  # fmt: skip
        client.run(warm)
        segments = [
            run_segment(server, client, load, others, is_loaded)
            for _ in range(rounds)
            for is_loaded in (False, True)
        ]
        result["reserved"] = compare(segments)
        _print("reserved", result["reserved"])
        if contrast_rounds:
            os.sched_setaffinity(0, cores)
            server.allow_cores(cores)
            half = replace(load, num_requests=load.num_requests // 2)
            segments = [
                run_segment(server, client, half, cores, is_loaded)
                for _ in range(contrast_rounds)
                for is_loaded in (False, True)
            ]
            result["not_reserved"] = compare(segments)
            _print("not reserved", result["not_reserved"])
        result["end"] = server.end()
    os.sched_setaffinity(0, cores)
    return result


def _print(name: str, result: dict[str, Any]) -> None:
    for metric in ("tpot", "ttft"):
        r = result[metric]
        print(
            f"host load, cores {name}: P99 {metric} idle {r['idle_p99_ms']} ms, loaded "
            f"{r['loaded_p99_ms']} ms: {r['grown_percent']:+.1f} % "
            f"[{r['low_percent']:+.1f}, {r['high_percent']:+.1f}] (bar {BAR_PERCENT:.0f} %)",
            flush=True,
        )
    steal = sum(segment["steal_s"] for segment in result["segments"])
    cpu = sum(segment["load_cpu_s"] for segment in result["segments"])
    print(f"  steal {steal:.2f} s, the load's own CPU time {cpu:.0f} s", flush=True)


def main() -> None:
    """Parse the command line, run, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="prepared folder, on a GPU")
    parser.add_argument("--bundle", type=Path, help="bundle, as blink-runtime serves it")
    parser.add_argument("--placement", default="chained")
    parser.add_argument("--requests", type=int, default=500, help="of one segment")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contrast-rounds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=46.0, help="requests a second")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--reserved-cores", type=int, default=RESERVED_CORES)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--model", default="model")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if (options.folder is None) == (options.bundle is None):
        parser.error("give --folder or --bundle")
    command = (
        gpu_server(options.folder, options.placement)
        if options.folder
        else bundle_server(options.bundle)
    )
    load = Load(
        num_requests=options.requests, prompt_tokens=options.prompt_tokens,
        output_tokens=options.tokens, rate_per_s=options.rate, vocab_size=options.vocab_size,
        model=options.model,
    )  # fmt: skip
    result = run(
        command,
        load,
        rounds=options.rounds,
        contrast_rounds=options.contrast_rounds,
        num_reserved=options.reserved_cores,
    )
    result["hardware"] = host_facts.hardware()
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    else:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
