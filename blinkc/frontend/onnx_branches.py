"""Decide `If` nodes at compile time: a condition on lengths is fixed for the longest sequence.

Exports switch between rotary tables by length (`max_seqlen > original`), and optimum's merged
decoders between "with past" and "without": the branch taken is copied in place.
"""

from __future__ import annotations

import onnx

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_model import (
    ONNX_DOMAINS,
    OnnxModel,
    attribute_values,
    describe_node,
)
from blinkc.frontend.onnx_probe import Probe

_MAX_BRANCHES = 64


def inline_branches(model: OnnxModel, limit: int) -> None:
    """Replace every `If` of the top graph; conditions that depend on data are refused."""
    for _ in range(_MAX_BRANCHES):
        node = next((node for node in model.nodes if node.op_type == "If"), None)
        if node is None:
            return
        _inline(model, node, _decide(model, node, limit))
    raise BlinkError(f"{model.path}: more than {_MAX_BRANCHES} If nodes")


def hoist_constants(model: OnnxModel) -> None:
    """Turn `Constant` nodes that hold a tensor into initializers."""
    kept = []
    for node in model.nodes:
        value = attribute_values(node).get("value") if node.op_type == "Constant" else None
        if isinstance(value, onnx.TensorProto):
            value.name = node.output[0]
            model.initializers[value.name] = value
            model.hoisted.add(value.name)
        else:
            kept.append(node)
    model.nodes = kept
    model.index()


def skip_identities(model: OnnxModel) -> None:
    """Let every node read past `Identity` nodes, so that a shared weight is seen as one."""
    source: dict[str, str] = {}
    for node in model.nodes:
        for index, name in enumerate(node.input):
            if name in source:
                node.input[index] = source[name]
        if node.op_type == "Identity" and node.domain in ONNX_DOMAINS:
            source[node.output[0]] = node.input[0]
    model.index()


def _decide(model: OnnxModel, node: onnx.NodeProto, limit: int) -> bool:
    """Evaluate the condition at a short and at the longest length; the longest counts."""
    before = model.nodes[: model.nodes.index(node)]
    partial = OnnxModel(
        path=model.path,
        opset=model.opset,
        nodes=before,
        initializers=model.initializers,
        inputs=model.inputs,
        output_names=[],
        input_ids=model.input_ids,
        attention_mask=model.attention_mask,
        position_ids=model.position_ids,
        past=model.past,
        fixed=model.fixed,
    )
    partial.index()
    values = []
    for seq, past in ((7, 0), (3, limit - 3)):
        value = Probe(partial, seq=seq, past=past).value(node.input[0])
        if value is None or value.size != 1:
            raise BlinkError(
                f"{model.path}: {describe_node(node)}: its condition depends on data",
                hint="export the model without data-dependent branches",
            )
        values.append(bool(value.ravel()[0]))
    if values[0] != values[1]:
        model.notes.append(
            f"{node.name or node.output[0]}: fixed to its branch for sequences of {limit} tokens"
        )
    return values[1]


def _inline(model: OnnxModel, node: onnx.NodeProto, taken: bool) -> None:
    branch = attribute_values(node)["then_branch" if taken else "else_branch"]
    assert isinstance(branch, onnx.GraphProto)
    for tensor in branch.initializer:
        model.initializers[tensor.name] = tensor
    copies = []
    for inner in branch.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(inner)
        copies.append(copy)
    aliases = [
        onnx.helper.make_node("Identity", [inner_output.name], [outer])
        for inner_output, outer in zip(branch.output, node.output, strict=True)
        if outer and inner_output.name != outer
    ]
    at = model.nodes.index(node)
    model.nodes[at : at + 1] = [*copies, *aliases]
    model.index()
