"""Pictures of benchmark results: a JSON of bench_gpu -> SVG bars, for people who would rather look.

`python -m benchmarks.report benchmarks/results/gpu_DATE.json` writes the SVG beside it. Each row is
a figure with its bar and, where there are such, vLLM's (with ours on the same machine, where it ran
on another one) and the machine's own limit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LABEL_WIDTH, BAR_HEIGHT, GAP = 900, 330, 16, 22
COLORS = {
    "measured": "#2a6fb0",
    "beside_vllm": "#8ab4dc",
    "vllm_0.26": "#b0b0b0",
    "idle": "#7fb069",
    "loaded": "#d1603d",
}
TITLES = {
    "measured": "blink",
    "beside_vllm": "blink, on the machine of vLLM's run",
    "vllm_0.26": "vLLM 0.26",
    "idle": "idle",
    "loaded": "loaded",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Bars that share a scale: (series, value) pairs, with marks at some values."""

    title: str
    bars: tuple[tuple[str, float], ...]
    marks: tuple[tuple[str, float], ...] = ()

    @property
    def scale(self) -> float:
        """The value at the right end."""
        return max([abs(v) for _, v in (*self.bars, *self.marks)] + [1e-9]) * 1.15


def groups_of(result: dict[str, Any]) -> list[Group]:
    """Collect what has a figure: the bars, and the tails with the host idle and loaded."""
    groups = []
    for row in result.get("bars", ()):
        series = ("measured", "beside_vllm", "vllm_0.26")
        bars = [(name, float(row[name])) for name in series if name in row]
        marks = [("bar", float(row["bar"]))]
        marks += [(name, float(row[name])) for name in ("floor", "limit") if name in row]
        met = "" if row["met"] else "  (falls short)"
        groups.append(Group(title=row["what"] + met, bars=tuple(bars), marks=tuple(marks)))
    tails = result.get("parts", {}).get("host_load", {})
    for kind, words in (("reserved", "four cores reserved"), ("not_reserved", "none reserved")):
        for metric, name in (("tpot", "time per output token"), ("ttft", "time to first token")):
            row = tails.get(kind, {}).get(metric)
            if row is not None:
                bars = [(s, float(row[f"{s}_p99_ms"])) for s in ("idle", "loaded")]
                title = f"host load, {words}: P99 {name}, ms"
                groups.append(Group(title=title, bars=tuple(bars)))
    return groups


def svg(groups: Sequence[Group], caption: str) -> str:
    """Draw the groups below each other."""
    parts: list[str] = []
    y = 34
    for group in groups:
        parts.append(_text(8, y + 12, group.title, weight="bold"))
        lines = ", ".join(f"{name} {value:g}" for name, value in group.marks)
        parts.append(_text(LABEL_WIDTH + 230, y + 12, lines, size=10))
        y += GAP
        top = y
        for series, value in group.bars:
            length = max(1.0, abs(value) / group.scale * (WIDTH - LABEL_WIDTH - 80))
            color = COLORS.get(series, "#888888")
            parts.append(_text(24, y + 12, TITLES.get(series, series)))
            parts.append(
                f'<rect x="{LABEL_WIDTH}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT - 3}" '
                f'fill="{color}"/>'
            )
            parts.append(_text(LABEL_WIDTH + length + 6, y + 11, f"{value:.4g}"))
            y += BAR_HEIGHT
        for _, value in group.marks:
            x = LABEL_WIDTH + abs(value) / group.scale * (WIDTH - LABEL_WIDTH - 80)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{y}" stroke="#222" '
                f'stroke-dasharray="3,2"/>'
            )
        y += GAP // 2
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 10}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, _text(8, 18, caption, size=11), *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, *, size: int = 12, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def caption_of(result: dict[str, Any]) -> str:
    """Say where and how the figures were taken."""
    hardware = result.get("hardware", {})
    gpu = hardware.get("gpu", "") if isinstance(hardware, dict) else hardware
    return f"{gpu}, {result.get('date', '')}, {result.get('path', '')}"


def main() -> None:
    """Draw each named result."""
    for name in sys.argv[1:]:
        path = Path(name)
        result = json.loads(path.read_text())
        groups = groups_of(result)
        if not groups:
            sys.exit(f"{path} holds no bars: report.py draws what bench_gpu.py wrote")
        output = path.with_suffix(".svg")
        output.write_text(svg(groups, caption_of(result)))
        print(output)


if __name__ == "__main__":
    main()
