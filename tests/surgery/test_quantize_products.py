"""Segments with quantized weights compute what they say, in onnxruntime; what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from blink_runtime.cuda_steps import pack_weights
from blink_runtime.weight_upload import file_chunks
from blinkc.bundle.source_weights import can_be_referenced
from blinkc.bundle.weights import FileSpan
from blinkc.bundle.write_weights import WEIGHTS_NAME, embed_weights, split_random
from blinkc.capture.plan_capture import CaptureConfig, plan_capture
from blinkc.engine.check_segments import check_segments, widened_model, with_constants
from blinkc.engine.cuda import render_cuda_model
from blinkc.engine.segment_engines import SegmentEngine
from blinkc.engine.tensorrt_api import TABLE
from blinkc.engine.tensorrt_model import engine_model
from blinkc.engine.tensorrt_profiles import RowRange
from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightRef
from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from blinkc.frontend.quantize_weights import FP8_STEP, decode
from blinkc.frontend.weights import read_weight
from blinkc.surgery import segment_decoder
from blinkc.surgery.quantize_products import quantize_products
from blinkc.surgery.segments import CutOpCall, Segment, SegmentCall, SegmentedModel
from tests.engine.segment_runner import make_segment
from tests.engine.tiny_decoder import tiny_decoder
from tests.frontend_onnx.op_models import build_op_model

KINDS = ("fp8", "int4")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> SegmentedModel:
    """Two layers with biases; rows of 128 and 192 columns, so that groups are of 128 and of 64."""
    path = build_op_model(
        tmp_path_factory.mktemp("onnx") / "model.onnx",
        hidden=128, intermediate=192, heads=2, head_dim=64, qkv_bias=True, fp16=True,
    )  # fmt: skip
    return segment_decoder(decoder_graph_from_onnx(path, dtype="fp16", max_seqlen=64))


def calls_of(model: SegmentedModel) -> list[SegmentCall]:
    return [call for call in model.calls if isinstance(call, SegmentCall)]


def session(model: onnx.ModelProto) -> Any:
    """Optimized, onnxruntime would round activations to 8 bits beside 4-bit weights."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def run(segment: Segment, weights: dict[str, Any], activations: dict[str, Any]) -> list[Any]:
    """Run a segment in fp32 with all of its weights as constants."""
    return list(session(widened_model(with_constants(segment, weights))).run(None, activations))


def activations_of(segment: Segment) -> dict[str, Any]:
    random = np.random.default_rng(5)
    made = {}
    for spec in segment.activations:
        shape = ({"tokens": 5, "samples": 2}[spec.rows], *spec.shape)
        is_index = spec.dtype == "int64"
        made[spec.name] = (
            random.integers(0, 2, shape) if is_index else random.standard_normal(shape, np.float32)
        )
    return made


def powers_of_two(weights: dict[str, WeightRef]) -> dict[str, Any]:
    """Read weights; fp8's scales become powers of two, with which products are exact to scale."""
    arrays = {name: read_weight(reference) for name, reference in weights.items()}
    for name, reference in weights.items():
        if (
            reference.encoding
            and reference.encoding.part == "scales"
            and name.endswith("fp8_scale")
        ):
            exponents = np.rint(np.log2(arrays[name].astype(np.float32)))
            arrays[name] = np.exp2(exponents).astype(arrays[name].dtype)
    return arrays


@pytest.mark.parametrize("kind", KINDS)
def test_segments_compute_with_what_the_bytes_stand_for(kind: str, plain: SegmentedModel) -> None:
    """Bit for bit: 4-bit weights times their scales are exact in fp32, and so is a product times a
    power of two. Guards axes, groups, nibbles, the order of weights, a bias under the scale."""
    quantized = quantize_products(plain, kind)
    arrays = powers_of_two(quantized.weights)
    for number, (before, after) in enumerate(
        zip(calls_of(plain), calls_of(quantized), strict=True)
    ):
        segment = quantized.segments[after.segment]
        given = dict(zip((s.name for s in segment.weights), after.weights, strict=True))
        wide = {}
        original = plain.segments[before.segment]
        for spec, name in zip(original.weights, before.weights, strict=True):
            if f"{name}.{kind}" in arrays:
                scales = arrays[f"{name}.{kind}_scale"]
                wide[spec.name] = decode(arrays[f"{name}.{kind}"], scales, kind)
            else:
                wide[spec.name] = arrays[name]
        feeds = activations_of(segment)
        got = run(segment, {name: arrays[place] for name, place in given.items()}, feeds)
        # `wide` stays fp32: rounded to fp16 it would be another matrix.
        want = run_wide(original, wide, feeds)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"call {number}")


def run_wide(segment: Segment, weights: dict[str, Any], activations: dict[str, Any]) -> list[Any]:
    feeds = {name: array.astype(np.float32) for name, array in weights.items()}
    return list(session(widened_model(segment.model)).run(None, {**activations, **feeds}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_stays_within_the_rounding_of_its_weights(
    kind: str, plain: SegmentedModel
) -> None:
    """The tolerance of each output: its inputs' sizes times half a step of each weight."""
    quantized = quantize_products(plain, kind)
    call = calls_of(plain)[0]
    name = next(n for n in call.weights if f"{n}.{kind}" in quantized.weights)
    matrix = read_weight(plain.weights[name]).astype(np.float64)
    values, scales = (
        read_weight(quantized.weights[f"{name}.{kind}{part}"]) for part in ("", "_scale")
    )
    x = np.random.default_rng(0).standard_normal((7, matrix.shape[1]))
    node = onnx.helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    segment = one_product(node, matrix.shape)
    alone = replace(call, segment=0, activations=("x",), weights=(name,), outputs=("y",))
    model = replace(plain, segments=(segment,), calls=(alone,), weights={name: plain.weights[name]})
    after = quantize_products(model, kind).segments[0]
    (got,) = run(after, {"w": values, "w_scale": scales}, {"x": x.astype(np.float32)})
    groups = scales.astype(np.float64).reshape(-1, len(matrix))
    step = groups.repeat(matrix.shape[1] // len(groups), axis=0).T
    if kind == "fp8":  # three bits of mantissa, and steps of 2^-9 below 2^-6
        half = np.maximum(np.abs(matrix) * 2.0**-4, step * FP8_STEP * 2.0**-10)
    else:
        half = step / 2
    in_fp32 = 2 * matrix.shape[1] * 2.0**-24 * (np.abs(x) @ np.abs(matrix).T)
    bound = np.abs(x) @ half.T + in_fp32
    error = np.abs(got - x @ matrix.T)
    assert (error <= bound).all()
    assert error.max() > bound.max() / 100  # it is quantized


def one_product(node: onnx.NodeProto, shape: tuple[int, ...]) -> Segment:
    return make_segment(
        "segment0",
        [node],
        {"x": ("tokens", (shape[1],), "fp16")},
        {"w": shape},
        {"y": ("tokens", (shape[0],), "fp16")},
        dtype="fp16",
    )


def test_what_stays_as_it_is(plain: SegmentedModel) -> None:
    """The head, the table, norms and biases; the number of segments; everything's order."""
    for kind in KINDS:
        model = quantize_products(plain, kind)
        assert len(model.segments) == len(plain.segments) == 3
        names = {name for name, w in model.weights.items() if w.encoding}
        products = len(names) // 2
        assert products == 2 * 4  # q+k+v, o, gate+up, down of both layers
        last = model.segments[calls_of(model)[-1].segment].model.graph.node
        assert sum(node.op_type == "DequantizeLinear" for node in last) == 3
        left = {n: w for n, w in model.weights.items() if len(w.shape) == 2 and not w.encoding}
        assert {w.shape for n, w in left.items()} == {(61, 128), (64, 32)}, left.keys()
        for segment, call in zip(model.segments, calls_of(model), strict=True):
            order = [value.name for value in segment.model.graph.input]
            assert order == [s.name for s in (*segment.activations, *segment.weights)]
            assert len(call.weights) == len(segment.weights)
            onnx.checker.check_model(segment.model, full_check=True)
        sizes = [128 * 384, 128 * 128, 128 * 384, 192 * 128]
        stored = sum(
            np.prod(w.shape) for w in model.weights.values() if w.dtype in ("fp8", "uint8")
        )
        assert stored == 2 * sum(sizes) // (1 if kind == "fp8" else 2)
        assert "not been run" in model.spec.notes[-1] and "8 of" in model.spec.notes[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_check_takes_quantized_segments(kind: str, plain: SegmentedModel) -> None:
    """`--check` hands an engine the bytes, and onnxruntime the same as constants."""
    model = quantize_products(plain, kind)
    seen: set[str] = set()

    def runner(segment: Segment, feeds: Any) -> dict[str, Any]:
        bytes_of = {s.name: feeds[s.name] for s in segment.weights if s.dtype in KINDS}
        assert all(array.itemsize == 1 for array in bytes_of.values())
        seen.update(bytes_of)
        given = {s.name: feeds[s.name] for s in segment.activations}
        given |= {s.name: feeds[s.name] for s in segment.weights if s.dtype not in KINDS}
        outputs = session(widened_model(with_constants(segment, bytes_of))).run(None, given)
        return dict(zip((s.name for s in segment.outputs), outputs, strict=True))

    assert {check.difference for check in check_segments(model, runner)} == {0.0}
    assert seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundle_holds_the_bytes_and_a_loader_finds_their_places(
    kind: str, plain: SegmentedModel, tmp_path: Path
) -> None:
    model = quantize_products(plain, kind)
    path = tmp_path / WEIGHTS_NAME
    entries = embed_weights(list(model.weights.values()), path, lambda text: None)
    span = FileSpan(path=path, offset=0, num_bytes=path.stat().st_size)
    for entry, weight in zip(entries, model.weights.values(), strict=True):
        chunks = file_chunks(entry, {WEIGHTS_NAME: span}, 0x1000)
        assert chunks is not None and [chunk.address for chunk in chunks] == [0x1000]
        content = path.read_bytes()[chunks[0].offset :][: chunks[0].num_bytes]
        assert content == read_weight(weight).tobytes()
        assert not (weight.encoding and can_be_referenced(weight))
    seeds, in_files = split_random(
        [replace(w, parts=(replace(w.parts[0], source="random"),)) for w in model.weights.values()],
        "fp16",
    )
    assert seeds and all(not name.endswith("_scale") for name in seeds)  # a GPU would draw scales
    assert {w.name for w in in_files} >= {w.name for w in model.weights.values() if w.encoding}

    plan = plan_capture(model, CaptureConfig(target="sm_90", max_batch=4, max_seqlen=64))
    engines = {n: engine_of(segment, len(plan.keys)) for n, segment in enumerate(model.segments)}
    launches = render_cuda_model(model, plan, engines).launches
    offsets, total = pack_weights(launches)
    assert total - offsets[-1] >= entries[-1].num_bytes
    for (start, end), entry in zip(itertools.pairwise(offsets), entries, strict=False):
        assert end - start >= entry.num_bytes
    steps = [step for step in launches["steps"] if step["op"] == "engine"]
    for step, call in zip(steps, calls_of(model), strict=True):
        specs = model.segments[call.segment].weights
        for spec, name in zip(specs, call.weights, strict=True):
            place, number = step["tensors"][spec.name]
            assert place == "weight" and launches["weights"][number]["name"] == name


def engine_of(segment: Segment, num_keys: int) -> SegmentEngine:
    """A plan of a segment, with one profile for all keys."""
    model = engine_model(segment, TABLE["tensorrt", 10])
    assert b"DequantizeLinear" in model.model
    return SegmentEngine(
        segment=segment.name,
        plan=f"engines/{segment.name}.plan",
        activations=model.activations,
        weights=model.weights,
        outputs=model.outputs,
        ranges=(RowRange(min_tokens=1, opt_tokens=1, max_tokens=64, max_samples=4),),
        choices=(0,) * num_keys,
        has_kernels=False,
    )


def test_old_readers_get_no_quantized_segment(plain: SegmentedModel) -> None:
    """Guards blocks and types that opset 17 does not know: 8.6 would read something else."""
    segment = quantize_products(plain, "int4").segments[0]
    with pytest.raises(BlinkError, match="need a newer ONNX opset"):
        engine_model(segment, TABLE["tensorrt", 8])


def test_refusals_name_what_works(plain: SegmentedModel) -> None:
    with pytest.raises(BlinkError, match="fp16 or bf16, this one is fp32"):
        quantize_products(tiny_decoder(), "fp8")
    experts = CutOpCall(
        op="MoeExperts", attributes={"layer": 3}, activations=(), weights=(), outputs=()
    )
    with pytest.raises(BlinkError, match="experts of layer 3") as caught:
        quantize_products(replace(plain, calls=(*plain.calls, experts)), "fp8")
    assert "without --quantization" in caught.value.hint


def test_rows_that_no_group_divides_are_named(tmp_path: Path) -> None:
    path = build_op_model(tmp_path / "model.onnx", hidden=32, head_dim=16, fp16=True)
    model = segment_decoder(decoder_graph_from_onnx(path, dtype="fp16", max_seqlen=64))
    with pytest.raises(BlinkError, match="rows of 32; int4"):
        quantize_products(model, "int4")
    assert quantize_products(model, "fp8").segments
