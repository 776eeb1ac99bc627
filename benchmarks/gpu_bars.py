"""The bars that one GPU's figures are held against: results of bench_gpu -> met or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One figure with its bound, and what vLLM 0.26 gave for it on the same kind of GPU."""

    what: str
    bar: float
    find: Callable[[dict[str, Any]], float]
    is_upper: bool = True  # the figure may not be larger; else not smaller
    vllm: float | None = None
    floor: float | None = None


def _compare(parts: dict[str, Any]) -> float:
    return max(float(row["added_percent"]) for row in parts["compare"].values())


def _experts(parts: dict[str, Any]) -> float:
    return float(parts["qwen"]["experts"]["by_rows"]["16"]["mean"])


def _cache(figure: str) -> Callable[[dict[str, Any]], float]:
    """Of the benchmark's own loader, or of `blink-runtime run` where that part was left out."""

    def find(parts: dict[str, Any]) -> float:
        place = parts["cache"] if "cache" in parts else parts["first_token"]
        return float(place["cached"][figure])

    return find


def _chained(shape: str, metric: str) -> Callable[[dict[str, Any]], float]:
    return lambda parts: float(parts["serve"]["chained"][shape][metric]["p50"])


def _chained_throughput(shape: str) -> Callable[[dict[str, Any]], float]:
    return lambda parts: float(parts["serve"]["chained"][shape]["tokens_per_s"])


def _reserved(metric: str) -> Callable[[dict[str, Any]], float]:
    return lambda parts: float(parts["host_load"]["reserved"][metric]["grown_percent"])


BARS = (
    Bar(what="Llama-3-8B, batch 1, time per output token, ms", bar=4.4, vllm=4.86, floor=3.5,
        find=_chained("bs1", "tpot_ms")),
    Bar(what="Llama-3-8B, idle, time to first token of 64, ms", bar=7.0, vllm=19.9,
        find=_chained("bs1", "ttft_ms")),
    Bar(what="Llama-3-8B, 16 at a time, 1024 -> 128, tok/s", bar=2000, is_upper=False, vllm=1847,
        floor=2230, find=_chained_throughput("c16")),
    Bar(what="Llama-3-8B, 64 at a time, 1024 -> 128, tok/s", bar=3300, is_upper=False, vllm=3228,
        floor=3490, find=_chained_throughput("c64")),
    Bar(what="Qwen3-30B-A3B, batch 1, time per output token, ms", bar=3.0, vllm=4.13, floor=1.4,
        find=lambda parts: float(parts["qwen"]["bs1"]["tpot_ms"]["p50"])),
    Bar(what="Qwen3-30B-A3B, 16 at a time, 1024 -> 128, tok/s", bar=1000, is_upper=False, vllm=872,
        floor=1430, find=lambda parts: float(parts["qwen"]["c16"]["tokens_per_s"])),
    Bar(what="Qwen3-30B-A3B, distinct experts of a layer at 16 rows", bar=70, is_upper=False,
        find=_experts),
    Bar(what="chained over back-to-back replay, the worst key, %", bar=1.0, find=_compare),
    Bar(what="the graph cache, algorithms cached, s", bar=30,
        find=_cache("graphs_s")),
    Bar(what="the graph cache, GB", bar=3,
        find=lambda parts: _cache("graph_bytes")(parts) / 1e9),
    Bar(what="from run to the first served token, algorithms cached, s", bar=60,
        find=lambda parts: float(parts["first_token"]["cached"]["first_token_s"])),
    Bar(what="60,000 steps, 8B: threads but the front end's, % of a core", bar=0.1,
        find=lambda parts: float(parts["steps"]["others_percent"])),
    Bar(what="a million steps: threads but the front end's, % of a core", bar=0.1,
        find=lambda parts: max(float(p["others_percent"]) for p in parts["million"].values())),
    Bar(what="host load, reserved cores, P99 time per token, % more", bar=5,
        find=_reserved("tpot")),
    Bar(what="host load, reserved cores, P99 time to first, % more", bar=5,
        find=_reserved("ttft")),
)  # fmt: skip


def judge(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each bar that has a figure; parts that are missing have none."""
    rows = []
    for bar in BARS:
        try:
            measured = bar.find(parts)
        except (KeyError, TypeError, ValueError):
            continue
        met = measured <= bar.bar if bar.is_upper else measured >= bar.bar
        row: dict[str, Any] = {"what": bar.what, "measured": measured, "bar": bar.bar, "met": met}
        if bar.vllm is not None:
            row["vllm_0.26"] = bar.vllm
        if bar.floor is not None:
            row["floor" if bar.is_upper else "limit"] = bar.floor
        rows.append(row)
    return rows
