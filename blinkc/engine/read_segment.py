"""ONNX segment -> lazy tensors of its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from blinkc.engine import lower_ops, lower_views
from blinkc.engine.node_reader import NodeReader, constant_from_proto, fold
from blinkc.engine.program import Value, Weight
from blinkc.engine.tensors import Dim, Tensor

if TYPE_CHECKING:
    from blinkc.surgery.segments import Segment, ValueSpec

DOMAINS = ("", "ai.onnx", "com.microsoft", "pkg.onnxscript.torch_lib")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentTensors:
    """A segment's boundary and the tensors of its outputs, in order."""

    inputs: tuple[Value, ...]
    weights: tuple[Weight, ...]
    outputs: tuple[Value, ...]
    results: tuple[Tensor, ...]


def read_segment(segment: Segment) -> SegmentTensors:
    """Read a segment's model; BlinkError names the node that cannot be lowered."""
    graph = segment.model.graph
    known: dict[str, Tensor] = {i.name: constant_from_proto(i) for i in graph.initializer}
    for spec in segment.activations:
        known[spec.name] = _source(spec)
    for spec in segment.weights:
        known[spec.name] = Tensor(spec.name, tuple(spec.shape), storage(spec.dtype), "source")
    opset = next(o.version for o in segment.model.opset_import if o.domain in ("", "ai.onnx"))
    for node in graph.node:
        operands = tuple(known[name] if name else None for name in node.input)
        reader = NodeReader(node, operands, opset)
        results = _read_node(reader)
        for name, tensor in zip(node.output, results, strict=False):
            if name:
                tensor.name = tensor.name or name
                known[name] = tensor
    return SegmentTensors(
        inputs=tuple(_value(spec) for spec in segment.activations),
        weights=tuple(
            Weight(name=w.name, shape=w.shape, dtype=storage(w.dtype)) for w in segment.weights
        ),
        outputs=tuple(_value(spec) for spec in segment.outputs),
        results=tuple(known[spec.name] for spec in segment.outputs),
    )


def _read_node(reader: NodeReader) -> list[Tensor]:
    folded = fold(reader)
    if folded is not None:
        return folded
    op = reader.node.op_type
    handler = lower_ops.HANDLERS.get(op) or lower_views.HANDLERS.get(op)
    if handler is None or reader.node.domain not in DOMAINS:
        raise reader.fail(
            "this operator is not supported in a segment",
            "decompose it into standard operators, or choose another --engine",
        )
    return list(handler(reader))


def storage(dtype: str) -> str:
    """Return the Program's type for a ValueSpec's: every integer is int32."""
    return "int32" if dtype.startswith(("int", "uint")) else dtype


def _source(spec: ValueSpec) -> Tensor:
    shape: tuple[Dim, ...] = (spec.rows, *spec.shape)
    return Tensor(spec.name, shape, storage(spec.dtype), "source")


def _value(spec: ValueSpec) -> Value:
    size = prod(spec.shape)
    return Value(name=spec.name, rows=spec.rows, size=size, dtype=storage(spec.dtype))
