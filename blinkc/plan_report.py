"""What `blinkc plan` says before any work: config -> graph keys, memory sums, engines, time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from blinkc.capture.grid import KeyGrid
from blinkc.capture.host_memory import check_host_memory
from blinkc.capture.plan import CapturePlan
from blinkc.capture.plan_capture import (
    GRAPH_NODE_BYTES,
    NODES_PER_CUT_OP,
    NODES_PER_SEGMENT_CALL,
    plan_from_spec,
)
from blinkc.config import CompileConfig

if TYPE_CHECKING:
    from blinkc.frontend.decoder_graph import ModelSpec

MIB = 1 << 20
_MAX_COLUMNS = 72
_MAX_ROWS = 16
# Rough costs for the estimate, in seconds: one machine's figures, good to a factor of two.
_EXPORT_S_PER_LAYER = 0.5
_EXPORT_S = 6.0  # importing torch and transformers, tracing's fixed part
_COMPILE_S = {"cpu": 30.0, "gpu": 40.0}
_WEIGHT_BYTES_PER_S = 400e6  # read, convert, hash, write
_NODE_CAPTURE_US = 20.0  # capture and instantiate: 0.5 ms for 52 nodes, and its kernels' launches


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """Facts, plan and estimates for one model and config."""

    spec: ModelSpec
    plan: CapturePlan
    engine: str
    num_segment_calls: int
    num_distinct_segments: int
    has_lower_bounds: bool  # graphs and scratch are no estimates, but less than they will be
    compile_s: float  # estimates
    bundle_s: float
    load_s: float


def plan_model(config: CompileConfig) -> PlanReport:
    """Read a model's facts (no weight is read, nothing is exported) and plan it.

    Raises:
        BlinkError: the model is unknown, or the plan does not fit; the sums stand in the message.
    """
    from blinkc.model_facts import facts_from_model

    facts = facts_from_model(config)
    spec = facts.spec
    plan = plan_from_spec(
        spec,
        config.capture,
        num_weight_bytes=facts.num_weight_bytes,
        intermediate_size=facts.intermediate_size,
    )
    check_host_memory(plan)
    num_layers = len(spec.attention)
    cuts_per_layer = 2 if spec.experts else 1
    num_calls = num_layers * cuts_per_layer + 1
    nodes = num_calls * (NODES_PER_SEGMENT_CALL + NODES_PER_CUT_OP)
    capture_s = len(plan.keys) * nodes * _NODE_CAPTURE_US * 1e-6 if config.on_gpu else 0.0
    return PlanReport(
        spec=spec,
        plan=plan,
        engine=config.resolved_engine,
        num_segment_calls=num_calls,
        num_distinct_segments=min(num_calls, 4 if spec.experts else 3),
        has_lower_bounds=not facts.intermediate_size,
        compile_s=_EXPORT_S
        + _EXPORT_S_PER_LAYER * num_layers
        + _COMPILE_S["gpu" if config.on_gpu else "cpu"],
        bundle_s=facts.num_weight_bytes / _WEIGHT_BYTES_PER_S,
        load_s=capture_s + facts.num_weight_bytes / (4 * _WEIGHT_BYTES_PER_S),
    )


def report_to_json(report: PlanReport) -> dict[str, Any]:
    """Return the report as plain data."""
    plan = report.plan
    return {
        "model": report.spec.name,
        "architecture": report.spec.architecture,
        "dtype": report.spec.dtype,
        "target": plan.target,
        "engine": report.engine,
        "segment_calls": report.num_segment_calls,
        "distinct_segments": report.num_distinct_segments,
        "keys": [list(key) for key in plan.keys],
        "limits": {
            name: getattr(plan, name)
            for name in (
                "max_batch", "max_seqlen", "max_prefill_tokens", "max_prefill_batch", "num_slots",
                "num_kv_pages", "page_size_tokens", "max_pages_per_lane", "output_record_bytes",
            )
        },
        "memory": {**asdict(plan.memory), "total_bytes": plan.memory.total_bytes},
        "lower_bounds" if report.has_lower_bounds else "estimates": ["graph_bytes", "arena_bytes"],
        "estimated_seconds": {
            "compile": report.compile_s,
            "bundle": report.bundle_s,
            "load": report.load_s,
        },
    }  # fmt: skip


def print_plan(report: PlanReport) -> None:
    """Print the report as tables and pictures of the key grids."""
    spec, plan = report.spec, report.plan
    click.echo(f"{spec.name}: {spec.architecture}, {len(spec.attention)} layers, {spec.dtype}")
    click.echo(
        f"target {plan.target}, engine {report.engine}: about {report.num_distinct_segments} "
        f"engines for {report.num_segment_calls} segment calls a step"
    )
    for note in spec.notes:
        click.echo(f"note: {note}")
    for kind in ("prefill", "decode"):
        _print_grid(plan.grid(kind), plan)
    click.echo("\nlimits")
    _print_rows(_limit_rows(plan))
    click.echo("\nmemory")
    _print_rows(_memory_rows(plan))
    click.echo(
        "  Graphs and scratch follow from segments that only compile makes: these figures are "
        + ("a lower bound." if report.has_lower_bounds else "estimated as for a Llama's.")
    )
    click.echo("\ntime, estimated")
    _print_rows(
        [
            (
                "compile",
                f"{report.compile_s:7.0f} s",
                "once; a killed run goes on where it stopped",
            ),
            ("bundle", f"{report.bundle_s:7.0f} s", "with --weights embed"),
            ("load", f"{report.load_s:7.0f} s", "at each start: weights, capture of every graph"),
        ]
    )


def _limit_rows(plan: CapturePlan) -> list[tuple[str, str, str]]:
    return [
        ("lanes", f"{plan.max_batch}", "--max-batch"),
        ("tokens a request", f"{plan.max_seqlen}", "--max-seqlen"),
        ("tokens a prefill step", f"{plan.max_prefill_tokens}", "--max-prefill-tokens"),
        ("slots in the ring", f"{plan.num_slots}", "--num-slots"),
        (
            "KV pages",
            f"{plan.num_kv_pages}",
            f"--num-kv-pages; {plan.page_size_tokens} tokens each, "
            f"{plan.num_kv_pages * plan.page_size_tokens / plan.max_seqlen:.1f} full requests",
        ),
    ]


def _memory_rows(plan: CapturePlan) -> list[tuple[str, str, str]]:
    memory = plan.memory
    page_bytes = memory.kv_bytes // plan.num_physical_pages
    rows = [
        ("weights", memory.weight_bytes, ""),
        ("KV pages", memory.kv_bytes, f"{plan.num_physical_pages} of {page_bytes} bytes"),
        ("graphs", memory.graph_bytes, f"{len(plan.keys)} at {GRAPH_NODE_BYTES} bytes a node"),
        ("scratch", memory.arena_bytes + memory.step_bytes, "values, scratch, step buffers"),
        ("ring", memory.ring_bytes, _ring_text(plan)),
        ("sum", memory.total_bytes, ""),
    ]
    if memory.budget_bytes:
        rows.append(("budget", memory.budget_bytes, "--memory-budget"))
    return [(name, f"{size / MIB:10.1f} MiB", text) for name, size, text in rows]


def _ring_text(plan: CapturePlan) -> str:
    """Say what an output token takes: with logprobs eight times as much."""
    output_mib = plan.num_slots * plan.max_output_tokens * plan.output_record_bytes / MIB
    return (
        f"{plan.num_slots} slots; {output_mib:.1f} MiB of it output, "
        f"{plan.output_record_bytes} bytes a token with"
        + (" logprobs (--no-logprobs: 8)" if plan.has_logprobs else "out logprobs (--logprobs: 64)")
    )


def _print_rows(rows: Sequence[tuple[str, str, str]]) -> None:
    width = max(len(value) for _, value, _ in rows)
    for name, value, text in rows:
        click.echo(f"  {name:<22} {value:>{width}}  {text}".rstrip())


def _print_grid(grid: KeyGrid, plan: CapturePlan) -> None:
    number = sum(1 for key in plan.keys if key.kind == grid.kind)
    what = "new tokens of the step" if grid.kind == "prefill" else "KV length"
    click.echo(f"\n{grid.kind}: {number} graphs; rows: batch, columns: {what}")
    for line in draw_grid(grid, plan):
        click.echo("  " + line)


def draw_grid(grid: KeyGrid, plan: CapturePlan) -> list[str]:
    """Return a picture of the keys: a row for each batch bucket, a column for each length bucket.

    A cell that stands for several buckets is full only when all of them have a key.
    """
    own = {(key.batch, key.seqlen) for key in plan.keys if key.kind == grid.kind}
    row_groups = _groups(grid.batch_buckets, _MAX_ROWS)
    column_groups = _groups(grid.seqlen_buckets, _MAX_COLUMNS)
    width = len(str(grid.batch_buckets[-1]))
    lines = []
    for rows in row_groups:
        cells = []
        for columns in column_groups:
            present = sum((batch, seqlen) in own for batch in rows for seqlen in columns)
            full = present == len(rows) * len(columns)
            cells.append("\u25a0" if full else "\u25a1" if present else "\u00b7")
        lines.append(f"{rows[-1]:>{width}} {''.join(cells)}")
    first, last = str(grid.seqlen_buckets[0]), str(grid.seqlen_buckets[-1])
    space = max(len(column_groups) - len(first) - len(last), 1)
    lines.append(" " * (width + 1) + first + " " * space + last if first != last else "")
    return [line for line in lines if line]


def _groups(values: Sequence[int], most: int) -> list[Sequence[int]]:
    size = -(-len(values) // most)
    return [values[start : start + size] for start in range(0, len(values), size)]
