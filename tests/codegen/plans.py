"""Small capture plans for the tests of generated code."""

from __future__ import annotations

from blinkc.capture.grid import GraphKey, build_grid
from blinkc.capture.plan import CapturePlan, MemoryPlan

NO_MEMORY = MemoryPlan(
    ring_bytes=0,
    kv_bytes=0,
    weight_bytes=0,
    arena_bytes=0,
    step_bytes=0,
    graph_bytes=0,
    budget_bytes=0,
)


def make_plan(target: str = "cpu") -> CapturePlan:
    """Return a plan of four lanes and eleven keys; 2 prompts with 9..16 tokens have none."""
    prefill = tuple(
        GraphKey("prefill", batch, seqlen)
        for batch, seqlen in ((1, 8), (1, 16), (1, 32), (2, 8), (2, 32))
    )
    decode = tuple(GraphKey("decode", batch, seqlen) for batch in (1, 2, 4) for seqlen in (32, 128))
    return CapturePlan(
        target=target,
        keys=prefill + decode,
        prefill=build_grid("prefill", prefill, 0),
        decode=build_grid("decode", decode, len(prefill)),
        max_batch=4,
        max_seqlen=128,
        max_prefill_tokens=32,
        max_prefill_batch=2,
        page_size_tokens=8,
        num_kv_pages=40,
        max_pages_per_lane=16,
        num_slots=16,
        num_front_ends=1,
        max_prompt_tokens=128,
        max_output_tokens=128,
        output_record_bytes=8,
        trace_capacity=64,
        sampler_features=3,
        vocab_size=512,
        kv_dtype="fp32",
        kv_layers=(),
        arena_offsets={},
        arena_bytes=0,
        memory=NO_MEMORY,
    )
