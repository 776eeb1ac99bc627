"""Rules for the cut ops: heads are flattened, so that what crosses a cut is `[rows, n]`."""

from __future__ import annotations

from blinkc.surgery.squeeze_context import NodeContext, Operands, finished, required, reshape
from blinkc.surgery.token_graph import Operand


def rule_paged_attention(context: NodeContext, inputs: Operands) -> list[Operand]:
    """Flatten heads: the cut op sees q `[T, Hq * d]`, k and v `[T, Hkv * d]`."""
    query, key, value, positions = (required(context, inputs, index) for index in range(4))
    for operand in (query, key, value):
        if len(operand.shape) != 3 or not operand.has_rows:
            raise context.fail(f"q, k and v must be [T, heads, d], not {list(operand.shape)}")
    heads, size = query.shape[1:]
    if key.shape[2] != size or value.shape != key.shape:
        raise context.fail("q, k and v differ in head size, or k and v in heads")
    if positions.tensor is None or positions.tensor.name != "positions":
        raise context.fail("its positions are not the step's positions")
    flat = [
        context.built.tensor_of(
            reshape(context, o, (o.shape[0], int(o.shape[1]) * int(o.shape[2])))
        )
        for o in (query, key, value)
    ]
    attributes = {name: v for name, v in context.attributes.items() if name != "layer"}
    attributes |= {"num_q_heads": heads, "num_kv_heads": key.shape[1], "head_dim": size}
    tensors = [*flat, positions.tensor]
    if len(inputs) > 4 and inputs[4] is not None:
        tensors.append(context.built.tensor_of(required(context, inputs, 4)))
    shape = (query.shape[0], int(heads) * int(size))
    made = context.built.emit(
        "PagedAttention", tensors, attributes, [(shape, query.dtype)], domain="blink"
    )[0]
    return [reshape(context, Operand(shape=shape, dtype=query.dtype, tensor=made), query.shape)]


def rule_moe_experts(context: NodeContext, inputs: Operands) -> list[Operand]:
    operands = [required(context, inputs, index) for index in range(5)]
    if any(len(operand.shape) != 2 for operand in operands[:3]):
        raise context.fail("x, ids and weights must be [T, n]")
    tensors = [context.built.tensor_of(operand) for operand in operands]
    attributes = {name: v for name, v in context.attributes.items() if name != "layer"}
    out = operands[0]
    made = context.built.emit(
        "MoeExperts", tensors, attributes, [(out.shape, out.dtype)], domain="blink"
    )[0]
    return [finished(context, made, out.shape, out.dtype)]
