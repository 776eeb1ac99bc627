"""A million decode steps over HTTP: what does each host thread of the server cost meanwhile?

`PYTHONPATH=.:runtime python benchmarks/bench_idle_host.py BUNDLE [STEPS] [SCHEDULER...] -o RESULT`.
The bundle is a small model with one lane, so that a step is short and steps are many; requests wait
in the ring, whole answers are asked for. CPU time comes from /proc, in ticks of 10 ms. Threads of
the front end serve clients; all others should sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.serving import GpuServer

FRONT_END = ("blink-network", "blink-reader", "blink-detok", "blink-steps", "blink-log")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def num_steps(server: GpuServer) -> int:
    """Return the decode steps so far."""
    for line in server.get("/metrics")[1].splitlines():
        if line.startswith("blink_decode_steps_total"):
            return int(float(line.split()[-1]))
    raise SystemExit("the server has no metric blink_decode_steps_total")


def measure(bundle: Path, scheduler: str, steps: int, tokens: int) -> dict[str, Any]:
    """Serve `steps` decode steps, `tokens` a request; return each thread's CPU time by its name."""
    requests = -(-steps // tokens)
    with GpuServer(bundle, "--drain", "0", "--scheduler", scheduler) as server:
        server.complete("warm", 16, ignore_eos=True)
        before, first_step, started = server.thread_ticks(), num_steps(server), time.monotonic()
        with ThreadPoolExecutor(requests) as pool:
            answers = list(
                pool.map(
                    lambda number: server.complete(f"Request {number}:", tokens, ignore_eos=True),
                    range(requests),
                )
            )
        seconds = time.monotonic() - started
        after, last_step = server.thread_ticks(), num_steps(server)
        for answer in answers:
            assert answer["usage"]["completion_tokens"] == tokens, answer
        status, stop_s = server.stop()
    ticks: dict[str, int] = defaultdict(int)
    for thread, (name, count) in after.items():
        ticks[name] += count - before.get(thread, (name, 0))[1]
    others = sum(count for name, count in ticks.items() if name not in FRONT_END)
    result = {
        "scheduler": scheduler,
        "decode_steps": last_step - first_step,
        "seconds": round(seconds, 2),
        "us_per_step": round(seconds * 1e6 / (last_step - first_step), 2),
        "cpu_seconds_by_thread": {n: c / TICKS_PER_S for n, c in sorted(ticks.items())},
        "num_threads": len(after),
        "percent_of_a_core_of_all_but_the_front_end": round(
            100 * others / TICKS_PER_S / seconds, 3
        ),
        "stop": {"status": status, "seconds": round(stop_s, 2)},
    }
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    """Measure each scheduler in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("steps", type=int, nargs="?", default=1_000_000)
    parser.add_argument("schedulers", nargs="*", default=["chained", "persistent"])
    parser.add_argument("--tokens", type=int, default=4000, help="of one request")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    results = [
        measure(arguments.bundle, name, arguments.steps, arguments.tokens)
        for name in arguments.schedulers
    ]
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
