"""The capture stage: segmented model and `CaptureConfig` -> `CapturePlan`, or why it cannot fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blinkc import abi
from blinkc.capture.arena import ArenaPlan, ArenaRequest, plan_arena
from blinkc.capture.compute_capability import compute_capability
from blinkc.capture.grid import MAX_AUTO_KEYS, Limits, build_grid, plan_keys
from blinkc.capture.plan import (
    DTYPE_BYTES,
    TOKEN_RECORD_BYTES,
    CapturePlan,
    KvLayerSpec,
    MemoryPlan,
)
from blinkc.capture.shapes import ShapesSpec, parse_shapes
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blinkc.frontend.decoder_graph import ModelSpec, WeightRef
    from blinkc.surgery.segments import SegmentedModel

GIB = 1 << 30
# Memory of a common card of each architecture, for plans made before the card is seen.
GPU_MEMORY_BYTES = {
    75: 16 * GIB, 80: 80 * GIB, 86: 24 * GIB, 87: 32 * GIB, 89: 24 * GIB, 90: 80 * GIB,
    100: 180 * GIB, 103: 270 * GIB, 120: 32 * GIB, 121: 100 * GIB,
}  # fmt: skip
USABLE_PERCENT = 90  # of the card: the rest is the context, modules and fragmentation
GRAPH_NODE_BYTES = 4800  # measured: 0.24 MB for an exec of 52 nodes (H200, CUDA 13.0)
NODES_PER_SEGMENT_CALL = 4  # kernels, at least: norm, product, elementwise, product
NODES_PER_CUT_OP = 2
# Of a Llama and of a Mixtral: kernels and cut ops.
USUAL_NODES_PER_LAYER = 10
USUAL_NODES_PER_EXPERTS_LAYER = 11
USUAL_NODES_AT_ENDS = 6  # before the first layer, and after the last beyond those of a layer
GRAPHS_PERCENT = 10  # of the budget, at most, for the graphs of an auto grid
PAGE_SIZE_TOKENS = 16
TRACE_CAPACITY = 4096
MAX_NUM_SLOTS = 1 << 16
SAMPLING_PARAMS_BYTES = 64  # blink_sampling_params of step.h
TOKEN_COUNT_BYTES = 4  # of each row and token id on a GPU, for penalties


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureConfig:
    """What the user chose for the capture stage; None means: decide."""

    target: str = "cpu"
    shapes: str = "auto"
    max_batch: int | None = None
    max_seqlen: int | None = None
    max_prefill_tokens: int | None = None
    num_slots: int | None = None
    num_kv_pages: int | None = None
    num_front_ends: int = 1
    memory_budget_bytes: int | None = None
    logprobs: bool | None = None  # room for them in the ring; None: on the CPU

    def __post_init__(self) -> None:
        limits = {
            "max_batch": 4096,
            "max_seqlen": abi.constants()["BLINK_MAX_NUM_GENERATED"],
            "max_prefill_tokens": 1 << 20,
            "num_slots": MAX_NUM_SLOTS,
            "num_kv_pages": 1 << 24,
            "num_front_ends": abi.constants()["BLINK_MAX_FRONT_ENDS"],
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                option = f"--{name.replace('_', '-')}"
                raise BlinkError(f"{option} is {value}; it goes from 1 to {limit}")

    @property
    def on_gpu(self) -> bool:
        """Return whether the target is a GPU."""
        return self.target != "cpu"

    @property
    def has_logprobs(self) -> bool:
        """Return whether output records have room for logprobs."""
        return not self.on_gpu if self.logprobs is None else self.logprobs

    @property
    def output_record_bytes(self) -> int:
        """Return the bytes of an output token in the ring."""
        return abi.size_of("blink_output_record") if self.has_logprobs else TOKEN_RECORD_BYTES

    @property
    def _changes_logits(self) -> bool:
        """GPUs do it in the shared memory of a cluster of blocks, which began with Hopper."""
        return not self.on_gpu or min(map(compute_capability, self.target.split(","))) >= 90

    @property
    def sampler_features(self) -> int:
        """Return the BLINK_SAMPLER_* bits of the target's sampler."""
        names = ["TOP_K", "TOP_P", "MIN_P"]
        if self._changes_logits:
            names += ["PENALTIES", "LOGIT_BIAS", "MIN_TOKENS"]
        if self.has_logprobs:
            names.append("LOGPROBS")
        return sum(abi.constants()[f"BLINK_SAMPLER_{name}"] for name in names)


@dataclass(frozen=True, slots=True)
class ScratchSpec:
    """A value `[rows, size]` that lives inside one call: an engine's intermediate."""

    name: str
    rows: str  # "tokens" or "samples"
    size: int
    dtype: str


def plan_capture(
    segmented: SegmentedModel,
    config: CaptureConfig,
    *,
    scratch: Mapping[int, Sequence[ScratchSpec]] | None = None,
    nodes_per_step: int | None = None,
) -> CapturePlan:
    """Plan keys, tables, arena and memory of a segmented model.

    Args:
        scratch: values that live inside one call, by its index; placed in the arena as
            `call<i>.<name>`.
        nodes_per_step: graph nodes of one step, when the engines know it.

    Raises:
        ShapesError: `config.shapes` cannot be read or exceeds the limits.
        BlinkError: the sums do not fit the memory budget, or a limit is out of range.
    """
    spec = segmented.spec
    shapes = parse_shapes(config.shapes)
    limits = resolve_limits(spec, shapes, config)
    nodes = nodes_per_step or _estimate_nodes(segmented)
    arena = _plan_values(segmented, limits, scratch or {})
    return _assemble(spec, shapes, limits, config, arena, weight_bytes(segmented.weights), nodes)


def plan_from_spec(
    spec: ModelSpec, config: CaptureConfig, *, num_weight_bytes: int, intermediate_size: int = 0
) -> CapturePlan:
    """Plan from facts alone, before any work; the arena's offsets are empty.

    Graphs and arena follow from the segments, which are not there yet. With `intermediate_size`, of
    the layers' MLP, they are estimated as for a Llama or a Mixtral of these sizes; without it they
    are less than such a model takes, so that what is refused by these sums cannot fit.
    """
    shapes = parse_shapes(config.shapes)
    limits = resolve_limits(spec, shapes, config)
    if intermediate_size:
        num_bytes = _usual_arena_bytes(spec, limits, intermediate_size)
        per_layer = USUAL_NODES_PER_EXPERTS_LAYER if spec.experts else USUAL_NODES_PER_LAYER
        nodes = per_layer * len(spec.attention) + USUAL_NODES_AT_ENDS
    else:
        tokens = max(limits.max_prefill_tokens, limits.max_batch)
        heads = max((a.num_q_heads * a.head_dim for a in spec.attention), default=spec.hidden_size)
        row = 3 * spec.hidden_size + 3 * heads
        num_bytes = DTYPE_BYTES[spec.dtype] * (tokens * row + limits.max_batch * spec.vocab_size)
        nodes = (len(spec.attention) + 1) * (NODES_PER_SEGMENT_CALL + NODES_PER_CUT_OP)
    arena = ArenaPlan(offsets={}, total_bytes=num_bytes)
    return _assemble(spec, shapes, limits, config, arena, num_weight_bytes, nodes)


def _usual_arena_bytes(spec: ModelSpec, limits: Limits, intermediate_size: int) -> int:
    """Return what a layer's longest segment, or the last one with the logits, keeps at a time."""
    hidden = spec.hidden_size
    heads, kv_heads, head_dim = max(
        (a.num_q_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.head_dim)
        for a in spec.attention
    )
    # Within a call: values of the residual's size, queries with keys and values, and of the MLP,
    # where it is not experts: gate, up and their product. Around it: the residual before and after,
    # attention's result, what the next one reads, and the angles.
    mlp = 0 if spec.experts else 3 * hidden + 3 * intermediate_size
    around = 2 * hidden + 2 * heads + 2 * kv_heads + 2 * head_dim
    tokens = max(limits.max_prefill_tokens, limits.max_batch)
    layer = tokens * (2 * hidden + heads + 2 * kv_heads + mlp + around)
    samples = limits.max_batch * (3 * hidden + mlp + spec.vocab_size)
    return DTYPE_BYTES[spec.dtype] * max(layer, samples + tokens * (hidden + heads))


def weight_bytes(weights: Mapping[str, WeightRef]) -> int:
    """Sum the weights as they lie in the bundle."""
    return sum(math.prod(w.shape) * DTYPE_BYTES[w.dtype] for w in weights.values())


def resolve_limits(spec: ModelSpec, shapes: ShapesSpec, config: CaptureConfig) -> Limits:
    """Fill in the limits that were not given: the spec's largest sizes, else the target's habit."""
    default_batch, default_seqlen, default_prefill = (
        (64, 8192, 2048) if config.on_gpu else (8, 2048, 256)
    )
    longest = spec.max_position_embeddings or default_seqlen
    max_seqlen = (
        config.max_seqlen or shapes.largest("decode", "seqlen") or min(default_seqlen, longest)
    )
    if max_seqlen > longest:
        raise BlinkError(
            f"--max-seqlen {max_seqlen} is over the model's {longest} positions",
            hint=f"use --max-seqlen {longest} or less",
        )
    if max_seqlen < 2:
        raise BlinkError(f"--max-seqlen is {max_seqlen}; a prompt and its answer need at least 2")
    max_batch = config.max_batch or shapes.largest("decode", "batch") or default_batch
    max_prefill = (
        config.max_prefill_tokens
        or shapes.largest("prefill", "seqlen")
        or min(default_prefill, max(max_seqlen, max_batch))
    )
    prefill_batch = shapes.largest("prefill", "batch") or min(16, max_batch, max_prefill)
    # A written batch over the limit is reported at its place in the text, by plan_keys.
    prefill_batch = min(prefill_batch, max_batch, max_prefill)
    return Limits(
        max_batch=max_batch,
        max_seqlen=max_seqlen,
        max_prefill_tokens=max_prefill,
        max_prefill_batch=prefill_batch,
    )


def budget_bytes(config: CaptureConfig) -> int:
    """Return the memory the target may use; 0 when nobody said and the target is the CPU."""
    if config.memory_budget_bytes is not None:
        return config.memory_budget_bytes
    if not config.on_gpu:
        return 0
    capabilities = map(compute_capability, config.target.split(","))
    sizes = [GPU_MEMORY_BYTES.get(capability, 80 * GIB) for capability in capabilities]
    return min(sizes) * USABLE_PERCENT // 100


def _assemble(
    spec: ModelSpec,
    shapes: ShapesSpec,
    limits: Limits,
    config: CaptureConfig,
    arena: ArenaPlan,
    num_weight_bytes: int,
    nodes_per_step: int,
) -> CapturePlan:
    budget = budget_bytes(config)
    graph_bytes = nodes_per_step * GRAPH_NODE_BYTES if config.on_gpu else 0
    max_auto_keys = MAX_AUTO_KEYS
    if graph_bytes and budget:
        max_auto_keys = min(max_auto_keys, max(budget * GRAPHS_PERCENT // 100 // graph_bytes, 16))
    keys = plan_keys(shapes, limits, on_gpu=config.on_gpu, max_auto_keys=max_auto_keys)
    num_slots = config.num_slots or (1024 if config.on_gpu else 64)
    if num_slots < config.num_front_ends:
        raise BlinkError(
            f"--num-slots {num_slots} leaves a front end without a slot: there are "
            f"{config.num_front_ends}"
        )
    ring = abi.ring_layout(
        num_slots=num_slots,
        num_front_ends=config.num_front_ends,
        max_prompt_tokens=limits.max_seqlen,
        max_output_tokens=limits.max_seqlen,
        output_record_bytes=config.output_record_bytes,
        trace_capacity=TRACE_CAPACITY,
    )
    kv_layers = tuple(
        KvLayerSpec(layer=a.layer, num_kv_heads=a.num_kv_heads, head_dim=a.head_dim)
        for a in spec.attention
    )
    pages_per_lane = -(-limits.max_seqlen // PAGE_SIZE_TOKENS)
    memory = MemoryPlan(
        ring_bytes=ring.ring_bytes,
        kv_bytes=0,
        weight_bytes=num_weight_bytes,
        arena_bytes=arena.total_bytes,
        step_bytes=_step_bytes(limits, pages_per_lane)
        + (limits.max_batch * spec.vocab_size * TOKEN_COUNT_BYTES if config.on_gpu else 0),
        graph_bytes=graph_bytes * sum(len(of_kind) for of_kind in keys.values()),
        budget_bytes=budget,
    )
    page_bytes = _page_bytes(kv_layers, spec.dtype)
    num_kv_pages = _num_kv_pages(config, limits, pages_per_lane, page_bytes, memory)
    memory = replace(memory, kv_bytes=(num_kv_pages + 1) * page_bytes)
    check_budget(memory, config.target, sum(len(of_kind) for of_kind in keys.values()))
    prefill, decode = keys["prefill"], keys["decode"]
    return CapturePlan(
        target=config.target,
        keys=prefill + decode,
        prefill=build_grid("prefill", prefill, 0),
        decode=build_grid("decode", decode, len(prefill)),
        max_batch=limits.max_batch,
        max_seqlen=limits.max_seqlen,
        max_prefill_tokens=limits.max_prefill_tokens,
        max_prefill_batch=limits.max_prefill_batch,
        page_size_tokens=PAGE_SIZE_TOKENS,
        num_kv_pages=num_kv_pages,
        max_pages_per_lane=pages_per_lane,
        num_slots=num_slots,
        num_front_ends=config.num_front_ends,
        max_prompt_tokens=limits.max_seqlen,
        max_output_tokens=limits.max_seqlen,
        output_record_bytes=config.output_record_bytes,
        trace_capacity=TRACE_CAPACITY,
        sampler_features=config.sampler_features,
        vocab_size=spec.vocab_size,
        kv_dtype=spec.dtype,
        kv_layers=kv_layers,
        arena_offsets=dict(arena.offsets),
        arena_bytes=arena.total_bytes,
        memory=memory,
    )


def _plan_values(
    segmented: SegmentedModel, limits: Limits, scratch: Mapping[int, Sequence[ScratchSpec]]
) -> ArenaPlan:
    """Place every value a call writes, from that call to its last reader, and calls' scratch."""
    rows = {"tokens": max(limits.max_prefill_tokens, limits.max_batch), "samples": limits.max_batch}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, call in enumerate(segmented.calls):
        for name in call.outputs:
            first[name] = last[name] = number
        for name in call.activations:
            last[name] = number
    requests = []
    for name, start in first.items():
        value = segmented.values[name]
        size = rows[value.rows] * math.prod(value.shape) * DTYPE_BYTES[value.dtype]
        requests.append(ArenaRequest(name=name, num_bytes=size, first=start, last=last[name]))
    for number, specs in sorted(scratch.items()):
        for spec in specs:
            size = rows[spec.rows] * spec.size * DTYPE_BYTES[spec.dtype]
            name = f"call{number}.{spec.name}"
            requests.append(ArenaRequest(name=name, num_bytes=size, first=number, last=number))
    return plan_arena(requests)


def _estimate_nodes(segmented: SegmentedModel) -> int:
    num_cut_ops = sum(1 for call in segmented.calls if hasattr(call, "op"))
    num_segment_calls = len(segmented.calls) - num_cut_ops
    return num_segment_calls * NODES_PER_SEGMENT_CALL + num_cut_ops * NODES_PER_CUT_OP


def _step_bytes(limits: Limits, pages_per_lane: int) -> int:
    tokens = max(limits.max_prefill_tokens, limits.max_batch)
    per_row = 5 * 4 + SAMPLING_PARAMS_BYTES + abi.logprobs_bytes()
    return 3 * 4 * tokens + per_row * limits.max_batch + 4 * pages_per_lane * (limits.max_batch + 1)


def _page_bytes(kv_layers: Sequence[KvLayerSpec], dtype: str) -> int:
    heads = sum(layer.num_kv_heads * layer.head_dim for layer in kv_layers)
    return 2 * heads * PAGE_SIZE_TOKENS * DTYPE_BYTES[dtype]


def _num_kv_pages(
    config: CaptureConfig,
    limits: Limits,
    pages_per_lane: int,
    page_bytes: int,
    memory: MemoryPlan,
) -> int:
    """Return the usable pages: as asked, or what all lanes can fill, or what the budget leaves."""
    if config.num_kv_pages is not None:
        if config.num_kv_pages < pages_per_lane:
            raise BlinkError(
                f"--num-kv-pages {config.num_kv_pages} cannot hold one request of "
                f"{limits.max_seqlen} tokens, which takes {pages_per_lane} pages",
                hint=f"use at least {pages_per_lane}, or a smaller --max-seqlen",
            )
        return config.num_kv_pages
    full = limits.max_batch * pages_per_lane
    if not memory.budget_bytes or not page_bytes:
        return full
    left = (memory.budget_bytes - memory.fixed_bytes) // page_bytes - 1  # the sink page
    return max(min(full, left), pages_per_lane)  # too few: the budget check says so


def replace_budget(memory: MemoryPlan, budget: int) -> MemoryPlan:
    """Return the same sums against another budget."""
    return replace(memory, budget_bytes=budget)


def check_budget(memory: MemoryPlan, target: str, num_keys: int) -> None:
    """Raise `BlinkError` with the sums when they are over the budget."""
    if not memory.budget_bytes or memory.total_bytes <= memory.budget_bytes:
        return
    ring_options = "--num-slots or --max-seqlen"
    if target == "cpu":
        ring_options += ", or use --no-logprobs"
    rows = (
        ("weights", memory.weight_bytes, ""),
        ("kv pages", memory.kv_bytes, "--num-kv-pages, --max-seqlen or --max-batch"),
        ("graphs", memory.graph_bytes, f"--shapes with fewer than {num_keys} keys"),
        ("scratch", memory.arena_bytes + memory.step_bytes, "--max-prefill-tokens or --max-batch"),
        ("ring", memory.ring_bytes, ring_options),
    )
    sums = "\n".join(f"  {name:<9} {size / GIB:9.3f} GiB" for name, size, _ in rows)
    _, _, option = max(rows, key=lambda row: row[1])
    if memory.weight_bytes > memory.budget_bytes:
        what = "the model is too large"
        hint = "use a smaller --dtype, or give a larger card's --memory-budget"
        if target == "cpu":
            hint = "if it will run on a larger machine, give that one's --memory-budget"
    else:
        what = "this plan does not fit"
        hint = f"lower {option}" if option else "lower the limits"
        hint += ", or give --memory-budget if the device has more"
    raise BlinkError(
        f"{what}: {memory.total_bytes / GIB:.3f} GiB wanted, {memory.budget_bytes / GIB:.3f} GiB "
        f"to use on {target}\n{sums}",
        hint=hint,
    )
