"""Makes graph keys and O(1) look-up tables: `ShapesSpec`, `Limits` -> `KeyGrid`s.

A grid always holds its corner (largest batch, largest seqlen), which catches all that fits nowhere
else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from blinkc.capture.shapes import ClauseSpec, Kind, RangeSpec, ShapesError, ShapesSpec
from blinkc.errors import BlinkError, InternalError

MAX_KEYS = 4096  # two bytes would hold more; a graph each takes memory and time to instantiate
MAX_AUTO_KEYS = 1000
_GPU_SEQLEN_STEPS = (8, 4, 2, 1)  # decode length buckets per doubling, finest first


class GraphKey(NamedTuple):
    """One captured graph: `batch` rows; `seqlen` new tokens (prefill) or KV length (decode)."""

    kind: Kind
    batch: int
    seqlen: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the grids are bounded by; every field is at least 1."""

    max_batch: int  # lanes
    max_seqlen: int  # tokens, prompt + output
    max_prefill_tokens: int  # new tokens of one prefill step
    max_prefill_batch: int  # prompts of one prefill step

    def __post_init__(self) -> None:
        for name, value in (
            ("max_batch", self.max_batch),
            ("max_seqlen", self.max_seqlen),
            ("max_prefill_tokens", self.max_prefill_tokens),
            ("max_prefill_batch", self.max_prefill_batch),
        ):
            if value < 1:
                raise BlinkError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        if self.max_prefill_batch > min(self.max_batch, self.max_prefill_tokens):
            raise BlinkError(
                f"prefill takes up to {self.max_prefill_batch} prompts a step, more than max_batch "
                f"{self.max_batch} or max_prefill_tokens {self.max_prefill_tokens} allows"
            )

    def of_axis(self, kind: Kind, axis: str) -> int:
        """Return the largest value of "batch" or "seqlen" for `kind`."""
        if kind == "prefill":
            return self.max_prefill_batch if axis == "batch" else self.max_prefill_tokens
        return self.max_batch if axis == "batch" else self.max_seqlen


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyGrid:
    """The keys of one kind and the table from (batch, seqlen) to the smallest that fits.

    Look-up of a step with `b` rows (1..max) and length `s` (1..max):
    `lut[b][seqlen_bucket_index[(s + granule_tokens - 1) // granule_tokens]]`, an index into
    `CapturePlan.keys`. "Smallest" orders by what costs more: (seqlen, batch) for prefill, whose
    work is its tokens, (batch, seqlen) for decode.
    """

    kind: Kind
    batch_buckets: tuple[int, ...]  # ascending
    seqlen_buckets: tuple[int, ...]  # ascending
    granule_tokens: int  # greatest common divisor of the seqlen buckets
    seqlen_bucket_index: tuple[int, ...]  # [max / granule + 1]
    lut: tuple[tuple[int, ...], ...]  # [max batch + 1][num seqlen buckets]; row 0 equals row 1

    def look_up(self, batch: int, seqlen: int) -> int:
        """Return the index of the key for a step; sizes past the grid get the corner."""
        batch = min(max(batch, 1), len(self.lut) - 1)
        granule = -(-seqlen // self.granule_tokens)
        granule = min(max(granule, 0), len(self.seqlen_bucket_index) - 1)
        return self.lut[batch][self.seqlen_bucket_index[granule]]


def plan_keys(
    spec: ShapesSpec, limits: Limits, *, on_gpu: bool, max_auto_keys: int = MAX_AUTO_KEYS
) -> dict[Kind, tuple[GraphKey, ...]]:
    """Expand a spec to the keys of each kind, sorted, corner included.

    `auto` stays at or below `max_auto_keys` where the limits allow.

    Raises:
        ShapesError: a size of the spec is over its limit.
        BlinkError: more than `MAX_KEYS` keys.
    """
    keys: dict[Kind, tuple[GraphKey, ...]] = {}
    explicit: dict[Kind, set[tuple[int, int]]] = {}
    kinds: tuple[Kind, ...] = ("prefill", "decode")
    for kind in kinds:
        points: set[tuple[int, int]] = set()
        for clause in spec.of_kind(kind):
            points |= _clause_points(spec, clause, limits)
        explicit[kind] = points
    num_explicit = sum(len(points) for points in explicit.values())
    for kind in kinds:
        # Auto gets what an explicit grid of the other kind leaves, half of it at least.
        room = max(max_auto_keys - num_explicit, max_auto_keys // 2)
        points = explicit[kind] or _auto_points(kind, limits, on_gpu=on_gpu, max_keys=room)
        points.add((limits.of_axis(kind, "batch"), limits.of_axis(kind, "seqlen")))
        keys[kind] = tuple(sorted(GraphKey(kind, batch, seqlen) for batch, seqlen in points))
    total = sum(len(of_kind) for of_kind in keys.values())
    if total > MAX_KEYS:
        sums = ", ".join(f"{kind} {len(of_kind)}" for kind, of_kind in keys.items())
        raise BlinkError(
            f"--shapes asks for {total} graphs ({sums}); at most {MAX_KEYS} are captured",
            hint="use wider steps, such as 1..16,20..64+4 for batches and 64..8192x2 for lengths",
        )
    return keys


def build_grid(kind: Kind, keys: tuple[GraphKey, ...], first_index: int) -> KeyGrid:
    """Build the look-up table over `keys`, which start at `first_index` of the plan."""
    batches = tuple(sorted({key.batch for key in keys}))
    seqlens = tuple(sorted({key.seqlen for key in keys}))
    granule = math.gcd(*seqlens)
    index: list[int] = []
    bucket = 0
    for granules in range(seqlens[-1] // granule + 1):
        while seqlens[bucket] < granules * granule:
            bucket += 1
        index.append(bucket)
    rows_of_bucket = _rows_of_buckets(kind, keys, first_index, batches, seqlens)
    lut: list[tuple[int, ...]] = []
    bucket = 0
    for batch in range(batches[-1] + 1):
        while batches[bucket] < batch:
            bucket += 1
        lut.append(rows_of_bucket[bucket])
    return KeyGrid(
        kind=kind,
        batch_buckets=batches,
        seqlen_buckets=seqlens,
        granule_tokens=granule,
        seqlen_bucket_index=tuple(index),
        lut=tuple(lut),
    )


def _rows_of_buckets(
    kind: Kind,
    keys: tuple[GraphKey, ...],
    first_index: int,
    batches: tuple[int, ...],
    seqlens: tuple[int, ...],
) -> list[tuple[int, ...]]:
    """Return, for each batch bucket, the best key's index at each seqlen bucket.

    Filled from the corner down: a cell's best key is its own, or the better of its neighbours'.
    """

    def cost(key: GraphKey) -> tuple[int, int]:
        return (key.seqlen, key.batch) if kind == "prefill" else (key.batch, key.seqlen)

    index_of = {(key.batch, key.seqlen): number for number, key in enumerate(keys)}
    rows: list[list[int]] = [[-1] * len(seqlens) for _ in batches]
    for i in reversed(range(len(batches))):
        for j in reversed(range(len(seqlens))):
            own = index_of.get((batches[i], seqlens[j]))
            options = [] if own is None else [own]
            if own is None:
                options += [rows[i + 1][j]] if i + 1 < len(batches) else []
                options += [rows[i][j + 1]] if j + 1 < len(seqlens) else []
            if not options:
                raise InternalError(f"the {kind} grid lacks its corner")
            rows[i][j] = min(options, key=lambda number: cost(keys[number]))
    return [tuple(first_index + number for number in row) for row in rows]


def _clause_points(spec: ShapesSpec, clause: ClauseSpec, limits: Limits) -> set[tuple[int, int]]:
    batches = _axis_values(spec, clause.batch, clause.kind, "batch", limits)
    seqlens = _axis_values(spec, clause.seqlen, clause.kind, "seqlen", limits)
    if len(batches) * len(seqlens) > 16 * MAX_KEYS:
        column = clause.batch[0].first.column
        count = len(batches) * len(seqlens)
        raise ShapesError(spec.text, column, f"this grid has {count} keys; at most {MAX_KEYS} fit")
    # A prefill step has at least a token for each prompt.
    return {(b, s) for b in batches for s in seqlens if clause.kind == "decode" or b <= s}


def _axis_values(
    spec: ShapesSpec, ranges: Iterable[RangeSpec], kind: Kind, axis: str, limits: Limits
) -> set[int]:
    limit = limits.of_axis(kind, axis)
    option = {
        ("decode", "batch"): "--max-batch",
        ("decode", "seqlen"): "--max-seqlen",
        ("prefill", "seqlen"): "--max-prefill-tokens",
        ("prefill", "batch"): "--max-batch",
    }[(kind, axis)]
    values: set[int] = set()
    for item in ranges:
        first = limit if item.first.value is None else item.first.value
        last = limit if item.last.value is None else item.last.value
        for size in (item.first, item.last):
            if size.value is not None and size.value > limit:
                raise ShapesError(spec.text, size.column, f"{size.value} is over {option} {limit}")
        if first > last:
            raise ShapesError(spec.text, item.first.column, f"{first} is over {option} {limit}")
        value = first
        while value < last:
            values.add(value)
            value = value * item.step if item.geometric else value + item.step
        values.add(last)
    return values


def _auto_points(
    kind: Kind, limits: Limits, *, on_gpu: bool, max_keys: int
) -> set[tuple[int, int]]:
    max_batch = limits.of_axis(kind, "batch")
    max_seqlen = limits.of_axis(kind, "seqlen")
    if not on_gpu:  # the CPU target runs real rows only: keys name the step, padding costs nothing
        batches = _doubling(1, max_batch, 1)
        seqlens = _doubling(64, max_seqlen, 1, factor=4)
    elif kind == "prefill":
        batches = _doubling(1, max_batch, 1)
        seqlens = _stepped(16, max_seqlen, per_doubling=16)
    else:
        batches = _stepped(1, max_batch, per_doubling=8)
        room = max(max_keys * 2 // 3 // len(batches), 1)
        for steps in _GPU_SEQLEN_STEPS:
            seqlens = _doubling(128, max_seqlen, steps)
            if len(seqlens) <= room:
                break
    return {(b, s) for b in batches for s in seqlens if kind == "decode" or b <= s}


def _stepped(start: int, last: int, *, per_doubling: int) -> list[int]:
    """Return multiples of `start`, their step doubled with the value: `per_doubling` a doubling."""
    values: list[int] = []
    value, step = start, start
    while value < last:
        values.append(value)
        if value >= 2 * per_doubling * step:
            step *= 2
        value += step
    return [*values, last]


def _doubling(start: int, last: int, per_doubling: int, *, factor: int = 2) -> list[int]:
    """Return `start`, `factor * start`, ... up to `last`, each gap cut in `per_doubling` parts."""
    values: list[int] = []
    base = start
    while base < last:
        step = base * (factor - 1) / per_doubling
        points = (int(base + number * step) for number in range(per_doubling))
        values += [point for point in points if point < last]
        base *= factor
    return sorted({*values, last})
