"""The compute capability that a GPU target's name says: sm_90a -> 90."""

from __future__ import annotations


def compute_capability(target: str) -> int:
    """Return 90 of sm_90a, major and minor number in one; 0 of what names no GPU."""
    digits = target.removeprefix("sm_").rstrip("af")
    return int(digits) if digits.isdecimal() else 0
