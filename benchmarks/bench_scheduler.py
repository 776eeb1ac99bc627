"""Measures what the scheduler adds to a step: placements x lanes, over a model of one kernel.

PYTHONPATH=.:runtime python benchmarks/bench_scheduler.py [STEPS]
"""

from __future__ import annotations

import sys
import time

from blink_runtime.cuda_driver import Context
from blinkc.errors import BlinkError
from tests.gpu.fake_target import FakeTarget, gpu_plan

MAX_LANES = 64


def step_time_us(placement: str, num_lanes: int, num_steps: int) -> float:
    """Return the mean time of a decode step with `num_lanes` requests, in microseconds."""
    plan = gpu_plan(max_batch=MAX_LANES, max_seqlen=num_steps + 64, num_slots=MAX_LANES)
    with FakeTarget(plan, placement) as target:
        for slot in range(num_lanes):
            target.ring.submit(slot, [slot + 1], num_steps, seed=slot)
        target.start()
        header = target.ring.header
        while header.counters.output_tokens < num_lanes * (num_steps // 10):
            time.sleep(0.0005)
        first, started = header.step, time.perf_counter()
        while header.counters.output_tokens < num_lanes * (num_steps * 9 // 10):
            time.sleep(0.0005)
        return (time.perf_counter() - started) / (header.step - first) * 1e6


def replay_time_us(num_steps: int) -> float:
    """Return the time of a step without any scheduler, launched back to back by the host."""
    with FakeTarget(gpu_plan(), "host") as target:
        graph = target.execs[0]
        graph.launch(target.stream)
        target.stream.synchronize()
        started = time.perf_counter()
        for _ in range(num_steps):
            graph.launch(target.stream)
        target.stream.synchronize()
        elapsed = time.perf_counter() - started
        target.start()
        return elapsed / num_steps * 1e6


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20000
    with Context() as context:
        print(f"{context.spec.name}: bare replay {replay_time_us(num_steps // 10):.1f} us a step")
        for num_lanes in (1, 16, MAX_LANES):
            times = {
                placement: step_time_us(placement, num_lanes, num_steps)
                for placement in ("host", "chained", "persistent")
            }
            line = ", ".join(f"{name} {value:.1f} us" for name, value in times.items())
            print(f"{num_lanes} lanes: {line} a step", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BlinkError as error:  # such as: there is no GPU
        sys.exit(f"bench_scheduler.py: {error}")
