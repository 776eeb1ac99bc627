"""Evaluate an ONNX decoder at one size: new and past tokens -> shapes, and values on demand.

A probe fixes batch 1, `seq` new and `past` cached tokens, an attention mask of ones and positions
`past .. past + seq - 1`. Whatever depends on those alone (shape arithmetic, masks, position ids,
rotary tables) then has a value; what depends on token ids or cached data has only a shape.
Comparing probes of different sizes tells what a value means, however the exporter spelled it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_model import ONNX_DOMAINS, OnnxModel, describe_node
from blinkc.frontend.onnx_shapes import contrib_shapes

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx

    Array = npt.NDArray[Any]

_MAX_ELEMENTS = 1 << 27  # no value larger than this is made
_OPEN_SIZE = 7919  # stands for a head size not known yet; fits nothing by chance
_SHAPE_ELEMENTS = 64  # inputs up to this size are handed to shape inference


class Probe:
    """Shapes and values of one size.

    `shapes` and `types` hold every tensor whose shape could be inferred; `unknown_data` the names
    that depend on token ids or on cached keys and values.
    """

    def __init__(self, model: OnnxModel, *, seq: int, past: int) -> None:
        self.model = model
        self.seq = seq
        self.past = past
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, int] = {}
        self.unknown_data = _data_names(model)
        self._values: dict[str, Array | None] = {}
        self._feed_inputs()
        for name, tensor in model.initializers.items():
            self.shapes[name] = tuple(tensor.dims)
            self.types[name] = tensor.data_type
        for node in model.nodes:
            self._infer(node)

    @property
    def total(self) -> int:
        """Tokens seen by attention: past and new."""
        return self.seq + self.past

    def value(self, name: str) -> Array | None:
        """Return the tensor's value at this size, or None when it depends on data (or is huge)."""
        if name in self.unknown_data:
            return None
        return self._evaluate(name, self._values, {})

    def run_region(self, output: str, feeds: Mapping[str, Array]) -> Array | None:
        """Compute `output` from `feeds`, which stand for tensors that depend on data."""
        return self._evaluate(output, dict(feeds), feeds)

    def _feed_inputs(self) -> None:
        model = self.model
        for name, info in model.inputs.items():
            dims = info.type.tensor_type.shape.dim
            self.types[name] = info.type.tensor_type.elem_type
            if name in model.past:
                self.shapes[name] = _kv_shape(model, name, self.past)
            elif name in model.fixed:
                self.shapes[name] = (1,) * len(dims)
                self._values[name] = np.full(self.shapes[name], model.fixed[name])
            else:
                length = self.total if name == model.attention_mask else self.seq
                self.shapes[name] = _token_shape(model, name, length)
        if model.attention_mask:
            name = model.attention_mask
            self._values[name] = np.ones(self.shapes[name], dtype=_numpy_type(self.types[name]))
        if model.position_ids:
            name = model.position_ids
            positions = np.arange(self.past, self.total).reshape(self.shapes[name])
            self._values[name] = positions.astype(_numpy_type(self.types[name]))

    def _infer(self, node: onnx.NodeProto) -> None:
        """Fill in shapes and types of the node's outputs."""
        import onnx

        self._close_sizes(node)
        shapes = contrib_shapes(node, self.shapes, self.types, self.past)
        if shapes is not None:
            for name, (shape, element_type) in shapes.items():
                self.shapes[name] = shape
                self.types[name] = element_type
            return
        if node.domain not in ONNX_DOMAINS or node.op_type in ("If", "Loop", "Scan"):
            raise BlinkError(
                f"{self.model.path}: {describe_node(node)}: this op is not supported",
                hint="export the model with standard or com.microsoft ops",
            )
        types = {}
        data = {}
        for name in node.input:
            if not name or name not in self.types:
                continue
            dims = self.shapes.get(name)
            types[name] = onnx.helper.make_tensor_type_proto(self.types[name], dims)
            if dims is not None and math.prod(dims) <= _SHAPE_ELEMENTS:
                value = self.value(name)
                if value is not None:
                    data[name] = onnx.numpy_helper.from_array(np.asarray(value, order="C"), name)
        try:
            schema = onnx.defs.get_schema(node.op_type, self.model.opset, "")
            inferred = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                types,
                data,
                opset_imports=[onnx.helper.make_opsetid("", self.model.opset)],
                ir_version=10,
            )
        except Exception as error:  # the reason goes into our own error
            raise BlinkError(
                f"{self.model.path}: {describe_node(node)} does not fit its inputs with "
                f"{self.seq} new "
                f"and {self.past} past tokens: {error}",
                hint="onnxruntime must load the file; batch, sequence and past must be dynamic",
            ) from error
        for name, proto in inferred.items():
            tensor_type = proto.tensor_type
            self.types[name] = tensor_type.elem_type
            dims = tensor_type.shape.dim
            if tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims):
                self.shapes[name] = tuple(d.dim_value for d in dims)
        for name in node.output:
            if name and name not in self.shapes:
                value = self.value(name)
                if value is not None:
                    self.shapes[name] = value.shape

    def _close_sizes(self, node: onnx.NodeProto) -> None:
        """Take the open sizes of a KV input from the new keys or values it is joined with."""
        if node.op_type != "Concat":
            return
        for name in node.input:
            shape = self.shapes.get(name, ())
            if name not in self.model.past or _OPEN_SIZE not in shape:
                continue
            others = [self.shapes[n] for n in node.input if n != name and n in self.shapes]
            if len(others) == 1 and len(others[0]) == len(shape):
                pairs = zip(shape, others[0], strict=True)
                self.shapes[name] = tuple(o if s == _OPEN_SIZE else s for s, o in pairs)

    def _evaluate(
        self, name: str, values: dict[str, Array | None], feeds: Mapping[str, Array]
    ) -> Array | None:
        """Evaluate `name` and what it needs, depth first without recursion."""
        stack = [name]
        while stack:
            current = stack[-1]
            if current in values:
                stack.pop()
                continue
            if feeds and current not in self.unknown_data:
                values[current] = self.value(current)
                stack.pop()
                continue
            node = self.model.producer.get(current)
            if node is None:
                values[current] = self._leaf(current)
                stack.pop()
                continue
            missing = [i for i in node.input if i and i not in values]
            blocked = not feeds and any(i in self.unknown_data for i in node.input)
            if node.op_type != "Shape" and missing and not blocked:
                stack.extend(missing)
                continue
            results = None if blocked and node.op_type != "Shape" else self._run(node, values)
            for index, output in enumerate(node.output):
                if output:
                    values[output] = None if results is None else results[index]
        return values[name]

    def _leaf(self, name: str) -> Array | None:
        tensor = self.model.initializers.get(name)
        if tensor is None or math.prod(tensor.dims) > _MAX_ELEMENTS:
            return None
        from blinkc.frontend.onnx_weights import tensor_array

        return tensor_array(tensor, self.model.path)

    def _run(self, node: onnx.NodeProto, values: Mapping[str, Array | None]) -> list[Array] | None:
        """Run one node on numpy values; None when an input has none or the op cannot be run."""
        if node.op_type == "Shape" and node.domain in ONNX_DOMAINS:
            shape = self.shapes.get(node.input[0])
            if shape is None:
                return None
            bounds = {a.name: a.i for a in node.attribute}
            return [np.array(shape[bounds.get("start", 0) : bounds.get("end")], dtype=np.int64)]
        if node.domain not in ONNX_DOMAINS and node.op_type != "MultiHeadAttention":
            return None
        inputs = [values[name] if name else None for name in node.input]
        if any(value is None for value, name in zip(inputs, node.input, strict=True) if name):
            return None
        sizes = [math.prod(self.shapes[name]) for name in node.output if name in self.shapes]
        if any(size > _MAX_ELEMENTS for size in sizes):
            return None
        if node.op_type == "MultiHeadAttention":
            from blinkc.frontend.onnx_attention_ops import run_multi_head

            return run_multi_head(node, inputs)
        return _run_reference(node, inputs, self.model.opset)


def _run_reference(
    node: onnx.NodeProto, inputs: list[Array | None], opset: int
) -> list[Array] | None:
    """Run one standard op with onnx's own reference implementation."""
    import onnx
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.ops import load_op

    parameters: dict[str, Any] = {
        "log": lambda *_: None,
        "opsets": {"": opset},
        "verbose": 0,
        "new_ops": None,
        "existing_functions": {},
        "evaluator_cls": ReferenceEvaluator,
    }
    if node.op_type in ("If", "Loop", "Scan"):
        return None
    try:
        op_class = load_op("", node.op_type, opset, evaluator_cls=ReferenceEvaluator)
    except (NotImplementedError, onnx.reference.op_run.RuntimeContextError):
        return None
    try:
        with np.errstate(all="ignore"):
            results = op_class(node, parameters).run(*inputs)
    except (IndexError, ValueError, TypeError, NotImplementedError, RuntimeError):
        return None  # a value that cannot be made is not known; whoever needs it says so
    return [np.asarray(result) for result in results]


def _data_names(model: OnnxModel) -> set[str]:
    """Return all names that depend on token ids or KV data (through anything but `Shape`)."""
    names = {model.input_ids, *model.past}
    for node in model.nodes:
        if node.op_type != "Shape" and any(name in names for name in node.input):
            names.update(name for name in node.output if name)
    return names


def _numpy_type(element_type: int) -> Any:
    import onnx

    return onnx.helper.tensor_dtype_to_np_dtype(element_type)


def _token_shape(model: OnnxModel, name: str, length: int) -> tuple[int, ...]:
    dims = model.inputs[name].type.tensor_type.shape.dim
    fixed = [d.dim_value for d in dims if d.HasField("dim_value")]
    if len(dims) not in (1, 2) or (fixed and (len(dims) == 1 or fixed[0] != 1 or len(fixed) > 1)):
        raise BlinkError(
            f"{model.path}: input '{name}' has the fixed shape "
            f"{[d.dim_param or d.dim_value for d in dims]}",
            hint="export with dynamic batch and sequence axes",
        )
    return (length,) if len(dims) == 1 else (1, length)


def _kv_shape(model: OnnxModel, name: str, past: int) -> tuple[int, ...]:
    """Return the KV input's shape: batch 1, one axis of past tokens, the others fixed.

    Newer builders leave the head size open too: it becomes `_OPEN_SIZE` until its reader tells.
    """
    dims = model.inputs[name].type.tensor_type.shape.dim
    dynamic = [axis for axis, d in enumerate(dims) if axis > 0 and not d.HasField("dim_value")]
    if len(dynamic) > 1:
        dynamic = [a for a in dynamic if re.search(r"past|seq|len", dims[a].dim_param)]
    batch_ok = not dims[0].HasField("dim_value") or dims[0].dim_value == 1
    if len(dynamic) != 1 or not batch_ok:
        raise BlinkError(
            f"{model.path}: KV input '{name}' has shape "
            f"{[d.dim_param or d.dim_value for d in dims]}; batch and past length must be dynamic, "
            "heads and head size fixed",
            hint="export with dynamic batch and past axes",
        )
    sizes = [d.dim_value if d.HasField("dim_value") else _OPEN_SIZE for d in dims]
    sizes[0], sizes[dynamic[0]] = 1, past
    return tuple(sizes)
