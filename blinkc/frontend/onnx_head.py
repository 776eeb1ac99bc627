"""The end of an ONNX decoder: find where logits are made, make them for the wanted rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_emit import DecoderEmitter
from blinkc.frontend.onnx_model import OnnxModel, attribute_values, describe_node

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

    from blinkc.frontend.onnx_meaning import MeaningOf

_PRODUCTS = ("MatMul", "Gemm", "MatMulNBits", "FusedMatMul")
_AFTER = ("Cast", "Identity", "Mul", "Div", "Add", "Tanh", "Reshape", "Squeeze", "Unsqueeze")
_VIEWS = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """`hidden` holds a row per token; `product` is the LM head, `after` what follows it, in order.

    `before` are views between the hidden states and the product, dropped when rows are picked.
    """

    hidden: str
    product: onnx.NodeProto
    product_input: str
    after: tuple[onnx.NodeProto, ...]


def find_head(model: OnnxModel, meaning: MeaningOf) -> Head:
    """Walk back from the logits to the product that makes them, and on to a row per token."""
    name = model.logits
    unknown = meaning.probes[0].unknown_data
    after: list[onnx.NodeProto] = []
    for _ in range(32):
        node = model.producer.get(name)
        if node is None:
            break
        data = [i for i in node.input if i in unknown]
        if node.op_type in _PRODUCTS and len(data) == 1 and data[0] == node.input[0]:
            hidden = _all_tokens(model, meaning, data[0])
            return Head(
                hidden=hidden, product=node, product_input=data[0], after=tuple(reversed(after))
            )
        if node.op_type not in _AFTER or len(data) != 1:
            raise BlinkError(
                f"{model.path}: {describe_node(node)} between LM head and logits is not supported"
            )
        after.append(node)
        name = data[0]
    raise BlinkError(
        f"{model.path}: output '{model.logits}' does not come from a product with a weight"
    )


def emit_head(emitter: DecoderEmitter, head: Head) -> gs.Variable:
    """Write row selection, LM head and what follows; returns fp32 logits `[R, V]`."""
    writer, meaning = emitter.writer, emitter.meaning
    width = meaning.shape(head.hidden)[-1]
    flat = writer.reshape(emitter.narrow_operand(head.hidden), [-1, width])
    picked = writer.one("Gather", flat, writer.rows, name="hidden_rows", axis=0)
    emitter.rebind(head.product_input, picked)
    for node in (head.product, *head.after):
        result = node.output[0]
        if node.op_type in ("Reshape", "Squeeze", "Unsqueeze"):
            source = node.input[0]
            if meaning.shape(source)[-1] != meaning.shape(result)[-1]:
                raise emitter.fail(node, "it reshapes the logits' last axis")
            emitter.tensors[result] = emitter.tensors[source]
            continue
        if node in head.after:
            _check_broadcast(emitter, node)
        emitter.tensors[result] = emitter.lower(node)[0]
    logits = emitter.tensors[emitter.model.logits]
    if emitter.mapped_type(emitter.model.logits) != onnx.TensorProto.FLOAT:
        return writer.cast(logits, onnx.TensorProto.FLOAT)
    return writer.one("Identity", logits)


def _check_broadcast(emitter: DecoderEmitter, node: onnx.NodeProto) -> None:
    """Refuse operands of more than the vocabulary axis: they would not fit `[R, V]`."""
    for name in node.input:
        if name and name not in emitter.tensors:
            shape = emitter.meaning.shape(name)
            if len(shape) > 2 or any(dim != 1 for dim in shape[:-1]):
                raise emitter.fail(
                    node, f"its operand '{name}' {list(shape)} is not one per vocabulary entry"
                )


def _all_tokens(model: OnnxModel, meaning: MeaningOf, name: str) -> str:
    """Return the tensor with a row per token: the one before the last token was picked."""
    for _ in range(8):
        if meaning.token_axis(name) is not None:
            return name
        node = model.producer.get(name)
        if node is None:
            break
        if node.op_type in ("Slice", "Gather"):
            axis = meaning.token_axis(node.input[0])
            if axis is not None and _picks_last(meaning, node, axis):
                return str(node.input[0])
            break
        if node.op_type not in _VIEWS:
            break
        name = node.input[0]
    raise BlinkError(
        f"{model.path}: the LM head's input '{name}' is neither one row per token nor the last "
        "token's"
    )


def _picks_last(meaning: MeaningOf, node: onnx.NodeProto, axis: int) -> bool:
    """Does the node keep exactly the last token at every size?"""
    for probe in meaning.probes:
        if node.op_type == "Gather":
            index = probe.value(node.input[1])
            rank = len(probe.shapes[node.input[0]])
            gather_axis = int(str(attribute_values(node).get("axis", 0))) % rank
            if index is None or index.size != 1 or gather_axis != axis:
                return False
            if int(index.ravel()[0]) not in (-1, probe.seq - 1):
                return False
            continue
        starts = probe.value(node.input[1])
        axes = probe.value(node.input[3]) if len(node.input) > 3 else None
        if (
            starts is None
            or starts.size != 1
            or (axes is not None and int(axes.ravel()[0]) != axis)
        ):
            return False
        if int(starts.ravel()[0]) not in (-1, probe.seq - 1):
            return False
        if probe.shapes[node.output[0]][axis] != 1:
            return False
    return True
