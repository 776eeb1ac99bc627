"""Serve a ring whose GPU dies: `python -m tests.gpu.dead_gpu PLACEMENT hang|fault`.

The watchdog must end this process; an exit of its own is a failure of the test.
"""

from __future__ import annotations

import sys
import time

from blink_runtime import _native
from blink_runtime.cuda_driver import Context
from tests.gpu.fake_target import FAULT_SEED, HANG_SEED, FakeTarget, gpu_plan


def main() -> None:
    """Serve one good request, then the deadly one, and wait for the end."""
    placement, death = sys.argv[1:]
    Context()
    target = FakeTarget(gpu_plan(), placement)
    plan, memory = target.plan, target.ring.memory
    sizes = _native.RingSizes(
        num_slots=plan.num_slots,
        num_front_ends=plan.num_front_ends,
        max_prompt_tokens=plan.max_prompt_tokens,
        max_output_tokens=plan.max_output_tokens,
        output_record_bytes=plan.output_record_bytes,
        max_seqlen=plan.max_seqlen,
        max_batch=plan.max_batch,
        vocab_size=plan.vocab_size,
        page_size_tokens=plan.page_size_tokens,
        num_kv_pages=plan.num_kv_pages,
        trace_capacity=plan.trace_capacity,
        sampler_features=plan.sampler_features,
    )
    ring = _native.Ring.create_at(memory.host_address, memory.num_bytes, sizes)
    target.start()
    target.ring.submit(0, [5], 10, seed=3)
    target.ring.wait([0], 10.0)
    watchdog = _native.Watchdog(ring, 2.0, 0.5)
    time.sleep(3.0)  # idle: the heartbeat goes on, so nothing may happen
    print("alive while idle", flush=True)
    target.ring.submit(1, [5], 10, seed=HANG_SEED if death == "hang" else FAULT_SEED)
    time.sleep(20.0)
    print("nobody ended this process", watchdog, flush=True)


if __name__ == "__main__":
    main()
