"""Evaluate constants and shape arithmetic: a node whose inputs are known -> the arrays it makes.

A known value is a numpy array. One that holds a number of rows, which only a step knows, is an
array of objects: ints and the symbols "T" (tokens) and "R" (samples).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

TOKENS = "T"
SAMPLES = "R"
ROW_SYMBOLS = (TOKENS, SAMPLES)
Dim = int | str
Shape = tuple[Dim, ...]

_MAX_FOLDED_ELEMENTS = (
    1 << 16
)  # shape arithmetic and rope tables are far below; weights are never known


def array_from_dims(dims: Sequence[Dim]) -> np.ndarray:
    """Pack dimensions into a known value: int64 where all are numbers."""
    if any(isinstance(dim, str) for dim in dims):
        packed = np.empty(len(dims), dtype=object)
        packed[:] = list(dims)
        return packed
    return np.array(dims, dtype=np.int64)


def array_from_constant(node: onnx.NodeProto) -> np.ndarray:
    """Read the value of a Constant node, whichever attribute carries it."""
    attribute = node.attribute[0]
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return np.asarray(onnx.numpy_helper.to_array(value))
    dtype = np.int64 if attribute.name.startswith("value_int") else np.float32
    return np.array(value, dtype=dtype)


def fold_node(
    op: str, attributes: Mapping[str, Any], inputs: Sequence[np.ndarray | None]
) -> list[np.ndarray] | None:
    """Evaluate one node of the standard domain, or return None where that cannot be done.

    Inputs that are absent (optional) are None.
    """
    present = [value for value in inputs if value is not None]
    try:
        if any(value.dtype == object for value in present):
            rule = _SYMBOLIC.get(op)
            return None if rule is None else rule(attributes, inputs)
        return _fold_numbers(op, attributes, inputs)
    except _UnknownError:
        return None


class _UnknownError(Exception):
    """The answer depends on the number of rows."""


def _fold_numbers(
    op: str, attributes: Mapping[str, Any], inputs: Sequence[np.ndarray | None]
) -> list[np.ndarray] | None:
    rule = _SYMBOLIC.get(op)
    if rule is not None:
        outputs = rule(attributes, inputs)
    else:
        names = ["" if value is None else f"i{index}" for index, value in enumerate(inputs)]
        outputs = _evaluate(op, attributes, names, inputs)
    if any(output.size > _MAX_FOLDED_ELEMENTS for output in outputs):
        return None
    return outputs


def _evaluate(
    op: str,
    attributes: Mapping[str, Any],
    names: list[str],
    inputs: Sequence[np.ndarray | None],
) -> list[np.ndarray]:
    """Ask onnx's own reference, which knows every op but takes about a millisecond."""
    node = onnx.helper.make_node(op, names, ["o0"], **dict(attributes))
    infos = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
        for name, value in zip(names, inputs, strict=True)
        if value is not None
    ]
    graph = onnx.helper.make_graph([node], "fold", infos, [onnx.ValueInfoProto(name="o0")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    feeds = {name: value for name, value in zip(names, inputs, strict=True) if name}
    return [np.asarray(output) for output in ReferenceEvaluator(model).run(None, feeds)]


def _ints(value: np.ndarray | None) -> list[int]:
    if value is None:
        return []
    if value.dtype == object:
        raise _UnknownError
    return [int(item) for item in value.reshape(-1)]


def _axes(attributes: Mapping[str, Any], inputs: Sequence[np.ndarray | None]) -> list[int]:
    if len(inputs) > 1 and inputs[1] is not None:
        return _ints(inputs[1])
    return list(attributes.get("axes", ()))


def _unsqueeze(attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
    axes = _axes(attributes, inputs)
    return [np.expand_dims(inputs[0], tuple(axes))]


def _squeeze(attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
    axes = _axes(attributes, inputs)
    return [np.squeeze(inputs[0], tuple(axes) if axes else None)]


def _reshape(attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
    target = _ints(inputs[1])
    if not attributes.get("allowzero", 0):
        target = [inputs[0].shape[i] if dim == 0 else dim for i, dim in enumerate(target)]
    return [inputs[0].reshape(target)]


def _concat(attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
    return [np.concatenate(list(inputs), axis=attributes["axis"])]


def _gather(attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
    if inputs[1].dtype == object:
        raise _UnknownError
    taken = np.take(inputs[0], inputs[1].astype(np.int64), axis=attributes.get("axis", 0))
    if not isinstance(taken, np.ndarray) and inputs[0].dtype == object:
        packed = np.empty((), dtype=object)
        packed[()] = taken
        return [packed]
    return [np.asarray(taken)]


def _slice(_attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
    data, starts, ends = inputs[0], _ints(inputs[1]), _ints(inputs[2])
    axes = _ints(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else range(len(starts))
    steps = _ints(inputs[4]) if len(inputs) > 4 and inputs[4] is not None else [1] * len(starts)
    window = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        window[axis] = slice(start, None if step < 0 and end < -data.shape[axis] else end, step)
    return [data[tuple(window)]]


def _cast(attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
    if inputs[0].dtype == object:
        return [inputs[0]]
    return [inputs[0].astype(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))]


def _expand(_attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
    target = _ints(inputs[1])
    return [np.array(np.broadcast_to(inputs[0], np.broadcast_shapes(inputs[0].shape, target)))]


def _constant_of_shape(attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
    value = attributes.get("value")
    fill = np.zeros(1, np.float32) if value is None else onnx.numpy_helper.to_array(value)
    shape = _ints(inputs[0])
    if np.prod(shape, dtype=np.int64) > _MAX_FOLDED_ELEMENTS:
        raise _UnknownError
    return [np.full(shape, fill.reshape(-1)[0], dtype=fill.dtype)]


def _itemwise(
    function: Callable[..., Any],
) -> Callable[[Mapping[str, Any], Sequence[Any]], list[np.ndarray]]:
    def rule(_attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
        if all(value.dtype != object for value in inputs):
            with np.errstate(all="ignore"):
                arrays = np.broadcast_arrays(*inputs)
                if function is _div and arrays[0].dtype.kind in "iu":
                    return [(np.trunc(arrays[0] / arrays[1])).astype(arrays[0].dtype)]
                return [np.asarray(_NUMPY[function](*inputs))]
        arrays = np.broadcast_arrays(*inputs)
        out = np.empty(arrays[0].shape, dtype=object)
        for index in np.ndindex(out.shape):
            out[index] = function(*(array[index] for array in arrays))
        if all(isinstance(item, bool | np.bool_) for item in out.reshape(-1)):
            return [out.astype(np.bool_)]
        if not any(isinstance(item, str) for item in out.reshape(-1)):
            return [out.astype(np.int64)]
        return [out]

    return rule


def _mul(a: Dim, b: Dim) -> Dim:
    if isinstance(a, str) or isinstance(b, str):
        if 1 in (a, b):
            return b if a == 1 else a
        if 0 in (a, b):
            return 0
        raise _UnknownError
    return a * b


def _add(a: Dim, b: Dim) -> Dim:
    if isinstance(a, str) or isinstance(b, str):
        if 0 in (a, b):
            return b if a == 0 else a
        raise _UnknownError
    return a + b


def _sub(a: Dim, b: Dim) -> Dim:
    if a == b:
        return 0
    if isinstance(a, str) or isinstance(b, str):
        if b == 0:
            return a
        raise _UnknownError
    return a - b


def _div(a: Dim, b: Dim) -> Dim:
    if a == b:
        return 1
    if isinstance(a, str) or isinstance(b, str):
        if b == 1:
            return a
        raise _UnknownError
    return a // b


def _equal(a: Dim, b: Dim) -> bool:
    if isinstance(a, str) != isinstance(b, str):
        number = b if isinstance(a, str) else a
        if isinstance(number, str) or int(number) > 0:
            raise _UnknownError  # there may be just as many rows
        return False
    return a == b


def _where(condition: Any, a: Dim, b: Dim) -> Dim:
    return a if condition else b


_NUMPY: dict[Callable[..., Any], Callable[..., Any]] = {
    _mul: np.multiply,
    _add: np.add,
    _sub: np.subtract,
    _div: np.divide,
    _equal: np.equal,
    _where: np.where,
}

_SYMBOLIC: dict[str, Callable[[Mapping[str, Any], Sequence[Any]], list[np.ndarray]]] = {
    "Identity": lambda _attributes, inputs: [inputs[0]],
    "Cast": _cast,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Concat": _concat,
    "Gather": _gather,
    "Slice": _slice,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Mul": _itemwise(_mul),
    "Add": _itemwise(_add),
    "Sub": _itemwise(_sub),
    "Div": _itemwise(_div),
    "Equal": _itemwise(_equal),
    "Where": _itemwise(_where),
}
