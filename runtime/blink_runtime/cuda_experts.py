"""Experts of a mixture as kernel launches: route, products, combine; shorter for a single token."""

from __future__ import annotations

from ctypes import c_int32
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blink_runtime.cuda_graphs import Launch
from blink_runtime.cuda_kernels import ceil_div, pointer
from blinkc.engine.cuda_instances import (
    EXPERT_STREAM_BLOCKS_PER_MULTIPROCESSOR,
    EXPERT_STREAM_WARPS,
)

if TYPE_CHECKING:
    from blink_runtime.cuda_kernels import CudaKernels, StepAddresses

_STREAM_MAX_ASSIGNMENTS = 512  # above it, tensor-core tiles
_STREAM_TILE_ROWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsShape:
    """What a layer's experts are compiled for."""

    num_experts: int
    num_choices: int
    hidden_size: int
    intermediate_size: int


def experts_scratch(shape: ExpertsShape, num_tokens: int) -> dict[str, int]:
    """Return the scratch that `experts` wants, bytes by name."""
    assignments = num_tokens * shape.num_choices
    tiles = assignments + shape.num_experts
    return {
        "num_tiles": 16,
        "tile_expert": tiles * 4,
        "tile_start": tiles * 4,
        "tile_count": tiles * 4,
        "assignments": assignments * 4,
        "hidden": assignments * shape.intermediate_size * 2,
        "result": assignments * shape.hidden_size * 4,
    }


def expert_launches(
    kernels: CudaKernels,
    step: StepAddresses,
    shape: ExpertsShape,
    x: int,
    ids: int,
    weights: int,
    gate_up: int,
    down: int,
    out: int,
    scratch: dict[str, int],
    num_tokens: int,
) -> list[Launch]:
    """Return route, gate and up, down, combine; `scratch` holds addresses by name."""
    assignments = num_tokens * shape.num_choices
    if num_tokens == 1:
        return _single_experts(kernels, shape, x, ids, weights, gate_up, down, out, scratch)
    stream = assignments <= _STREAM_MAX_ASSIGNMENTS
    tile_rows = _STREAM_TILE_ROWS if stream else kernels.constant("experts_tiles_rows")
    max_tiles = min(shape.num_experts, assignments) + assignments // tile_rows
    tiles = tuple(
        pointer(scratch[name])
        for name in ("num_tiles", "tile_expert", "tile_start", "tile_count", "assignments")
    )
    sizes = (c_int32(shape.hidden_size), c_int32(shape.intermediate_size))
    counts = (c_int32(shape.num_choices), c_int32(shape.num_experts))
    route = Launch(
        kernels.function("route_tokens"),
        (1, 1, 1),
        1024,
        0,
        (
            pointer(ids),
            pointer(step.token_row),
            c_int32(num_tokens),
            *counts,
            c_int32(tile_rows),
            *tiles,
        ),
    )
    gate_up_args = (
        pointer(x),
        pointer(gate_up),
        pointer(scratch["hidden"]),
        *tiles,
        *sizes,
        counts[0],
    )
    down_args = (
        pointer(scratch["hidden"]),
        pointer(down),
        pointer(scratch["result"]),
        *tiles,
        *sizes,
    )
    if stream:
        blocks = EXPERT_STREAM_BLOCKS_PER_MULTIPROCESSOR * kernels.num_multiprocessors
        threads = EXPERT_STREAM_WARPS * 32
        products = [
            Launch(
                kernels.function(name), (blocks, 1, 1), threads, kernels.shared_bytes(name), args
            )
            for name, args in (
                ("experts_gate_up_stream", gate_up_args),
                ("experts_down_stream", down_args),
            )
        ]
    else:
        products = [
            Launch(
                kernels.function(name),
                (max_tiles, columns, 1),
                kernels.constant("experts_tiles_threads"),
                kernels.shared_bytes(name),
                args,
            )
            for name, columns, args in (
                ("experts_gate_up_tiles", ceil_div(shape.intermediate_size, 64), gate_up_args),
                ("experts_down_tiles", ceil_div(shape.hidden_size, 128), down_args),
            )
        ]
    combine = Launch(
        kernels.function("combine_rows"),
        (num_tokens, 1, 1),
        512,
        0,
        (
            pointer(scratch["result"]),
            pointer(ids),
            pointer(weights),
            pointer(step.token_row),
            pointer(out),
            *counts,
            sizes[0],
        ),
    )
    return [route, *products, combine]


def _single_experts(
    kernels: CudaKernels,
    shape: ExpertsShape,
    x: int,
    ids: int,
    weights: int,
    gate_up: int,
    down: int,
    out: int,
    scratch: dict[str, int],
) -> list[Launch]:
    """Return the experts of one token: two products over its experts in turn."""
    blocks = EXPERT_STREAM_BLOCKS_PER_MULTIPROCESSOR * kernels.num_multiprocessors
    sizes = (
        c_int32(shape.hidden_size),
        c_int32(shape.intermediate_size),
        c_int32(shape.num_choices),
        c_int32(shape.num_experts),
    )
    hidden = scratch["hidden"]
    parts = (
        ("experts_gate_up_single", (x, gate_up, hidden, ids, weights), shape.hidden_size),
        (
            "experts_down_single",
            (hidden, down, out, ids),
            shape.num_choices * shape.intermediate_size,
        ),
    )
    return [
        Launch(
            kernels.function(name),
            (blocks, 1, 1),
            EXPERT_STREAM_WARPS * 32,
            kernels.shared_bytes(name) + (num_k + 32) * 2,
            (*map(pointer, pointers), *sizes),
        )
        for name, pointers, num_k in parts
    ]
