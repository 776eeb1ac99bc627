"""Fused ops spelled out as opset 18 primitives: com.microsoft's, and those of opsets 20 to 24.

Formulas: onnxruntime's ContribOperators.md and onnx's Operators.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from blinkc.frontend.onnx_attention import HeadsSource
from blinkc.frontend.onnx_emit import DecoderEmitter, Handler
from blinkc.frontend.onnx_emit_attention import rotate
from blinkc.frontend.onnx_model import CONTRIB_DOMAIN, attribute_values
from blinkc.frontend.onnx_norms import rms_norm
from blinkc.frontend.onnx_weights import DTYPE_NAMES, dequantized_part

if TYPE_CHECKING:
    import onnx
    import onnx_graphsurgeon as gs


def lower_rms_norm(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """RMSNormalization, SimplifiedLayerNormalization: over the last axis, in fp32."""
    attributes = emitter.attributes(node, "axis", "epsilon")
    _check_last_axis(emitter, node, int(attributes.get("axis", -1)))
    epsilon = float(attributes.get("epsilon", 1e-5))
    source = emitter.operand(node.input[0])
    return [
        rms_norm(emitter, source, node.input[1], epsilon, like=node.output[0], name=node.output[0])
    ]


def lower_skip_rms_norm(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """SkipSimplifiedLayerNormalization: (norm of the sum, -, -, the sum)."""
    inputs = [*node.input, ""]
    total = _skip_sum(emitter, node, inputs[3])
    epsilon = float(emitter.attributes(node, "epsilon").get("epsilon", 1e-5))
    normed = rms_norm(emitter, total, inputs[2], epsilon, like=node.output[0], name=node.output[0])
    return _with_sum(node, normed, total)


def lower_skip_layer_norm(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """SkipLayerNormalization: (norm of the sum, -, -, the sum)."""
    inputs = [*node.input, "", ""]
    total = _skip_sum(emitter, node, inputs[4])
    epsilon = float(emitter.attributes(node, "epsilon").get("epsilon", 1e-5))
    operands = [total, *(emitter.operand(name) for name in inputs[2:4] if name)]
    normed = emitter.writer.one(
        "LayerNormalization", *operands, name=node.output[0], axis=-1, epsilon=epsilon
    )
    return _with_sum(node, normed, total)


def lower_gelu(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Gelu (exact or tanh), FastGelu and BiasGelu."""
    writer = emitter.writer
    element_type = emitter.mapped_type(node.output[0])
    x = emitter.operand(node.input[0])
    if len(node.input) > 1 and node.input[1]:
        x = writer.one("Add", x, emitter.operand(node.input[1]))
    approximate = emitter.attributes(node, "approximate").get("approximate", "none")

    def number(value: float) -> gs.Tensor:
        return writer.number(value, element_type)

    if node.op_type == "FastGelu" or approximate == "tanh":
        cube = writer.one("Mul", writer.one("Mul", x, x), x)
        inner = writer.one("Add", x, writer.one("Mul", cube, number(0.044715)))
        gate = writer.one("Tanh", writer.one("Mul", inner, number(math.sqrt(2 / math.pi))))
    else:
        gate = writer.one("Erf", writer.one("Mul", x, number(math.sqrt(0.5))))
    half = writer.one("Mul", x, number(0.5))
    return [writer.one("Mul", half, writer.one("Add", gate, number(1.0)), name=node.output[0])]


def lower_swish(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """Swish and QuickGelu: x * sigmoid(alpha * x)."""
    default = 1.702 if node.op_type == "QuickGelu" else 1.0
    alpha = float(emitter.attributes(node, "alpha").get("alpha", default))
    x = emitter.operand(node.input[0])
    writer = emitter.writer
    inner = x
    if alpha != 1.0:
        element_type = emitter.mapped_type(node.output[0])
        inner = writer.one("Mul", x, writer.number(alpha, element_type))
    return [writer.one("Mul", x, writer.one("Sigmoid", inner), name=node.output[0])]


def lower_bias_add(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """BiasAdd: input + bias + skip."""
    total = emitter.operand(node.input[0])
    for name in node.input[1:]:
        total = emitter.writer.one("Add", total, emitter.operand(name))
    return [total]


def lower_rotary(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """RotaryEmbedding: com.microsoft's (x, positions, cos, sin), opset 23's (x, cos, sin, ids)"""
    attributes: dict[str, Any] = attribute_values(node)
    inputs = [*node.input, ""]
    is_contrib = node.domain == CONTRIB_DOMAIN
    positions, cos, sin = inputs[1:4] if is_contrib else (inputs[3], inputs[1], inputs[2])
    if float(attributes.get("scale", 1.0)) != 1.0 or attributes.get("is_packed_batching", 0):
        raise emitter.fail(node, "attribute scale or is_packed_batching is not supported")
    source, result = node.input[0], node.output[0]
    shape = emitter.meaning.shape(source)
    tokens = emitter.meaning.token_axis(source)
    heads = int(attributes.get("num_heads", 0))
    if len(shape) == 4:
        if tokens != 2:
            raise emitter.fail(node, f"its input {list(shape)} is not [batch, heads, tokens, size]")
        heads = shape[1]
    writer = emitter.writer
    half = emitter.meaning.shape(cos)[-1]
    rotary_dim = int(attributes.get("rotary_embedding_dim", 0))
    if rotary_dim and rotary_dim != 2 * half:
        raise emitter.fail(
            node, f"rotary_embedding_dim is {rotary_dim}, the tables hold {2 * half}"
        )
    if not heads:
        heads = shape[-1] // (2 * half)  # contrib op without partial rotation
    head_dim = shape[-1] if len(shape) == 4 else shape[-1] // heads
    rows = []
    for name in (cos, sin):
        if positions:
            if emitter.meaning(positions).kind != "positions":
                raise emitter.fail(node, "its position ids are not the tokens' positions")
            key = f"{name}_rows"
            if key not in emitter.tensors:
                table = writer.one("Gather", emitter.operand(name), writer.positions, axis=0)
                emitter.tensors[key] = writer.reshape(table, [-1, 1, half])
            rows.append(emitter.tensors[key])
        else:
            rows.append(writer.reshape(emitter.operand(name), [-1, 1, half]))
    x = writer.reshape(emitter.operand(source), [-1, heads, head_dim])
    layout = HeadsSource(name=source, heads=heads, head_dim=head_dim, token_axis=0, dim_axis=2)
    is_interleaved = bool(attributes.get("interleaved", 0))
    rotated = rotate(emitter, x, layout, (rows[0], rows[1], half), is_interleaved)
    return [writer.reshape(rotated, emitter.meaning.packed_shape(result), name=result)]


def lower_mat_mul_n_bits(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """MatMulNBits: a plain product with the dequantized matrix."""
    attributes: dict[str, Any] = attribute_values(node)
    inputs = [*node.input, "", "", ""]
    bits = int(attributes.get("bits", 4))
    if bits not in (2, 4, 8):
        raise emitter.fail(node, f"{bits}-bit weights are not supported")
    if inputs[4]:
        raise emitter.fail(node, "its rows are permuted (g_idx)", "quantize without act-order")
    for name in inputs[1:4]:
        if name and name not in emitter.model.initializers:
            raise emitter.fail(node, f"its quantized weight '{name}' is not an initializer")
    part = dequantized_part(node, attributes, emitter.model.path)
    dtype = DTYPE_NAMES[emitter.mapped_type(node.output[0])]
    writer = emitter.writer
    weight = writer.weight(f"{inputs[1]}_dequantized", part.shape, dtype, (part,))
    right = writer.one("Transpose", weight, perm=[1, 0])
    name = node.output[0]
    tensor = writer.one("MatMul", emitter.operand(node.input[0]), right, name=name)
    if inputs[5]:
        tensor = writer.one("Add", tensor, emitter.operand(inputs[5]), name=f"{name}_biased")
    return [tensor]


def lower_fused_mat_mul(emitter: DecoderEmitter, node: onnx.NodeProto) -> list[gs.Tensor]:
    """FusedMatMul with a weight: alpha * x @ W."""
    attributes: dict[str, Any] = attribute_values(node)
    if any(attributes.get(name) for name in ("transA", "transBatchA", "transBatchB")):
        raise emitter.fail(node, "it transposes tokens")
    right_name = node.input[1]
    if emitter.meaning.token_axis(right_name) is not None:
        raise emitter.fail(node, "it multiplies tokens with tokens")
    writer = emitter.writer
    if attributes.get("transB"):
        right: gs.Tensor = writer.one("Transpose", emitter.operand(right_name), perm=[1, 0])
    else:
        right = emitter.matrix(right_name)
    tensor = writer.one("MatMul", emitter.operand(node.input[0]), right, name=node.output[0])
    alpha = float(attributes.get("alpha", 1.0))
    if alpha != 1.0:
        number = writer.number(alpha, emitter.mapped_type(node.output[0]))
        tensor = writer.one("Mul", tensor, number)
    return [tensor]


def _skip_sum(emitter: DecoderEmitter, node: onnx.NodeProto, bias: str) -> gs.Tensor:
    left, right = (emitter.operand(name) for name in node.input[:2])
    total = emitter.writer.one("Add", left, right, name=f"{node.output[0]}_sum")
    return emitter.writer.one("Add", total, emitter.operand(bias)) if bias else total


def _with_sum(node: onnx.NodeProto, normed: gs.Tensor, total: gs.Tensor) -> list[gs.Tensor]:
    """Return outputs in the op's order; statistics (1 and 2) are training outputs."""
    return [normed, normed, normed, total][: len(node.output)]


def _check_last_axis(emitter: DecoderEmitter, node: onnx.NodeProto, axis: int) -> None:
    rank = len(emitter.meaning.shape(node.input[0]))
    if axis % rank != rank - 1:
        raise emitter.fail(node, "it normalizes more than the last axis")


FUSED_HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "RMSNormalization"): lower_rms_norm,
    ("", "SimplifiedLayerNormalization"): lower_rms_norm,
    (CONTRIB_DOMAIN, "SimplifiedLayerNormalization"): lower_rms_norm,
    (CONTRIB_DOMAIN, "SkipSimplifiedLayerNormalization"): lower_skip_rms_norm,
    (CONTRIB_DOMAIN, "SkipLayerNormalization"): lower_skip_layer_norm,
    ("", "Gelu"): lower_gelu,
    (CONTRIB_DOMAIN, "Gelu"): lower_gelu,
    (CONTRIB_DOMAIN, "FastGelu"): lower_gelu,
    (CONTRIB_DOMAIN, "BiasGelu"): lower_gelu,
    (CONTRIB_DOMAIN, "QuickGelu"): lower_swish,
    ("", "Swish"): lower_swish,
    (CONTRIB_DOMAIN, "BiasAdd"): lower_bias_add,
    ("", "RotaryEmbedding"): lower_rotary,
    (CONTRIB_DOMAIN, "RotaryEmbedding"): lower_rotary,
    (CONTRIB_DOMAIN, "MatMulNBits"): lower_mat_mul_n_bits,
    (CONTRIB_DOMAIN, "FusedMatMul"): lower_fused_mat_mul,
}
