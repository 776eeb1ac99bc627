"""What the capture stage decides: graph keys, look-up tables, memory layout and sums."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from blinkc.capture.grid import GraphKey, KeyGrid, build_grid

TOKEN_RECORD_BYTES = 8  # an output record without logprobs
DTYPE_BYTES = {
    "fp32": 4, "fp16": 2, "bf16": 2, "int32": 4, "int64": 8, "bool": 1, "fp8": 1, "uint8": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayerSpec:
    """A layer's KV cache: `[num_kv_pages + 1, 2, num_kv_heads, page_size_tokens, head_dim]`."""

    layer: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, for the largest key; `budget_bytes` is what they must fit in together."""

    ring_bytes: int
    kv_bytes: int
    weight_bytes: int
    arena_bytes: int  # values between segments, scratch of cut ops and kernels
    step_bytes: int  # step buffers: ids, positions, page tables, sampling parameters
    graph_bytes: int  # instantiated graphs, estimated
    budget_bytes: int

    @property
    def total_bytes(self) -> int:
        """Return the sum of all purposes."""
        return self.fixed_bytes + self.kv_bytes

    @property
    def fixed_bytes(self) -> int:
        """Return the sum of everything but the KV cache."""
        return (
            self.ring_bytes
            + self.weight_bytes
            + self.arena_bytes
            + self.step_bytes
            + self.graph_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturePlan:
    """Graph keys, look-up tables, limits, memory layout and sums of one compiled model.

    `keys` holds the prefill keys, then the decode keys; the index in it is `key_index` everywhere.
    All graphs share one arena, sized for the largest key, and one set of step buffers.
    """

    target: str
    keys: tuple[GraphKey, ...]
    prefill: KeyGrid
    decode: KeyGrid
    max_batch: int
    max_seqlen: int
    max_prefill_tokens: int
    max_prefill_batch: int
    page_size_tokens: int
    num_kv_pages: int  # usable ones; page 0, the sink, comes on top
    max_pages_per_lane: int
    num_slots: int
    num_front_ends: int
    max_prompt_tokens: int  # prompt area of a slot
    max_output_tokens: int  # output area of a slot, in records
    output_record_bytes: int
    trace_capacity: int
    sampler_features: int  # BLINK_SAMPLER_*
    vocab_size: int
    kv_dtype: str
    kv_layers: tuple[KvLayerSpec, ...]
    arena_offsets: dict[str, int]  # bytes, by the name of the value in SegmentedModel.values
    arena_bytes: int
    memory: MemoryPlan

    @property
    def max_step_tokens(self) -> int:
        """Return the most tokens of any step."""
        return max(self.max_prefill_tokens, self.max_batch)

    @property
    def has_logprobs(self) -> bool:
        """Return whether output records have room for logprobs."""
        return self.output_record_bytes > TOKEN_RECORD_BYTES

    @property
    def num_physical_pages(self) -> int:
        """Return the pages to allocate in each layer, the sink included."""
        return self.num_kv_pages + 1

    def grid(self, kind: str) -> KeyGrid:
        """Return the look-up table of "prefill" or "decode"."""
        return self.prefill if kind == "prefill" else self.decode

    def look_up(self, kind: str, batch: int, seqlen: int) -> GraphKey:
        """Return the smallest key that fits a step, or the largest key when none does."""
        return self.keys[self.grid(kind).look_up(batch, seqlen)]


def plan_to_json(plan: CapturePlan) -> dict[str, Any]:
    """Return the plan as plain data; the look-up tables are left out, they follow from the keys."""
    data = asdict(plan)
    data["keys"] = [list(key) for key in plan.keys]
    data["kv_layers"] = [asdict(layer) for layer in plan.kv_layers]
    del data["prefill"], data["decode"]
    return data


def plan_from_json(data: dict[str, Any]) -> CapturePlan:
    """Rebuild a plan from `plan_to_json`'s data."""
    keys = tuple(GraphKey(*key) for key in data["keys"])
    prefill = tuple(key for key in keys if key.kind == "prefill")
    decode = tuple(key for key in keys if key.kind == "decode")
    values: dict[str, Any] = dict(data)
    values |= {
        "keys": keys,
        "prefill": build_grid("prefill", prefill, 0),
        "decode": build_grid("decode", decode, len(prefill)),
        "kv_layers": tuple(KvLayerSpec(**layer) for layer in data["kv_layers"]),
        "memory": MemoryPlan(**data["memory"]),
    }
    return CapturePlan(**values)
