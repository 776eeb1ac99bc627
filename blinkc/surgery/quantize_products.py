"""Have products read quantized weights: segments -> the same, with values and scales as inputs.

A product `Gemm(x, w)` of the model's type becomes

    fp8   Mul(Gemm(x, DequantizeLinear(w, 2^-9)), scale)      one scale for each output
    int4  Gemm(x, DequantizeLinear(w, scale, block_size))     one scale for each group of inputs

and weight `w` `[N, K]` two weights, values `[K, N]` and scales. The product that makes the logits
stays as it is, as do embedding tables, norms and biases: they are few bytes of a step, or matter
most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightEncoding, WeightRef
from blinkc.frontend.quantize_weights import FP8_STEP, group_size
from blinkc.frontend.weights import NUMPY_DTYPES
from blinkc.surgery.segments import CutOpCall, Segment, SegmentCall, SegmentedModel, ValueSpec

OPSET, IR_VERSION = 21, 10  # the first with 4-bit types and blocks
_ELEMENTS = {
    "fp8": onnx.TensorProto.FLOAT8E4M3FN,
    "int4": onnx.TensorProto.INT4,
    "fp16": onnx.TensorProto.FLOAT16,
    "bf16": onnx.TensorProto.BFLOAT16,
}


def quantize_products(model: SegmentedModel, kind: str) -> SegmentedModel:
    """Quantize every product with a weight of the model's type, but those of the logits.

    Args:
        kind: "fp8" or "int4".

    Raises:
        BlinkError: the model has experts, is fp32, or a weight's rows do not divide into groups.
    """
    _check(model, kind)
    weights = dict(model.weights)
    calls: list[SegmentCall | CutOpCall] = list(model.calls)
    segments = []
    for number, segment in enumerate(model.segments):
        uses = [
            i for i, c in enumerate(calls) if isinstance(c, SegmentCall) and c.segment == number
        ]
        names = calls[uses[0]].weights
        products = _products(segment, model.spec.dtype, _logits_of(segment, calls[uses[0]].outputs))
        groups = {
            w: group_size(kind, segment.weights[w].shape[1], names[w]) for w in products.values()
        }
        segments.append(_quantized(segment, products, kind, groups) if products else segment)
        for index in uses:
            call = calls[index]
            assert isinstance(call, SegmentCall)
            calls[index] = _quantized_call(call, groups, kind, weights, model.spec.dtype)
    used = {name for call in calls for name in call.weights}
    return replace(
        model,
        spec=replace(model.spec, notes=(*model.spec.notes, _note(model, weights, used, kind))),
        segments=tuple(segments),
        calls=tuple(calls),
        weights={name: reference for name, reference in weights.items() if name in used},
    )


def _check(model: SegmentedModel, kind: str) -> None:
    if model.spec.dtype not in ("fp16", "bf16"):
        raise BlinkError(
            f"--quantization {kind} is for models in fp16 or bf16, this one is {model.spec.dtype}",
            hint="leave --dtype out, or --quantization",
        )
    experts = next(
        (c for c in model.calls if isinstance(c, CutOpCall) and c.op == "MoeExperts"), None
    )
    if experts is not None:
        raise BlinkError(
            f"--quantization {kind}: the experts of layer {experts.attributes['layer']} run on "
            f"this project's kernels, which take {model.spec.dtype} weights",
            hint="compile mixtures of experts without --quantization; dense models take it",
        )


def _logits_of(segment: Segment, outputs: Sequence[str]) -> str:
    """Return the segment's name of the logits; empty where it makes none."""
    return next(
        (
            spec.name
            for spec, name in zip(segment.outputs, outputs, strict=True)
            if name == "logits"
        ),
        "",
    )


def _products(segment: Segment, dtype: str, logits: str) -> dict[int, int]:
    """Return node number -> weight number of the products to quantize."""
    numbers = {spec.name: number for number, spec in enumerate(segment.weights)}
    nodes = segment.model.graph.node
    readers = [name for node in nodes for name in node.input]
    heads = _last_products(nodes, logits)
    found = {}
    for number, node in enumerate(nodes):
        if node.op_type != "Gemm" or node.input[1] not in numbers or number in heads:
            continue
        spec = segment.weights[numbers[node.input[1]]]
        is_transposed = any(a.name == "transB" and a.i == 1 for a in node.attribute)
        if is_transposed and spec.dtype == dtype and readers.count(node.input[1]) == 1:
            found[number] = numbers[node.input[1]]
    return found


def _last_products(nodes: Sequence[onnx.NodeProto], output: str) -> set[int]:
    """Return the products that an output is made of without another product in between."""
    makers = {name: number for number, node in enumerate(nodes) for name in node.output}
    found, waiting, seen = set(), [output], set()
    while waiting:
        number = makers.get(waiting.pop())
        if number is None or number in seen:
            continue
        seen.add(number)
        if nodes[number].op_type == "Gemm":
            found.add(number)
        else:
            waiting.extend(nodes[number].input)
    return found


def _quantized(
    segment: Segment, products: dict[int, int], kind: str, groups: dict[int, int]
) -> Segment:
    """Write a segment anew with values and scales instead of its products' weights."""
    dtype = segment.weights[next(iter(groups))].dtype
    writer = _Writer(kind=kind, dtype=dtype)
    model = _copied(segment.model)
    graph = model.graph
    specs: list[ValueSpec] = []
    inputs = [_copied(value) for value in graph.input[: len(segment.activations)]]
    for number, spec in enumerate(segment.weights):
        value = graph.input[len(segment.activations) + number]
        if number not in groups:
            specs.append(spec)
            inputs.append(_copied(value))
            continue
        pair = _pair(spec, kind, groups[number])
        specs += pair
        for item, element in zip(pair, (_ELEMENTS[kind], _ELEMENTS[dtype]), strict=True):
            inputs.append(onnx.helper.make_tensor_value_info(item.name, element, item.shape))
    nodes: list[onnx.NodeProto] = []
    for number, node in enumerate(graph.node):
        is_quantized = number in products
        nodes += writer.product(node, groups[products[number]]) if is_quantized else [_copied(node)]
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.input[:]
    graph.input.extend(inputs)
    graph.initializer.extend(writer.constants)
    next(item for item in model.opset_import if item.domain == "").version = OPSET
    model.ir_version = IR_VERSION
    digest = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    return replace(segment, model=model, weights=tuple(specs), digest=digest)


def _pair(spec: ValueSpec, kind: str, group: int) -> list[ValueSpec]:
    num_outputs, num_inputs = spec.shape
    values = replace(spec, dtype=kind, shape=(num_inputs, num_outputs))
    shape = _scale_shape(spec.shape, kind, group)
    return [values, replace(spec, name=f"{spec.name}_scale", shape=shape)]


def _scale_shape(shape: tuple[int, ...], kind: str, group: int) -> tuple[int, ...]:
    num_outputs, num_inputs = shape
    return (num_outputs,) if kind == "fp8" else (num_inputs // group, num_outputs)


@dataclass(kw_only=True, slots=True)
class _Writer:
    """Writes products of a kind; `dtype` is the model's."""

    kind: str
    dtype: str

    @property
    def constants(self) -> list[onnx.TensorProto]:
        """Return the constants that the written nodes read."""
        if self.kind != "fp8":
            return []
        step = np.array(FP8_STEP, dtype=NUMPY_DTYPES[self.dtype])
        element = _ELEMENTS[self.dtype]
        return [onnx.helper.make_tensor("fp8_step", element, (), step.tobytes(), raw=True)]

    def product(self, node: onnx.NodeProto, group: int) -> list[onnx.NodeProto]:
        """Return the nodes that stand for a product."""
        make, out = onnx.helper.make_node, node.output[0]
        x, weight, *bias = node.input
        scale, wide = f"{weight}_scale", f"{weight}_wide"
        if self.kind == "int4":
            blocks = {"axis": 0, "block_size": group}
            return [
                make("DequantizeLinear", [weight, scale], [wide], name=f"wide_{weight}", **blocks),
                make("Gemm", [x, wide, *bias], [out], name=node.name),
            ]
        product, scaled = f"{out}_product", f"{out}_scaled" if bias else out
        nodes = [
            make("DequantizeLinear", [weight, "fp8_step"], [wide], name=f"wide_{weight}"),
            make("Gemm", [x, wide], [product], name=node.name),
            make("Mul", [product, scale], [scaled], name=f"scale_{weight}"),
        ]
        if bias:
            nodes.append(make("Add", [scaled, *bias], [out], name=f"bias_{weight}"))
        return nodes


def _copied(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _quantized_call(
    call: SegmentCall, groups: dict[int, int], kind: str, weights: dict[str, WeightRef], dtype: str
) -> SegmentCall:
    """Return a call with values and scales in its weights' places; enter them in `weights`."""
    names: list[str] = []
    for number, name in enumerate(call.weights):
        if number not in groups:
            names.append(name)
            continue
        for reference in _quantized_weights(weights[name], kind, groups[number], dtype):
            weights[reference.name] = reference
            names.append(reference.name)
    return replace(call, weights=tuple(names))


def _quantized_weights(weight: WeightRef, kind: str, group: int, dtype: str) -> list[WeightRef]:
    num_outputs, num_inputs = weight.shape
    encoding = WeightEncoding(
        kind=kind, part="values", num_columns=num_inputs, group=group, scale_dtype=dtype
    )
    # Two values of 4 bits are one byte.
    shape = (num_inputs, num_outputs) if kind == "fp8" else (num_inputs * num_outputs // 2,)
    values = replace(
        weight,
        name=f"{weight.name}.{kind}",
        shape=shape,
        dtype="fp8" if kind == "fp8" else "uint8",
        encoding=encoding,
    )
    scales = replace(
        weight,
        name=f"{weight.name}.{kind}_scale",
        shape=_scale_shape(weight.shape, kind, group),
        encoding=replace(encoding, part="scales"),
    )
    return [values, scales]


def _note(model: SegmentedModel, weights: dict[str, WeightRef], used: set[str], kind: str) -> str:
    quantized = [w for name, w in weights.items() if name in used and w.encoding]
    matrices = [w for w in model.weights.values() if len(w.shape) == 2]
    return (
        f"{kind} weights in {len(quantized) // 2} of {len(matrices)} matrices, rounded to nearest; "
        "quantized bundles have not been run on a GPU"
    )
