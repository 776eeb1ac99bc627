"""`--check`: each distinct segment on an engine against onnxruntime, compared by Polygraphy.

Activations are random, weights are those of the segment's first call. An engine is a callable:
(segment, arrays by name) -> outputs by name.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.weights import read_weight
from blinkc.surgery.segments import Segment, SegmentCall, SegmentedModel, ValueSpec

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    SegmentRunner = Callable[[Segment, Mapping[str, Array]], Mapping[str, Array]]

SIZES = ((1, 1), (5, 2))  # tokens and wanted rows of a step
_TOLERANCE = 2e-4  # relative, and absolute for values up to one


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentCheck:
    """How far a segment's output was from onnxruntime's: largest difference, and largest value."""

    segment: str
    output: str
    num_tokens: int
    difference: float
    largest: float


def check_segments(
    segmented: SegmentedModel, runner: SegmentRunner, *, sizes: Sequence[tuple[int, int]] = SIZES
) -> list[SegmentCheck]:
    """Compare every distinct segment at every size.

    Raises:
        BlinkError: an output differs; names the segment, the output and by how much. Or the model
            is not fp32, which onnxruntime's CPU kernels need.
    """
    if segmented.spec.dtype != "fp32":
        raise BlinkError(
            f"--check compares fp32 segments, the model is {segmented.spec.dtype}",
            hint="compile for --target cpu, or with --dtype fp32",
        )
    checks = []
    for index, segment in enumerate(segmented.segments):
        call = next(c for c in segmented.calls if isinstance(c, SegmentCall) and c.segment == index)
        weights = {
            spec.name: read_weight(segmented.weights[name])
            for spec, name in zip(segment.weights, call.weights, strict=True)
        }
        for num_tokens, num_rows in sizes:
            feeds = _random_feeds(segmented, segment, call, num_tokens, num_rows)
            checks += _compare(segment, runner, {**feeds, **weights}, num_tokens)
    return checks


def _random_feeds(
    segmented: SegmentedModel, segment: Segment, call: SegmentCall, num_tokens: int, num_rows: int
) -> dict[str, Array]:
    """Draw a segment's activations; integers stay below what they index."""
    random = np.random.default_rng(0)
    limits = {
        "input_ids": segmented.spec.vocab_size,
        "positions": segmented.spec.max_position_embeddings,
        "rows": num_tokens,
    }
    feeds: dict[str, Array] = {}
    for spec, name in zip(segment.activations, call.activations, strict=True):
        rows = num_tokens if spec.rows == "tokens" else num_rows
        if spec.dtype.startswith("int"):
            limit = limits.get(name, 1)
            feeds[spec.name] = random.integers(0, limit, (rows, *spec.shape), dtype=_dtype(spec))
        else:
            feeds[spec.name] = random.standard_normal((rows, *spec.shape)).astype(_dtype(spec))
    return feeds


def _dtype(spec: ValueSpec) -> Any:
    return {"int64": np.int64, "int32": np.int32, "bool": np.bool_}.get(spec.dtype, np.float32)


def _compare(
    segment: Segment, runner: SegmentRunner, feeds: dict[str, Array], num_tokens: int
) -> list[SegmentCheck]:
    """Run both and compare element by element; tolerance grows with an output's largest value."""
    import onnxruntime
    from polygraphy.backend.base import BaseRunner
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.common import TensorMetadata
    from polygraphy.comparator import Comparator, CompareFunc
    from polygraphy.logger import G_LOGGER

    class EngineRunner(BaseRunner):  # type: ignore[misc]
        def get_input_metadata_impl(self) -> Any:
            metadata = TensorMetadata()
            for name, array in feeds.items():
                metadata.add(name, array.dtype, array.shape)
            return metadata

        def infer_impl(self, feed_dict: Mapping[str, Array]) -> Any:
            start_s = time.perf_counter()
            outputs = OrderedDict(runner(segment, feed_dict))
            self.inference_time = time.perf_counter() - start_s
            return outputs

    onnxruntime.set_default_logger_severity(3)
    model = segment.model.SerializeToString()
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        runs = Comparator.run(
            [
                OnnxrtRunner(SessionFromOnnx(model), name="onnxruntime"),
                EngineRunner(name="engine"),
            ],
            data_loader=[feeds],
        )
        wanted, got = (dict(iterations[0]) for _, iterations in runs.items())
        largest = {name: float(np.abs(value).max(initial=1.0)) for name, value in wanted.items()}
        compare = CompareFunc.simple(
            rtol=_TOLERANCE,
            atol={name: _TOLERANCE * value for name, value in largest.items()},
            infinities_compare_equal=True,
        )
        result = Comparator.compare_accuracy(runs, compare_func=compare)
    checks = [
        SegmentCheck(
            segment=segment.name,
            output=name,
            num_tokens=num_tokens,
            difference=float(np.abs(value - got[name]).max(initial=0.0)) if name in got else np.inf,
            largest=largest[name],
        )
        for name, value in wanted.items()
    ]
    if not bool(result):
        worst = max(checks, key=lambda check: check.difference / check.largest)
        raise BlinkError(
            f"segment {segment.name} differs from onnxruntime: output {worst.output} by up to "
            f"{worst.difference:.3g} with {num_tokens} tokens (values up to {worst.largest:.3g})",
            hint="please report the model: this is a fault of the engine",
        )
    return checks
