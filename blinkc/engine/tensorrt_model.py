"""Fits a segment to what a TensorRT reads: segment + table column -> ONNX bytes and tensor shapes.

- Integers that cross the segment's edge become 32 bits wide, as the step buffers hold them.
- A node's name says whether it computes in fp32, so that a weakly typed build can hold it there
  without another look at the model.
- Operators are written in the form of opset 17, which every TensorRT from 8.6 on reads: plans can
  be built again by another version without onnx. A model that needs more keeps its opset: one with
  a newer operator, or with quantized weights, whose types and blocks are newer than the operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from blinkc.engine.tensorrt_api import TensorRtTraits
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    import onnx

    from blinkc.surgery.segments import Segment, ValueSpec

FP32_SUFFIX = "@fp32"  # of the names of nodes whose results are fp32
# Since opset 18 these take their axes as an input.
_REDUCTIONS = (
    "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
_OLD_OPSET, _OLD_IR_VERSION = 17, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInput:
    """An input or output of an engine: `rows` is "tokens", "samples" or "" (a weight)."""

    name: str
    rows: str
    shape: tuple[int, ...]  # without the rows
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineModel:
    """What a builder needs of a segment: plain data, no onnx."""

    name: str
    model: bytes
    activations: tuple[EngineInput, ...]
    weights: tuple[EngineInput, ...]
    outputs: tuple[EngineInput, ...]


def engine_model(segment: Segment, traits: TensorRtTraits) -> EngineModel:
    """Fit one segment.

    Raises:
        BlinkError: a node has no form that the reader's opset knows.
    """
    import onnx

    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    _name_nodes(model)
    _narrow_integers(model, segment)
    newer = _newer_nodes(model)
    if newer and traits.max_opset <= _OLD_OPSET:
        raise BlinkError(
            f"segment {segment.name}: nodes {', '.join(newer[:4])} need a newer ONNX opset than "
            f"{traits.max_opset}",
            hint="use --engine cuda, or a newer TensorRT",
        )
    if not newer:
        _write_as_opset_17(model, segment.name)
    return EngineModel(
        name=segment.name,
        model=model.SerializeToString(deterministic=True),
        activations=tuple(_input(value) for value in segment.activations),
        weights=tuple(_input(value) for value in segment.weights),
        outputs=tuple(_input(value) for value in segment.outputs),
    )


def _input(value: ValueSpec) -> EngineInput:
    dtype = "int32" if value.dtype == "int64" else value.dtype
    return EngineInput(name=value.name, rows=value.rows, shape=value.shape, dtype=dtype)


def _name_nodes(model: onnx.ModelProto) -> None:
    """Give every node a name that tells its precision.

    The types are those of the model itself: norms, softmax and routing are fp32 in it wherever the
    checkpoint's own code computes them so.
    """
    types = _value_types(model)
    for number, node in enumerate(model.graph.node):
        is_fp32 = types.get(node.output[0]) == _fp32()
        node.name = f"n{number}_{node.op_type}{FP32_SUFFIX if is_fp32 else ''}"


def _fp32() -> int:
    import onnx

    return int(onnx.TensorProto.FLOAT)


def _value_types(model: onnx.ModelProto) -> dict[str, int]:
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=False)
    graph = inferred.graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    return types


def _narrow_integers(model: onnx.ModelProto, segment: Segment) -> None:
    """Let 64-bit inputs and outputs be 32 bits wide, with a cast inside."""
    import onnx

    wide, narrow = onnx.TensorProto.INT64, onnx.TensorProto.INT32
    graph = model.graph
    names = {value.name for value in (*segment.activations, *segment.outputs)}
    first: list[onnx.NodeProto] = []
    last: list[onnx.NodeProto] = []
    renamed: dict[str, str] = {}
    for value in (*graph.input, *graph.output):
        if value.name not in names or value.type.tensor_type.elem_type != wide:
            continue
        value.type.tensor_type.elem_type = narrow
        inner = renamed[value.name] = f"{value.name}_int64"
        is_input = any(value.name == given.name for given in segment.activations)
        places = (value.name, inner, wide) if is_input else (inner, value.name, narrow)
        source, result, kind = places
        node = onnx.helper.make_node("Cast", [source], [result], name=f"cast_{value.name}", to=kind)
        (first if is_input else last).append(node)
    if not renamed:
        return
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    nodes = [*first, *graph.node, *last]
    copies = [_copied(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    stale = set(renamed)
    kept = [value for value in graph.value_info if value.name not in stale]
    if len(kept) != len(graph.value_info):
        del graph.value_info[:]
        graph.value_info.extend(kept)


def _copied(node: Any) -> Any:
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def _write_as_opset_17(model: onnx.ModelProto, segment: str) -> None:
    """Write operators that changed since opset 17 in their older form."""
    import onnx

    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in _REDUCTIONS and len(node.input) > 1:
            axes = constants.get(node.input[1])
            if axes is None:
                raise BlinkError(
                    f"segment {segment}: node {node.name} reduces over axes that are no constant"
                )
            values = [int(axis) for axis in onnx.numpy_helper.to_array(axes)]
            del node.input[1:]
            kept = [item for item in node.attribute if item.name != "noop_with_empty_axes"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("axes", values)])
        elif node.op_type == "Split":
            kept = [item for item in node.attribute if item.name != "num_outputs"]
            if len(kept) != len(node.attribute):
                del node.attribute[:]
                node.attribute.extend(kept)
    opset = next(item for item in model.opset_import if item.domain == "")
    opset.version = min(opset.version, _OLD_OPSET)
    model.ir_version = min(model.ir_version, _OLD_IR_VERSION)


def _newer_nodes(model: onnx.ModelProto) -> list[str]:
    return [
        node.name
        for node in model.graph.node
        if not node.domain
        and (node.op_type == "DequantizeLinear" or _since_version(node.op_type) > _OLD_OPSET)
    ]


@cache
def _since_version(op_type: str) -> int:
    """Return the opset that introduced an operator."""
    import onnx

    versions = [
        schema.since_version
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.name == op_type and schema.domain == ""
    ]
    return min(versions, default=1)
