"""`--scheduler auto`: a bundle's files -> the placement that decodes fastest on this GPU.

Each placement serves a few short requests over graphs of two keys, weights being zero: who launches
costs the same whatever the numbers are. What came out is remembered beside the algorithms.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from blink_runtime.cuda_driver import MappedBuffer
from blink_runtime.cuda_target import PLACEMENTS, CudaTarget
from blink_runtime.ring_memory import RingMemory
from blinkc.capture.grid import GraphKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from blink_runtime.cuda_driver import Context
    from blink_runtime.cuda_target import CudaFiles
    from blinkc.capture.plan import CapturePlan

PROMPT_TOKENS = 8
OUTPUT_TOKENS = 40
NUM_REQUESTS = 9
_TIMEOUT_S = 30.0
# `chained` keeps no multiprocessor from the model and has soaked longest: another placement must
# be faster by more than measurements differ.
_ADVANTAGE = 0.98


def choose_scheduler(
    files: CudaFiles, plan: CapturePlan, context: Context, say: Callable[[str], None]
) -> str:
    """Measure every placement; return the best one's name."""
    times = {name: measure_placement(name, files, plan, context) for name in PLACEMENTS}
    fastest = min(times, key=lambda name: times[name])
    chosen = fastest if times[fastest] < _ADVANTAGE * times["chained"] else "chained"
    figures = ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in times.items())
    say(f"scheduler auto: {chosen}; a decode step of one lane takes {figures}")
    return chosen


def measured_keys(plan: CapturePlan) -> tuple[GraphKey, GraphKey]:
    """Return the smallest prefill and decode keys, which serve one short request."""
    prefill = min((key for key in plan.keys if key.kind == "prefill"), key=_size)
    decode = min((key for key in plan.keys if key.kind == "decode"), key=_size)
    return prefill, decode


def _size(key: GraphKey) -> tuple[int, int]:
    return key.batch, key.seqlen


def measure_placement(name: str, files: CudaFiles, plan: CapturePlan, context: Context) -> float:
    """Return the median seconds of a decode step, requests coming one after another."""
    keys = measured_keys(plan)
    length = min(PROMPT_TOKENS + OUTPUT_TOKENS, keys[1].seqlen, plan.max_output_tokens)
    ring = RingMemory(plan, lambda size: MappedBuffer(size, "the ring"))
    target = CudaTarget(
        files=files,
        plan=plan,
        ring_address=ring.memory.address,
        ring_bytes=ring.memory.num_bytes,
        fill_weights=_fill_zeros,
        placement=name,
        context=context,
        only_keys=keys,
    )
    try:
        with target:
            target.start()
            try:
                prompt = [1] * min(PROMPT_TOKENS, keys[0].seqlen, plan.max_prompt_tokens)
                runs = [
                    ring.run([prompt], length - len(prompt), _TIMEOUT_S)
                    for _ in range(NUM_REQUESTS)
                ]
            finally:
                ring.stop()
    finally:
        ring.memory.close()
    return float(statistics.median(run["tpot_ms"] for run in runs)) / 1e3


def _fill_zeros(target: CudaTarget) -> None:
    target.clear_weights()
