"""Measures what the scheduler adds to a step: placements x lanes over a model of one kernel, on a GPU.

PYTHONPATH=.:runtime python benchmarks/bench_scheduler.py [STEPS]
"""

from __future__ import annotations

import sys
import time

from blink_runtime.cuda_driver import Context
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


def main() -> None:
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20000
    with Context() as context:
        print(context.spec.name)
        for num_lanes in (1, 16, MAX_LANES):
            times = {
                placement: step_time_us(placement, num_lanes, num_steps)
                for placement in ("host", "chained", "persistent")
            }
            line = ", ".join(f"{name} {value:.1f} us" for name, value in times.items())
            print(f"{num_lanes} lanes: {line} a step", flush=True)


if __name__ == "__main__":
    main()
