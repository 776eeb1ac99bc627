"""Rules for matrix products and the norms that are spelled out."""

from __future__ import annotations

import numpy as np
import onnx

from blinkc.surgery.squeeze_context import (
    NodeContext,
    Operands,
    elementwise,
    finished,
    reduce,
    required,
    reshape,
    viewed_rows,
)
from blinkc.surgery.token_graph import Operand, kept_axes


def rule_matmul(context: NodeContext, inputs: Operands) -> list[Operand]:
    left, right = required(context, inputs, 0), required(context, inputs, 1)
    if not right.has_rows and len(right.shape) == 2 and len(left.shape) >= 2:
        shape = (*left.shape[:-1], right.shape[1])
        kept = kept_axes(left.shape[:-1]) if len(left.shape) > 2 else [0]
        if left.has_rows and len(left.shape) > 2 and all(d == 1 for d in left.shape[1:-1]):
            kept = [0]
        kept = [*kept, len(left.shape) - 1]
        tensor = viewed_rows(context, left, kept)
        out = (*tensor.shape[:-1], right.shape[1])
        pair = [tensor, context.built.tensor_of(right)]
        made = context.built.emit("MatMul", pair, {}, [(out, left.dtype)])[0]
        return [finished(context, made, shape, left.dtype)]
    if len(left.shape) < 2 or len(right.shape) < 2:
        raise context.fail(f"it multiplies {list(left.shape)} with {list(right.shape)}")
    # A product within each row, K long: a broadcast and a sum.
    summed = left.shape[-1]
    wide_left = reshape(context, left, (*left.shape, 1))
    wide_right = reshape(context, right, (*right.shape[:-2], 1, *right.shape[-2:]))
    product = elementwise(context, "Mul", [wide_left, wide_right], left.dtype)
    if summed == 1:
        shape = (*product.shape[:-2], product.shape[-1])
        return [reshape(context, product, shape)]
    return [reduce(context, "ReduceSum", product, [len(product.shape) - 2], keepdims=False)]


def rule_gemm(context: NodeContext, inputs: Operands) -> list[Operand]:
    left, right = required(context, inputs, 0), required(context, inputs, 1)
    attributes = context.attributes
    if attributes.get("transA", 0) or right.has_rows:
        raise context.fail("it multiplies tokens with tokens")
    transposed = bool(attributes.get("transB", 0))
    scales = [float(attributes.get(name, 1.0)) for name in ("alpha", "beta")]
    width = right.shape[0 if transposed else 1]
    tensors = [context.built.tensor_of(left), context.built.tensor_of(right)]
    if len(inputs) > 2 and inputs[2] is not None:
        tensors.append(context.built.tensor_of(required(context, inputs, 2)))
    if scales != [1.0, 1.0]:
        raise context.fail("it scales its product")
    shape = (left.shape[0], width)
    made = context.built.emit("Gemm", tensors, {"transB": int(transposed)}, [(shape, left.dtype)])[
        0
    ]
    return [finished(context, made, shape, left.dtype)]


def rule_layer_norm(context: NodeContext, inputs: Operands) -> list[Operand]:
    """Spell a LayerNormalization over the last axis out, in fp32 as its definition wants."""
    operand = required(context, inputs, 0)
    rank = len(operand.shape)
    if context.attributes.get("axis", -1) % rank != rank - 1:
        raise context.fail("it normalizes more than the last axis")
    fp32 = np.dtype(np.float32)
    wide = operand
    if operand.dtype != fp32:
        wide = elementwise(context, "Cast", [operand], fp32, to=onnx.TensorProto.FLOAT)
    mean = reduce(context, "ReduceMean", wide, [rank - 1], keepdims=True)
    centred = elementwise(context, "Sub", [wide, mean], fp32)
    square = elementwise(context, "Mul", [centred, centred], fp32)
    variance = reduce(context, "ReduceMean", square, [rank - 1], keepdims=True)
    epsilon = np.array(context.attributes.get("epsilon", 1e-5), dtype=np.float32)
    known = Operand(shape=(), dtype=fp32, value=epsilon)
    deviation = elementwise(
        context, "Sqrt", [elementwise(context, "Add", [variance, known], fp32)], fp32
    )
    inverse = elementwise(context, "Reciprocal", [deviation], fp32)
    out = elementwise(context, "Mul", [centred, inverse], fp32)
    if operand.dtype != fp32:
        to = onnx.helper.np_dtype_to_tensor_dtype(operand.dtype)
        out = elementwise(context, "Cast", [out], operand.dtype, to=to)
    out = elementwise(context, "Mul", [out, required(context, inputs, 1)], operand.dtype)
    if len(inputs) > 2 and inputs[2] is not None:
        out = elementwise(context, "Add", [out, required(context, inputs, 2)], operand.dtype)
    return [out]
