"""Write an attention layer: `AttentionMatch` -> rotation, then `blink::PagedAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_attention import AttentionMatch, HeadsSource, RopeSource
from blinkc.frontend.onnx_model import describe_node
from blinkc.frontend.onnx_norms import rms_norm

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

    from blinkc.frontend.onnx_emit import DecoderEmitter


def emit_attention(emitter: DecoderEmitter, layer: int, match: AttentionMatch) -> gs.Tensor:
    """Write the layer and return its result in the packed shape of the tensor it replaces."""
    writer = emitter.writer
    head_dims = {match.query.head_dim, match.key.head_dim, match.value.head_dim}
    is_uneven = match.query.heads % match.key.heads or match.value.heads != match.key.heads
    if len(head_dims) != 1 or is_uneven:
        raise BlinkError(
            f"{emitter.model.path}: {describe_node(match.node)} has {match.query.heads} query "
            "heads, "
            f"{match.key.heads} key heads, {match.value.heads} value heads and head sizes "
            f"{sorted(head_dims)}",
            hint="query heads must be a multiple of key heads, all of one size",
        )
    sources = (match.query, match.key, match.value)
    for source in (*sources, match.output):
        rank = len(emitter.meaning.shape(source.name))
        last = max(axis for axis in range(rank) if axis != source.token_axis)
        if not source.is_flat and source.dim_axis != last:
            raise BlinkError(
                f"{emitter.model.path}: {describe_node(match.node)}: tensor '{source.name}' does "
                "not "
                "keep the elements of a head together"
            )
    query, key, value = (_heads(emitter, source) for source in sources)
    if any(match.bias):
        query, key, value = _add_bias(emitter, match, (query, key, value))
    if match.norms is not None:
        norms, like = match.norms, match.query.name
        query = rms_norm(emitter, query, norms.query, norms.query_epsilon, like=like)
        key = rms_norm(emitter, key, norms.key, norms.key_epsilon, like=like)
    if match.rope is not None:
        tables = rope_rows(emitter, match.rope)
        query = rotate(emitter, query, match.query, tables, match.rope.is_interleaved)
        key = rotate(emitter, key, match.key, tables, match.rope.is_interleaved)
    inputs: list[gs.Tensor | None] = [query, key, value, writer.positions]
    if match.sinks:
        inputs.append(emitter.operand(match.sinks))
    elif match.has_zero_sinks:
        zeros = np.zeros(match.query.heads, dtype=np.float32)
        inputs.append(
            emitter.writer.cast(writer.constant(zeros), emitter.mapped_type(match.query.name))
        )
    output = writer.emit(
        "PagedAttention",
        inputs,
        name=match.output.name,
        domain="blink",
        layer=layer,
        scale=float(match.scale),
        window=int(match.window),
        softcap=float(match.softcap),
    )[0]
    result_type = emitter.mapped_type(match.output.name)
    if result_type != writer.float_type:
        output = writer.cast(output, result_type)
    return writer.reshape(output, emitter.meaning.packed_shape(match.output.name))


def _heads(emitter: DecoderEmitter, source: HeadsSource) -> gs.Tensor:
    """Return `[T, heads, head_dim]`; tokens are on axis 0 already."""
    writer = emitter.writer
    tensor = emitter.narrow_operand(source.name)
    is_foreign = emitter.meaning.element_type(source.name) != writer.model_type
    if is_foreign and emitter.mapped_type(source.name) != writer.float_type:
        # The file computes attention in another type than the rest, such as fp32 in an fp16 model.
        tensor = writer.cast(tensor, writer.float_type)
    rank = len(emitter.meaning.shape(source.name))
    if source.columns is not None:
        start, stop = (writer.ints(edge) for edge in source.columns)
        tensor = writer.one("Slice", tensor, start, stop, writer.ints(rank - 1))
    return writer.reshape(tensor, [-1, source.heads, source.head_dim])


def _add_bias(
    emitter: DecoderEmitter, match: AttentionMatch, tensors: tuple[gs.Tensor, ...]
) -> list[gs.Tensor]:
    """Add MultiHeadAttention's one bias vector: q's part, k's part, v's part."""
    writer = emitter.writer
    bias = emitter.operand(match.bias[0])
    results: list[gs.Tensor] = []
    for index, (tensor, source) in enumerate(
        zip(tensors, (match.query, match.key, match.value), strict=True)
    ):
        width = source.heads * source.head_dim
        part = writer.one(
            "Slice",
            bias,
            writer.ints(index * width),
            writer.ints((index + 1) * width),
            writer.ints(0),
        )
        shaped = writer.reshape(part, [1, source.heads, source.head_dim])
        results.append(writer.one("Add", tensor, shaped))
    return results


def rope_rows(emitter: DecoderEmitter, rope: RopeSource) -> tuple[gs.Tensor, gs.Tensor, int]:
    """Return cos and sin of each token `[T, 1, half]`, and `half`."""
    writer = emitter.writer
    rows = []
    rows_held, half = emitter.meaning.shape(rope.cos)
    longest = emitter.meaning.probes[-1].total
    if rows_held < longest:
        raise BlinkError(
            f"{emitter.model.path}: table '{rope.cos}' has {rows_held} rows, "
            f"a sequence may have {longest} tokens",
            hint="lower --max-seqlen",
        )
    for name in (rope.cos, rope.sin):
        key = f"{name}_rows"
        if key not in emitter.tensors:
            gathered = writer.one("Gather", emitter.operand(name), writer.positions, axis=0)
            emitter.tensors[key] = writer.reshape(gathered, [-1, 1, half])
        rows.append(emitter.tensors[key])
    return rows[0], rows[1], half


def rotate(
    emitter: DecoderEmitter,
    tensor: gs.Tensor,
    source: HeadsSource,
    tables: tuple[gs.Tensor, gs.Tensor, int],
    is_interleaved: bool,
) -> gs.Tensor:
    """Rotate `[T, heads, head_dim]`: the first `2 * half` elements of each head, the rest stays.

    Neox pairs element i with i + half, interleaved pairs 2i with 2i + 1: (a, b) becomes
    (a cos - b sin, b cos + a sin).
    """
    writer = emitter.writer
    cos, sin, half = tables
    heads, head_dim = source.heads, source.head_dim

    def columns(start: int, stop: int) -> gs.Tensor:
        return writer.one("Slice", tensor, writer.ints(start), writer.ints(stop), writer.ints(2))

    if is_interleaved:
        rotated = columns(0, 2 * half) if 2 * half < head_dim else tensor
        pairs = writer.reshape(rotated, [-1, heads, half, 2])
        first, second = (
            writer.reshape(
                writer.one("Slice", pairs, writer.ints(i), writer.ints(i + 1), writer.ints(3)),
                [-1, heads, half],
            )
            for i in (0, 1)
        )
    else:
        first, second = columns(0, half), columns(half, 2 * half)
    left = writer.one("Sub", writer.one("Mul", first, cos), writer.one("Mul", second, sin))
    right = writer.one("Add", writer.one("Mul", second, cos), writer.one("Mul", first, sin))
    if is_interleaved:
        pairs = writer.one(
            "Concat",
            writer.reshape(left, [-1, heads, half, 1]),
            writer.reshape(right, [-1, heads, half, 1]),
            axis=3,
        )
        parts = [writer.reshape(pairs, [-1, heads, 2 * half])]
    else:
        parts = [left, right]
    if 2 * half < head_dim:
        parts.append(columns(2 * half, head_dim))
    return parts[0] if len(parts) == 1 else writer.one("Concat", *parts, axis=2)
