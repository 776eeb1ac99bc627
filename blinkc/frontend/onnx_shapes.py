"""Shape rules of com.microsoft's ops and of attention: node, input shapes -> output shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from blinkc.frontend.onnx_model import CONTRIB_DOMAIN, attribute_values

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
    node: onnx.NodeProto,
    shapes: Mapping[str, tuple[int, ...]],
    types: Mapping[str, int],
    past_tokens: int,
) -> Typed | None:
    """Return shapes and types of the outputs, or None when onnx's own inference must do it.

    The KV inputs of com.microsoft's attention ops are among the results.
    """
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
        return _attention_shapes(node, attributes, shapes, element_type, past_tokens)
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
    past_tokens: int,
) -> Typed | None:
    """Shapes of GroupQueryAttention, MultiHeadAttention and the standard Attention."""
    from blinkc.frontend.onnx_attention_ops import past_inputs

    query = shapes[node.input[0]]
    heads = int(attributes.get("num_heads", 0))
    kv_heads = int(attributes.get("kv_num_heads", heads))
    if node.op_type == "GroupQueryAttention" and not node.input[1]:
        size = query[-1] // (heads + 2 * kv_heads)
        query = (*query[:-1], size * heads)
    result: Typed = {node.output[0]: (query, element_type)}
    sequence = query[-2]
    for name, present in zip(past_inputs(node), node.output[1:3], strict=False):
        if node.domain == CONTRIB_DOMAIN and name and heads:
            result[name] = ((1, kv_heads, past_tokens, query[-1] // heads), element_type)
        known = result.get(name) or (shapes.get(name), element_type)
        if name and present and known[0] is not None:
            cached = list(known[0])
            cached[2] += sequence
            result[present] = (tuple(cached), element_type)
    return result
