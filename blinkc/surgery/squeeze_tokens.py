"""Rewrite the graph so that every activation is `[rows, *inner]`, without shape arithmetic.

One walk in topological order: what can be evaluated is folded away, every other node is emitted
anew on squeezed tensors by the rule of its op (`squeeze_rules.py`). An op that moves or mixes
rows is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import DecoderGraph
from blinkc.surgery.fold_shapes import (
    SAMPLES,
    TOKENS,
    array_from_constant,
    array_from_dims,
    fold_node,
)
from blinkc.surgery.squeeze_context import NodeContext
from blinkc.surgery.squeeze_rules import RULES
from blinkc.surgery.token_graph import Operand, TokenGraph

INPUTS = {"input_ids": TOKENS, "positions": TOKENS, "rows": SAMPLES}


@dataclass(frozen=True, kw_only=True, slots=True)
class SqueezedDecoder:
    """The rewritten graph: `inputs` and `weights` by name, `logits` `[R, V]`."""

    graph: gs.Graph
    inputs: dict[str, gs.Variable]
    weights: dict[str, gs.Variable]
    logits: gs.Variable


def squeeze_tokens(decoder: DecoderGraph) -> SqueezedDecoder:
    """Rewrite the graph of `decoder`.

    Raises:
        BlinkError: a node mixes tokens, or its op has no rule; the message names it.
    """
    proto = decoder.model.graph
    operands: dict[str, Operand] = {}
    inputs: dict[str, gs.Variable] = {}
    weights: dict[str, gs.Variable] = {}
    for value in proto.input:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        if value.name in INPUTS:
            shape: tuple[int | str, ...] = (INPUTS[value.name],)
            inputs[value.name] = gs.Variable(value.name, dtype=dtype, shape=shape)
            tensor = inputs[value.name]
        else:
            shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
            weights[value.name] = gs.Variable(value.name, dtype=dtype, shape=shape)
            tensor = weights[value.name]
        operands[value.name] = Operand(shape=shape, dtype=dtype, tensor=tensor)
    built = TokenGraph({TOKENS: inputs["positions"], SAMPLES: inputs["rows"]})
    for initializer in proto.initializer:
        operands[initializer.name] = _known(onnx.numpy_helper.to_array(initializer))
    for node in proto.node:
        _rewrite(built, node, operands)
    logits = operands[proto.output[0].name]
    if logits.shape[:1] != (SAMPLES,) or len(logits.shape) != 2:
        raise BlinkError(f"logits have shape {list(logits.shape)}, not [rows, vocabulary]")
    tensor = built.tensor_of(logits)
    graph = gs.Graph(
        nodes=built.nodes,
        inputs=[*inputs.values(), *weights.values()],
        outputs=[tensor],
        opset=18,
        import_domains=[onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("blink", 1)],
    )
    graph.cleanup(remove_unused_graph_inputs=False)
    return SqueezedDecoder(graph=graph, inputs=inputs, weights=weights, logits=tensor)


def _known(value: np.ndarray) -> Operand:
    return Operand(shape=value.shape, dtype=value.dtype, value=value)


def _rewrite(built: TokenGraph, node: onnx.NodeProto, operands: dict[str, Operand]) -> None:
    where = describe(node)
    if node.op_type == "Constant":
        operands[node.output[0]] = _known(array_from_constant(node))
        return
    attributes = {a.name: _attribute_value(a) for a in node.attribute}
    inputs = [operands[name] if name else None for name in node.input]
    if node.op_type == "Shape" and inputs[0] is not None:
        dims = inputs[0].shape[attributes.get("start", 0) : attributes.get("end")]
        operands[node.output[0]] = _known(array_from_dims(dims))
        return
    if node.op_type == "Size" and inputs[0] is not None and not inputs[0].has_rows:
        operands[node.output[0]] = _known(
            np.array(math.prod(int(dim) for dim in inputs[0].shape), dtype=np.int64)
        )
        return
    if all(operand is None or operand.value is not None for operand in inputs):
        folded = fold_node(node.op_type, attributes, [o.value if o else None for o in inputs])
        if folded is not None and not node.domain:
            for name, value in zip(node.output, folded, strict=False):
                operands[name] = _known(value)
            return
    rule = RULES.get((node.domain, node.op_type))
    if rule is None:
        raise BlinkError(
            f"{where}: op {node.domain or 'onnx'}::{node.op_type} has no rule in surgery",
            hint="see blinkc/surgery/README.md for the ops that segments may hold",
        )
    try:
        outputs = rule(NodeContext(built, where, attributes, node), inputs)
    except BlinkError as error:
        if where in error.message:
            raise
        raise BlinkError(f"{where}: {error.message}", hint=error.hint) from error
    for name, operand in zip(node.output, outputs, strict=False):
        operands[name] = operand


def _attribute_value(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode() if isinstance(value, bytes) else value


def describe(node: onnx.NodeProto) -> str:
    """Name a node for an error message."""
    return f"node `{node.name or node.output[0]}` ({node.op_type})"
