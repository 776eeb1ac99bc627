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
from blinkc.frontend.weights import NUMPY_DTYPES, read_weight
from blinkc.surgery.segments import Segment, SegmentCall, SegmentedModel, ValueSpec

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    SegmentRunner = Callable[[Segment, Mapping[str, Array]], Mapping[str, Array]]

QUANTIZED = ("fp8", "int4")  # types of weights whose bytes go in as they are
SIZES = ((1, 1), (5, 2))  # tokens and wanted rows of a step
# Relative, and absolute for values up to one: roundings of the type, over a chain of products.
TOLERANCES = {"fp32": 2e-4, "fp16": 1e-2, "bf16": 6e-2}
# Of activations: with the second the squares of a norm leave fp16, so it must compute in fp32.
SCALES = {"fp32": (1.0,), "fp16": (1.0, 300.0), "bf16": (1.0, 300.0)}


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

    onnxruntime runs the segment in fp32, which its CPU kernels need, on the values that the
    engine gets in the model's type.

    Raises:
        BlinkError: an output differs; names the segment, the output and by how much.
    """
    checks = []
    for index, segment in enumerate(segmented.segments):
        call = next(c for c in segmented.calls if isinstance(c, SegmentCall) and c.segment == index)
        weights = {
            spec.name: read_weight(segmented.weights[name])
            for spec, name in zip(segment.weights, call.weights, strict=True)
        }
        quantized = {s.name: weights[s.name] for s in segment.weights if s.dtype in QUANTIZED}
        plain = {n: _as_fp32(array) for n, array in weights.items() if n not in quantized}
        dtype = segmented.spec.dtype
        for scale in SCALES[dtype]:
            for num_tokens, num_rows in sizes:
                feeds = _random_feeds(segmented, segment, call, num_tokens, num_rows, scale)
                feeds |= plain
                checks += _compare(segment, runner, feeds, quantized, num_tokens, TOLERANCES[dtype])
    return checks


def _as_fp32(array: Array) -> Array:
    return array if array.dtype.kind in "iub" else array.astype(np.float32)


def _random_feeds(
    segmented: SegmentedModel,
    segment: Segment,
    call: SegmentCall,
    num_tokens: int,
    num_rows: int,
    scale: float,
) -> dict[str, Array]:
    """Draw a segment's activations, fp32 numbers of the model's type; integers stay below what they
    index."""
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
            values = random.standard_normal((rows, *spec.shape)) * scale
            rounded = values.astype(NUMPY_DTYPES[spec.dtype]).astype(np.float32)
            feeds[spec.name] = rounded
    return feeds


def _dtype(spec: ValueSpec) -> Any:
    return {"int64": np.int64, "int32": np.int32, "bool": np.bool_}.get(spec.dtype, np.float32)


def widened_model(model: Any) -> Any:
    """Return a copy that computes in fp32 throughout: every fp16 or bf16 in it becomes fp32."""
    import onnx

    half = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    wide = onnx.TensorProto.FLOAT
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type in half:
            value.type.tensor_type.elem_type = wide
    for tensor in graph.initializer:
        if tensor.data_type in half:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i in half:
                attribute.i = wide
            elif attribute.name == "value" and attribute.t.data_type in half:
                array = onnx.numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(array))
    return copy


def with_constants(segment: Segment, arrays: Mapping[str, Array]) -> Any:
    """Return a segment's model with some weights as constants, whose bytes `arrays` are."""
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    inputs = [value for value in model.graph.input if value.name not in arrays]
    for value in model.graph.input:
        if value.name in arrays:
            kind = value.type.tensor_type
            tensor = model.graph.initializer.add()
            tensor.name, tensor.data_type = value.name, kind.elem_type
            tensor.dims.extend(axis.dim_value for axis in kind.shape.dim)
            tensor.raw_data = np.ascontiguousarray(arrays[value.name]).tobytes()
    kept = [onnx.helper.make_value_info(value.name, value.type) for value in inputs]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


def _compare(
    segment: Segment,
    runner: SegmentRunner,
    feeds: dict[str, Array],
    quantized: dict[str, Array],
    num_tokens: int,
    tolerance: float,
) -> list[SegmentCheck]:
    """Run both and compare element by element; tolerance grows with an output's largest value."""
    import onnxruntime
    from polygraphy.backend.base import BaseRunner
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.common import TensorMetadata
    from polygraphy.comparator import Comparator, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    class EngineRunner(BaseRunner):  # type: ignore[misc]
        def get_input_metadata_impl(self) -> Any:
            metadata = TensorMetadata()
            for name, array in feeds.items():
                metadata.add(name, array.dtype, array.shape)
            return metadata

        def infer_impl(self, feed_dict: Mapping[str, Array]) -> Any:
            start_s = time.perf_counter()
            outputs = OrderedDict(runner(segment, {**feed_dict, **quantized}))
            self.inference_time = time.perf_counter() - start_s
            return outputs

    onnxruntime.set_default_logger_severity(3)
    # Optimized, onnxruntime rounds activations to 8 bits beside weights of 4.
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    # numpy and onnxruntime share no types of 8 and 4 bits: such weights are constants there.
    model = widened_model(with_constants(segment, quantized)).SerializeToString()
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        runs = Comparator.run(
            [
                OnnxrtRunner(
                    SessionFromOnnx(model, graph_optimization_level=level), name="onnxruntime"
                ),
                EngineRunner(name="engine"),
            ],
            data_loader=[feeds],
        )
        wanted, got = (dict(iterations[0]) for _, iterations in runs.items())
        largest = {name: float(np.abs(value).max(initial=1.0)) for name, value in wanted.items()}
        compare = SimpleCompareFunc(
            rtol=tolerance,
            atol={name: tolerance * value for name, value in largest.items()},
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
