"""Renders the scheduler of a plan: `CapturePlan` + target -> C++ or CUDA source files by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blinkc import __version__
from blinkc.codegen.environment import render_template

if TYPE_CHECKING:
    from blinkc.capture.grid import GraphKey, KeyGrid
    from blinkc.capture.plan import CapturePlan

TEAM_THREADS = 256
# A graph may make 120 fire-and-forget launches; a self-relaunch comes with the last of them.
RELAUNCH_WINDOW = 120
OFF_CACHE_BIT = 0x8000  # kOffCacheBit in device/state.cuh


@dataclass(frozen=True, kw_only=True, slots=True)
class GridContext:
    """One kind's look-up table as the template writes it."""

    kind: str
    batch_buckets: tuple[int, ...]
    seqlen_buckets: tuple[int, ...]
    granule_tokens: int
    bucket_index: tuple[int, ...]
    rows: tuple[
        tuple[int, ...], ...
    ]  # [max batch + 1][num seqlen buckets] key index | off-cache bit


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerContext:
    """Everything that the scheduler's templates may name."""

    version: str
    target: str
    on_gpu: bool
    num_slots: int
    max_batch: int
    max_seqlen: int
    max_prefill_tokens: int
    page_size_tokens: int
    num_kv_pages: int
    team_threads: int
    relaunch_window: int
    keys: tuple[GraphKey, ...]
    grids: tuple[GridContext, ...]
    kind_constants: dict[str, str]


def render_scheduler(plan: CapturePlan, target: str) -> dict[str, str]:
    """Render the scheduler for `target`, "cpu" or "sm_*".

    Returns:
        Source text by file name; the first file is the one to compile, the others are its headers.
    """
    context = scheduler_context(plan, target)
    main = "scheduler.cu" if context.on_gpu else "scheduler.cpp"
    return {
        main: render_template("scheduler.cu.jinja", context),
        "config.cuh": render_template("config.cuh.jinja", context),
        "graph_table.cuh": render_template("graph_table.cuh.jinja", context),
    }


def scheduler_context(plan: CapturePlan, target: str) -> SchedulerContext:
    """Collect what the templates need from a plan."""
    return SchedulerContext(
        version=__version__,
        target=target,
        on_gpu=target != "cpu",
        num_slots=plan.num_slots,
        max_batch=plan.max_batch,
        max_seqlen=plan.max_seqlen,
        max_prefill_tokens=plan.max_prefill_tokens,
        page_size_tokens=plan.page_size_tokens,
        num_kv_pages=plan.num_kv_pages,
        team_threads=TEAM_THREADS,
        relaunch_window=RELAUNCH_WINDOW,
        keys=plan.keys,
        grids=(_grid_context(plan.prefill, plan.keys), _grid_context(plan.decode, plan.keys)),
        kind_constants={"prefill": "BLINK_GRAPH_PREFILL", "decode": "BLINK_GRAPH_DECODE"},
    )


def _grid_context(grid: KeyGrid, keys: tuple[GraphKey, ...]) -> GridContext:
    rows = tuple(
        tuple(
            key_index | (0 if _is_exact(grid, keys[key_index], batch, seqlen) else OFF_CACHE_BIT)
            for seqlen, key_index in zip(grid.seqlen_buckets, row, strict=True)
        )
        for batch, row in enumerate(grid.lut)
    )
    return GridContext(
        kind=grid.kind,
        batch_buckets=grid.batch_buckets,
        seqlen_buckets=grid.seqlen_buckets,
        granule_tokens=grid.granule_tokens,
        bucket_index=grid.seqlen_bucket_index,
        rows=rows,
    )


def _is_exact(grid: KeyGrid, key: GraphKey, batch: int, seqlen_bucket: int) -> bool:
    """Tell whether `key` is the step's own bucket, not a larger one that stands in for it."""
    batch_bucket = min(bucket for bucket in grid.batch_buckets if bucket >= batch)
    return (key.batch, key.seqlen) == (batch_bucket, seqlen_bucket)
