"""Attention ops of com.microsoft: GroupQueryAttention and MultiHeadAttention -> `AttentionMatch`.

Meaning of inputs and attributes: onnxruntime's ContribOperators.md. An attribute that would change
the result and is not known here is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_attention import AttentionMatch, HeadsSource, NormSource, RopeSource
from blinkc.frontend.onnx_cache import find_cache_join, joined_heads
from blinkc.frontend.onnx_masks import MaskUse, window_from_masks
from blinkc.frontend.onnx_model import (
    CONTRIB_DOMAIN,
    OnnxModel,
    attribute_values,
    describe_node,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx

    from blinkc.frontend.onnx_probe import Probe

    Array = npt.NDArray[Any]

# Attributes that change nothing when they hold this value.
_GQA_NEUTRAL: dict[str, Any] = {
    "qk_output": 0,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
    "kv_cache_bit_width": 0,
    "causal": 1,
}
_GQA_KNOWN = {
    "num_heads",
    "kv_num_heads",
    "scale",
    "softcap",
    "local_window_size",
    "do_rotary",
    "rotary_interleaved",
    "smooth_softmax",
    "qk_norm_epsilon",
    "q_norm_epsilon",
    "k_norm_epsilon",
    "sliding_window_cache",  # how its own cache is stored; the window is local_window_size
}
_MHA_KNOWN = {"num_heads", "mask_filter_value", "scale", "unidirectional"}


def past_inputs(node: onnx.NodeProto) -> tuple[str, str]:
    """Return the names of an attention op's past key and value inputs ("" when it has none)."""
    if node.domain == CONTRIB_DOMAIN:
        first = 3 if node.op_type == "GroupQueryAttention" else 6
    else:
        first = 4
    inputs = [*node.input, *[""] * (first + 2)]
    return inputs[first], inputs[first + 1]


def match_contrib_attention(model: OnnxModel, probes: Sequence[Probe]) -> list[AttentionMatch]:
    """Return a match for each attention op of com.microsoft, in the graph's order."""
    matches = []
    for node in model.nodes:
        if node.domain != CONTRIB_DOMAIN:
            continue
        if node.op_type == "GroupQueryAttention":
            matches.append(_match_group_query(model, node, probes))
        elif node.op_type == "MultiHeadAttention":
            matches.append(_match_multi_head(model, node, probes))
        elif "Attention" in node.op_type:
            raise BlinkError(
                f"{model.path}: {describe_node(node)} is not supported",
                hint="GroupQueryAttention and MultiHeadAttention are",
            )
    return matches


def _match_group_query(
    model: OnnxModel, node: onnx.NodeProto, probes: Sequence[Probe]
) -> AttentionMatch:
    attributes: dict[str, Any] = attribute_values(node)
    where = f"{model.path}: {describe_node(node)}"
    _refuse_attributes(where, attributes, _GQA_KNOWN, _GQA_NEUTRAL)
    inputs = [*node.input, *[""] * (16 - len(node.input))]
    if inputs[12] or inputs[13]:
        raise BlinkError(
            f"{where}: its KV cache is quantized (k_scale, v_scale)",
            hint="export with an unquantized KV cache",
        )
    if any(inputs[16:]):
        raise BlinkError(f"{where}: its input 16 (query_seqlens) is not supported")
    past = _graph_past(model, node)
    for index, name, offset in ((5, "seqlens_k", -1), (6, "total_sequence_length", 0)):
        for probe in probes:
            value = probe.value(inputs[index])
            if value is None or not np.all(value == probe.total + offset):
                raise BlinkError(
                    f"{where}: its {name} is not the sum of the attention mask"
                    f"{' less one' if offset else ''} (with {probe.total} tokens it is {value})"
                )
    num_heads, kv_heads = int(attributes["num_heads"]), int(attributes["kv_num_heads"])
    query, key, value_source = _flat_sources(node, inputs[:3], num_heads, kv_heads, probes)
    window = int(attributes.get("local_window_size", -1))
    masks = [MaskUse(node=node, name=inputs[10], kind="add")] if inputs[10] else []
    rope = None
    if attributes.get("do_rotary", 0):
        if not inputs[7] or not inputs[8]:
            raise BlinkError(f"{where}: do_rotary is set but cos_cache or sin_cache is missing")
        rope = RopeSource(
            cos=inputs[7],
            sin=inputs[8],
            is_interleaved=bool(attributes.get("rotary_interleaved", 0)),
        )
        _check_positions(where, inputs[9], probes)
    return AttentionMatch(
        node=node,
        query=query,
        key=key,
        value=value_source,
        output=_flat(node.output[0], num_heads, query.head_dim, None),
        past_key=past[0],
        past_value=past[1],
        scale=float(attributes.get("scale") or query.head_dim**-0.5),
        softcap=float(attributes.get("softcap", 0.0)),
        window=window_from_masks(model, node, masks, probes, is_causal=True, window=max(window, 0)),
        sinks=inputs[11],
        has_zero_sinks=bool(attributes.get("smooth_softmax") == 1 and not inputs[11]),
        norms=_norms(inputs[14], inputs[15], attributes),
        rope=rope,
        needs_proof=False,
    )


def _norms(query: str, key: str, attributes: dict[str, Any]) -> NormSource | None:
    if not query or not key:
        return None
    shared = float(attributes.get("qk_norm_epsilon", 1e-6))
    return NormSource(
        query=query,
        key=key,
        query_epsilon=float(attributes.get("q_norm_epsilon", shared)),
        key_epsilon=float(attributes.get("k_norm_epsilon", shared)),
    )


def _match_multi_head(
    model: OnnxModel, node: onnx.NodeProto, probes: Sequence[Probe]
) -> AttentionMatch:
    attributes: dict[str, Any] = attribute_values(node)
    where = f"{model.path}: {describe_node(node)}"
    _refuse_attributes(where, attributes, _MHA_KNOWN, {})
    inputs = [*node.input, *[""] * (10 - len(node.input))]
    if not inputs[1] or not inputs[2]:
        raise BlinkError(f"{where}: packed QKV or KV input is not supported")
    if any(inputs[8:]):
        raise BlinkError(f"{where}: it shares its past buffer (past_sequence_length)")
    if any(len(probes[0].shapes.get(name, ())) != 3 for name in inputs[:3]):
        raise BlinkError(f"{where}: it is cross attention (keys and values of 4 axes)")
    for probe in probes:
        if inputs[4]:
            padding = probe.value(inputs[4])
            if padding is None or not np.all((padding == 1) | (padding == probe.total)):
                raise BlinkError(f"{where}: its key_padding_mask hides more than padding")
    heads = int(attributes["num_heads"])
    query, key, value = _flat_sources(node, inputs[:3], heads, heads, probes)
    if inputs[6] or inputs[7]:
        past = _graph_past(model, node)
    else:  # the cache is joined in front of the op
        joins = [find_cache_join(model, name, probes) for name in inputs[1:3]]
        if joins[0] is None or joins[1] is None or inputs[3]:
            raise BlinkError(
                f"{where}: its keys and values do not come from KV cache inputs",
                hint="cross attention and attention without a cache are not supported",
            )
        past = (joins[0].past, joins[1].past)
        key, value = (joined_heads(model, join, probes) for join in joins if join is not None)
    masks = [MaskUse(node=node, name=inputs[5], kind="add")] if inputs[5] else []
    return AttentionMatch(
        node=node,
        query=query,
        key=key,
        value=value,
        output=_flat(node.output[0], heads, query.head_dim, None),
        past_key=past[0],
        past_value=past[1],
        scale=float(attributes.get("scale") or query.head_dim**-0.5),
        window=window_from_masks(
            model, node, masks, probes, is_causal=bool(attributes.get("unidirectional", 0))
        ),
        bias=(inputs[3], inputs[3], inputs[3]),
        needs_proof=not inputs[6],
    )


def run_multi_head(node: onnx.NodeProto, inputs: Sequence[Array | None]) -> list[Array] | None:
    """Compute a MultiHeadAttention without its own cache on numpy values `[1, T, H * d]`."""
    query, key, value, bias, padding, mask = [*inputs, None, None, None, None][:6]
    if query is None or key is None or value is None or bias is not None or padding is not None:
        return None
    attributes: dict[str, Any] = attribute_values(node)
    heads = int(attributes["num_heads"])
    q, k, v = (
        np.asarray(x, dtype=np.float64).reshape(x.shape[1], heads, -1) for x in (query, key, value)
    )
    scores = np.einsum("thd,nhd->htn", q, k) * float(attributes.get("scale") or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores + np.asarray(mask, dtype=np.float64).reshape(-1, *mask.shape[-2:])
    if attributes.get("unidirectional"):
        scores += np.triu(np.full(scores.shape[1:], -np.inf), 1 + k.shape[0] - q.shape[0])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result = np.einsum("htn,nhd->thd", weights, v).reshape(1, q.shape[0], -1)
    return [result.astype(query.dtype)]


def _graph_past(model: OnnxModel, node: onnx.NodeProto) -> tuple[str, str]:
    """Return the op's past inputs; refuse anything but inputs of the model."""
    past = past_inputs(node)
    for name, what in zip(past, ("key", "value"), strict=True):
        if name not in model.past:
            raise BlinkError(
                f"{model.path}: {describe_node(node)}: its past {what} "
                + (f"'{name}' is not an input of the model" if name else "is missing"),
                hint="export with past key/value inputs",
            )
    return past


def _flat_sources(
    node: onnx.NodeProto,
    names: Sequence[str],
    num_heads: int,
    kv_heads: int,
    probes: Sequence[Probe],
) -> tuple[HeadsSource, HeadsSource, HeadsSource]:
    """Return q, k and v: three tensors, or one packed as q heads, then k heads, then v heads."""
    query_width = probes[0].shapes[names[0]][-1]
    if names[1] and names[2]:
        head_dim = query_width // num_heads
        return (
            _flat(names[0], num_heads, head_dim, None),
            _flat(names[1], kv_heads, head_dim, None),
            _flat(names[2], kv_heads, head_dim, None),
        )
    head_dim = query_width // (num_heads + 2 * kv_heads)
    edges = [0, num_heads, num_heads + kv_heads, num_heads + 2 * kv_heads]
    query, key, value = (
        _flat(names[0], stop - start, head_dim, (start * head_dim, stop * head_dim))
        for start, stop in pairwise(edges)
    )
    return query, key, value


def _flat(name: str, heads: int, head_dim: int, columns: tuple[int, int] | None) -> HeadsSource:
    return HeadsSource(
        name=name,
        heads=heads,
        head_dim=head_dim,
        token_axis=1,
        dim_axis=2,
        is_flat=True,
        columns=columns,
    )


def _check_positions(where: str, name: str, probes: Sequence[Probe]) -> None:
    """Check that explicit rotary positions are the tokens' positions."""
    for probe in probes:
        value = probe.value(name) if name else None
        if name and (
            value is None or not np.array_equal(value.ravel(), np.arange(probe.past, probe.total))
        ):
            raise BlinkError(f"{where}: its position_ids are not the tokens' positions")


def _refuse_attributes(
    where: str, attributes: dict[str, Any], known: set[str], neutral: dict[str, Any]
) -> None:
    for name, value in attributes.items():
        if name not in known and not (name in neutral and value == neutral[name]):
            raise BlinkError(f"{where}: attribute {name} = {value!r} is not supported")
