"""Plans as a step's launch list names them: built plans + row ranges -> `SegmentEngine`s.

A segment has a plan, this project's kernels, or both; where it has both, a table says for each
graph key which runs: the number of the plan's profile, or -1 for the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from blinkc.engine.program import Program, Value, Weight
from blinkc.engine.tensorrt_model import EngineInput
from blinkc.engine.tensorrt_profiles import RowRange, narrowest
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blinkc.capture.grid import GraphKey
    from blinkc.surgery.segments import Segment

OWN_KERNELS = -1
ENGINE_FACTS = "engines.json"  # beside generated code: builds, versions, choice, timings


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentEngine:
    """A segment's plan: what the loader binds, and which keys take which profile."""

    segment: str
    plan: str  # file in the bundle
    activations: tuple[EngineInput, ...]
    weights: tuple[EngineInput, ...]
    outputs: tuple[EngineInput, ...]
    ranges: tuple[RowRange, ...]
    choices: tuple[int, ...]  # by key index
    has_kernels: bool  # this project's kernels are there too

    def to_json(self) -> dict[str, Any]:
        """Return what the launch list holds."""
        return asdict(self)


def segment_engine_from_json(data: dict[str, Any]) -> SegmentEngine:
    """Read what `SegmentEngine.to_json` wrote."""
    values = dict(data)
    for kind in ("activations", "weights", "outputs"):
        values[kind] = tuple(EngineInput(**{**x, "shape": tuple(x["shape"])}) for x in data[kind])
    values["ranges"] = tuple(RowRange(**item) for item in data["ranges"])
    values["choices"] = tuple(data["choices"])
    return SegmentEngine(**values)


def choice_name(choice: int) -> str:
    """Return how manifest and reports call a choice."""
    return "kernels" if choice == OWN_KERNELS else f"profile {choice}"


def choose_narrowest(
    segment: str, ranges: Sequence[RowRange], keys: Sequence[GraphKey], *, has_kernels: bool
) -> tuple[int, ...]:
    """Give every key the narrowest profile that holds it, for want of a measurement.

    Raises:
        BlinkError: no profile holds a key and nothing else can run it.
    """
    choices = tuple(narrowest(ranges, key) for key in keys)
    for key, choice in zip(keys, choices, strict=True):
        if choice == OWN_KERNELS and not has_kernels:
            raise BlinkError(f"segment {segment}: no profile of its plan holds {tuple(key)}")
    return choices


def empty_program(segment: Segment) -> Program:
    """Return a program with the segment's buffers and no kernel: a plan does the work."""

    def count(shape: tuple[int, ...]) -> int:
        size = 1
        for axis in shape:
            size *= axis
        return size

    def values(specs: Sequence[Any]) -> tuple[Value, ...]:
        return tuple(
            Value(
                name=spec.name,
                rows=spec.rows,
                size=count(spec.shape),
                dtype="int32" if spec.dtype == "int64" else spec.dtype,
            )
            for spec in specs
        )

    return Program(
        name=segment.name,
        inputs=values(segment.activations),
        weights=tuple(
            Weight(name=spec.name, shape=spec.shape, dtype=spec.dtype) for spec in segment.weights
        ),
        outputs=values(segment.outputs),
        intermediates=(),
        constants=(),
        kernels=(),
    )
