"""Places values that live for a while in one memory: sizes and lifetimes -> offsets and a total."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT_BYTES = 256  # what CUDA's allocator gives, and more than any vector load wants


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaRequest:
    """A value of `num_bytes` that is written at call `first` and last read at call `last`."""

    name: str
    num_bytes: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArenaPlan:
    """Offsets of the values, `ALIGNMENT_BYTES` apart at least, and the bytes they need together."""

    offsets: dict[str, int]
    total_bytes: int


def plan_arena(requests: Iterable[ArenaRequest]) -> ArenaPlan:
    """Place the values so that no two that live at the same call overlap.

    Largest first, each at the lowest offset that is free during its life: close to the peak for
    chains of layers, and the same for equal input.
    """
    placed: list[tuple[int, int, ArenaRequest]] = []  # offset, end
    offsets: dict[str, int] = {}
    ordered = sorted(requests, key=lambda r: (-r.num_bytes, r.first, r.name))
    for request in ordered:
        size = _aligned(request.num_bytes)
        offset = 0
        for start, end, other in sorted(placed, key=lambda p: p[0]):
            lives_together = request.first <= other.last and other.first <= request.last
            if lives_together and start < offset + size and offset < end:
                offset = end
        placed.append((offset, offset + size, request))
        offsets[request.name] = offset
    return ArenaPlan(offsets=offsets, total_bytes=max((end for _, end, _ in placed), default=0))


def _aligned(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
