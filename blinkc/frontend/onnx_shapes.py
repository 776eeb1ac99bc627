"""Shape rules of com.microsoft's ops and of attention: node, input shapes -> output shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from blinkc.frontend.onnx_model import attribute_values

if TYPE_CHECKING:
    import onnx

    Shape = tuple[int, ...]
    Typed = dict[str, tuple[Shape, int]]

# Ops whose first output looks like their first input.
SAME_AS_FIRST = {
    "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "RotaryEmbedding",
    "Gelu",
    "FastGelu",
    "BiasGelu",
    "QuickGelu",
    "BiasAdd",
}
ATTENTION_OPS = {"GroupQueryAttention", "MultiHeadAttention", "Attention"}


def contrib_shapes(
    node: onnx.NodeProto, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, int]
) -> Typed | None:
    """Return shapes and types of the outputs, or None when onnx's own inference must do it."""
    first = node.input[0] if node.input else ""
    shape = shapes.get(first)
    if shape is None:
        return None
    element_type = types[first]
    attributes = attribute_values(node)
    op = node.op_type
    if op == "SimplifiedLayerNormalization" or (
        node.domain == "com.microsoft" and op in SAME_AS_FIRST
    ):
        # Skip norms: output 3 is the sum, of the same shape; 1 and 2 are statistics nobody reads.
        return {n: (shape, element_type) for i, n in enumerate(node.output) if n and i in (0, 3)}
    if op in ATTENTION_OPS and len(node.input) > 1:
        return _attention_shapes(node, attributes, shapes, element_type)
    if node.domain != "com.microsoft":
        return None
    if op == "MatMulNBits":
        return {node.output[0]: ((*shape[:-1], int(str(attributes["N"]))), element_type)}
    if op in ("FusedMatMul", "TransposeMatMul"):
        other = list(shapes[node.input[1]])
        rows = list(shape)
        if attributes.get("transA"):
            rows[-1], rows[-2] = rows[-2], rows[-1]
        if attributes.get("transB"):
            other[-1], other[-2] = other[-2], other[-1]
        batch = rows[:-2] if len(rows) >= len(other) else other[:-2]
        return {node.output[0]: ((*batch, rows[-2], other[-1]), element_type)}
    return None


def _attention_shapes(
    node: onnx.NodeProto,
    attributes: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    element_type: int,
) -> Typed | None:
    """Shapes of GroupQueryAttention, MultiHeadAttention and the standard Attention."""
    from blinkc.frontend.onnx_attention_ops import past_inputs

    query = shapes[node.input[0]]
    if node.op_type == "GroupQueryAttention" and not (node.input[1] if len(node.input) > 1 else ""):
        heads = int(attributes["num_heads"]) + 2 * int(attributes["kv_num_heads"])
        size = query[-1] // heads
        query = (*query[:-1], size * int(attributes["num_heads"]))
    result: Typed = {node.output[0]: (query, element_type)}
    past = past_inputs(node)
    sequence = query[-2]
    for name, present in zip(past, node.output[1:3], strict=False):
        if name and present and name in shapes:
            cached = list(shapes[name])
            cached[2] += sequence
            result[present] = (tuple(cached), element_type)
    return result
