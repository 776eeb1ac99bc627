"""Check an ONNX file's nodes before they are read: order, inputs, attributes."""

from __future__ import annotations

import onnx

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_model import ONNX_DOMAINS, OnnxModel, describe_node

# com.microsoft's ops have no schema in onnx: inputs at least, attributes required.
_CONTRIB: dict[str, tuple[int, tuple[str, ...]]] = {
    "GroupQueryAttention": (7, ("num_heads", "kv_num_heads")),
    "MultiHeadAttention": (3, ("num_heads",)),
    "SimplifiedLayerNormalization": (2, ()),
    "SkipSimplifiedLayerNormalization": (3, ()),
    "SkipLayerNormalization": (3, ()),
    "RotaryEmbedding": (4, ()),
    "MatMulNBits": (3, ("K", "N", "block_size")),
    "FusedMatMul": (2, ()),
    "Gelu": (1, ()),
    "FastGelu": (1, ()),
    "BiasGelu": (2, ()),
    "QuickGelu": (1, ()),
    "BiasAdd": (3, ()),
}


def check_nodes(model: OnnxModel) -> None:
    """Raise BlinkError for the first node that is malformed or reads what comes later."""
    context = onnx.checker.C.CheckerContext()
    context.ir_version = 10
    context.opset_imports = {"": model.opset}
    known = {*model.inputs, *model.initializers, ""}
    for node in model.nodes:
        texts = [node.op_type, node.domain, node.name, *node.input, *node.output]
        if not all(isinstance(text, str) for text in texts):  # bytes: no UTF-8
            raise BlinkError(f"{model.path}: a node's names are not text", hint="export it again")
        where = f"{model.path}: {describe_node(node)}"
        missing = [name for name in node.input if name not in known]
        if missing:
            raise BlinkError(
                f"{where} reads '{missing[0]}', which no earlier node makes",
                hint="the file is damaged: export it again",
            )
        known.update(node.output)
        is_contrib = node.domain not in ONNX_DOMAINS or node.op_type.startswith("Simplified")
        if is_contrib:
            _check_contrib(node, where)
            continue
        if node.op_type == "If":
            continue  # its branches are checked once they are part of the graph
        try:
            onnx.checker.check_node(node, context)
        except onnx.checker.ValidationError as error:
            raise BlinkError(
                f"{where} is not valid: {error}", hint="the file is damaged: export it again"
            ) from error


def _check_contrib(node: onnx.NodeProto, where: str) -> None:
    num_inputs, attributes = _CONTRIB.get(node.op_type, (0, ()))
    present = {attribute.name for attribute in node.attribute}
    lacking = [name for name in attributes if name not in present]
    if len(node.input) < num_inputs or not all(node.input[:1]) or lacking or not node.output:
        raise BlinkError(
            f"{where} is not valid: "
            + (
                f"attribute {lacking[0]} is missing" if lacking else "inputs or outputs are missing"
            ),
            hint="the file is damaged: export it again",
        )
