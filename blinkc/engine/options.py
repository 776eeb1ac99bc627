"""What the user chooses about building engines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blinkc.errors import BlinkError

MAX_PROFILES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How TensorRT plans are built; None means: decide."""

    level: int | None = None
    budget_s: float = 0.0  # for all plans together; 0: as long as it takes
    num_profiles: int | None = None
    max_workspace_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.level is not None and not 0 <= self.level <= 5:
            raise BlinkError(f"--engine-level is {self.level}; it goes from 0 to 5")
        if not 0 <= self.budget_s < math.inf:  # nor is it nan
            raise BlinkError(f"--engine-seconds is {self.budget_s:g}; it goes from 0 up")
        if self.num_profiles is not None and not 1 <= self.num_profiles <= MAX_PROFILES:
            raise BlinkError(
                f"--engine-profiles is {self.num_profiles}; it goes from 1 to {MAX_PROFILES}"
            )
        if self.max_workspace_bytes is not None and self.max_workspace_bytes < 16 << 20:
            raise BlinkError("--engine-workspace is below 16m, with which few products build")
