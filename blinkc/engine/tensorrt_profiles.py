"""Row ranges that plans are tuned for: graph keys -> `RowRange`s, and which of them a key takes.

All ranges begin at one row, so that a measurement may find that a wider one is faster; without
measurement a key takes the narrowest that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blinkc.capture.grid import GraphKey

DEFAULT_PROFILES = 3
_SMALL_TOKENS = (16, 64, 512, 1024, 2048, 4096)  # where ranges end, by how many are wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRange:
    """One optimization profile: up to `max_tokens` rows, fastest at `opt_tokens`.

    `samples` are the rows that are sampled, the last segment's second dimension.
    """

    min_tokens: int
    opt_tokens: int
    max_tokens: int
    min_samples: int = 1
    opt_samples: int = 1
    max_samples: int = 1

    def __post_init__(self) -> None:
        for what in ("tokens", "samples"):
            low, middle, high = self.sizes(what)
            if not 1 <= low <= middle <= high:
                raise BlinkError(f"{what} {low}..{middle}..{high} are not ascending from 1")

    def sizes(self, rows: str) -> tuple[int, int, int]:
        """Return smallest, best and largest count of "tokens" or "samples"."""
        if rows == "tokens":
            return self.min_tokens, self.opt_tokens, self.max_tokens
        return self.min_samples, self.opt_samples, self.max_samples

    def holds(self, key: GraphKey) -> bool:
        """Return whether a key's step lies in the range."""
        tokens, samples = key_rows(key)
        return (
            self.min_tokens <= tokens <= self.max_tokens
            and self.min_samples <= samples <= self.max_samples
        )


def key_rows(key: GraphKey) -> tuple[int, int]:
    """Return the tokens and the samples of a key's step."""
    return (key.seqlen if key.kind == "prefill" else key.batch), key.batch


def plan_ranges(keys: Sequence[GraphKey], num_profiles: int) -> tuple[RowRange, ...]:
    """Choose at most `num_profiles` ranges: one token, few, many."""
    rows = [key_rows(key) for key in keys]
    most = max(tokens for tokens, _ in rows)
    ends = [1, *_SMALL_TOKENS][: num_profiles - 1]
    if num_profiles == 3:  # one token; a decode step; the rest
        ends = [1, max((tokens for tokens, s in rows if tokens == s), default=1)]
    ends = [*sorted({end for end in ends if end < most}), most]
    ranges, low = [], 1
    for end in ends:
        samples = max((s for tokens, s in rows if tokens <= end), default=1)
        inside = sorted({tokens for tokens, _ in rows if low <= tokens <= end}) or [end]
        best = min(inside, key=lambda tokens: abs(tokens * tokens - low * end))
        ranges.append(
            RowRange(
                min_tokens=1,
                opt_tokens=best,
                max_tokens=end,
                opt_samples=min(best, samples),
                max_samples=samples,
            )
        )
        low = end + 1
    return tuple(ranges)


def narrowest(ranges: Sequence[RowRange], key: GraphKey) -> int:
    """Return the index of the narrowest range that holds a key; -1 where none does."""
    fitting = [number for number, item in enumerate(ranges) if item.holds(key)]
    return min(fitting, key=lambda number: ranges[number].max_tokens, default=-1)
