"""One ONNX node as the lowering sees it: operand tensors, attributes, known constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from blinkc.engine import tensors as t
from blinkc.engine.tensors import Dim, Tensor, fail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blinkc.errors import BlinkError

DTYPES = {
    TensorProto.FLOAT: "fp32",
    TensorProto.DOUBLE: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.BOOL: "bool",
    TensorProto.INT64: "int32",
    TensorProto.INT32: "int32",
    TensorProto.INT16: "int32",
    TensorProto.INT8: "int32",
    TensorProto.UINT8: "int32",
    TensorProto.UINT16: "int32",
    TensorProto.UINT32: "int32",
}


def dtype_of(elem_type: int, node: str) -> str:
    """Map an ONNX element type to one of the Program's."""
    if elem_type not in DTYPES:
        name = TensorProto.DataType.Name(elem_type)
        raise fail(node, f"element type {name} is not supported", "convert it to a float type")
    return DTYPES[elem_type]


@dataclass(slots=True)
class NodeReader:
    """A node, its operand tensors (None where left out) and the opset it is read in."""

    node: onnx.NodeProto
    operands: tuple[Tensor | None, ...]
    opset: int

    @property
    def label(self) -> str:
        """Name the node for messages: its name, operator and first output."""
        op = f"{self.node.domain}::{self.node.op_type}" if self.node.domain else self.node.op_type
        return f"node {self.node.name or self.node.output[0]!r} ({op})"

    def fail(self, message: str, hint: str = "") -> BlinkError:
        """Make an error that names this node."""
        return fail(self.label, message, hint)

    def has(self, index: int) -> bool:
        """Say whether operand `index` is given."""
        return index < len(self.operands) and self.operands[index] is not None

    def operand(self, index: int) -> Tensor:
        """Return operand `index`, which must be there."""
        value = self.operands[index] if index < len(self.operands) else None
        if value is None:
            raise self.fail(f"operand {index} is missing")
        return value

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute's value, or `default`."""
        for attribute in self.node.attribute:
            if attribute.name == name:
                return helper.get_attribute_value(attribute)
        return default

    def values(self, index: int) -> list[Dim]:
        """Return operand `index` as a list of known integers or row dimensions."""
        array = self.operand(index).array
        if array is None:
            raise self.fail(
                f"operand {index} ({self.node.input[index]!r}) is not known at compile time",
                "fold the model's shape arithmetic before lowering",
            )
        return [v if isinstance(v, str) else int(v) for v in np.asarray(array).reshape(-1)]

    def integers(self, index: int) -> list[int]:
        """Return operand `index` as a list of known integers."""
        values = self.values(index)
        if any(isinstance(v, str) for v in values):
            raise self.fail(f"operand {index} depends on the number of tokens")
        return [int(v) for v in values]

    def axes(self, index: int) -> list[int] | None:
        """Return axes given as operand `index` (newer opsets) or as an attribute, or None."""
        if self.has(index):
            return self.integers(index)
        given = self.attribute("axes")
        return None if given is None else [int(a) for a in given]

    def axis(self, value: int, rank: int) -> int:
        """Normalize an axis, which may be negative."""
        if not -rank <= value < rank:
            raise self.fail(f"axis {value} is outside a tensor of rank {rank}")
        return value % rank


def fold(reader: NodeReader) -> list[Tensor] | None:
    """Evaluate a node whose operands are all known; None when they are not."""
    if not reader.operands and reader.node.op_type != "Constant":
        return None
    arrays: list[np.ndarray | None] = []
    for operand in reader.operands:
        if operand is not None and operand.array is None:
            return None
        arrays.append(None if operand is None else operand.array)
    if any(a is not None and a.dtype == object for a in arrays):
        return _fold_symbolic(reader, [a for a in arrays if a is not None])
    node = onnx.NodeProto()
    node.CopyFrom(reader.node)
    opsets = [helper.make_opsetid("", reader.opset)]
    if reader.node.domain not in ("", "ai.onnx"):
        return None
    inputs, feeds = [], {}
    for name, array in zip(node.input, arrays, strict=False):
        if array is not None and name not in feeds:
            elem = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(helper.make_tensor_value_info(name, elem, array.shape))
            feeds[name] = array
    outputs = [onnx.ValueInfoProto(name=o) for o in node.output if o]
    graph = helper.make_graph([node], "fold", inputs, outputs)
    model = helper.make_model(graph, opset_imports=opsets)
    return [t.constant(np.asarray(a)) for a in ReferenceEvaluator(model).run(None, feeds)]


def _fold_symbolic(reader: NodeReader, arrays: Sequence[np.ndarray]) -> list[Tensor] | None:
    """Evaluate shape arithmetic in which a row dimension appears."""
    op = reader.node.op_type
    first = arrays[0]
    result: Any
    if op in ("Cast", "Identity", "CastLike"):
        result = first
    elif op == "Gather":
        result = np.take(first, arrays[1].astype(np.int64), axis=reader.attribute("axis", 0))
    elif op == "Concat":
        result = np.concatenate([np.asarray(a, dtype=object) for a in arrays])
    elif op in ("Unsqueeze", "Squeeze", "Reshape", "Flatten"):
        scalar = op == "Squeeze" and first.size == 1
        result = first.reshape(()) if scalar else first.reshape(-1)
    elif op == "Slice":
        begin, end = reader.integers(1)[0], reader.integers(2)[0]
        step = reader.integers(4)[0] if reader.has(4) else 1
        result = first[begin:end:step]
    elif op in ("Mul", "Div") and _is_one(arrays[1]):
        result = first
    elif op == "Mul" and _is_one(first):
        result = arrays[1]
    elif op == "Equal":
        left, right = np.broadcast_arrays(first, arrays[1])
        pairs = zip(left.reshape(-1), right.reshape(-1), strict=True)
        result = np.array([a == b for a, b in pairs]).reshape(left.shape)
    elif op == "Where" and arrays[0].dtype != object:
        result = np.where(arrays[0].astype(bool), arrays[1], arrays[2])
    else:
        return None
    return [t.constant(result if isinstance(result, np.ndarray) else np.array(result, object))]


def _is_one(array: np.ndarray) -> bool:
    return array.dtype != object and bool(np.all(array == 1))


def constant_from_proto(proto: TensorProto) -> Tensor:
    """Wrap an initializer."""
    tensor = t.constant(numpy_helper.to_array(proto), proto.name)
    tensor.dtype = dtype_of(proto.data_type, f"initializer {proto.name!r}")
    return tensor
