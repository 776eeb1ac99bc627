"""Find attention spelled out in ONNX ops: graph, probes -> an `AttentionMatch` per softmax.

The search starts at each `Softmax` (or standard `Attention`) and walks outwards over scalings,
masks, casts and views; the KV cache is where a past input is concatenated. What was believed on the
way is then checked by running the region (`verify_attention`), so the walk may be generous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_attention import AttentionMatch, HeadsSource, heads_source
from blinkc.frontend.onnx_cache import (
    VIEWS,
    CacheJoin,
    check_all_tokens,
    find_cache_join,
    joined_heads,
    scalar_value,
)
from blinkc.frontend.onnx_masks import MASKED_BELOW, MaskUse, window_from_masks
from blinkc.frontend.onnx_model import ONNX_DOMAINS, OnnxModel, attribute_values, describe_node

if TYPE_CHECKING:
    import onnx

    from blinkc.frontend.onnx_probe import Probe


@dataclass(kw_only=True, slots=True)
class _Scores:
    """What lies between the product of queries and keys and the softmax."""

    product: onnx.NodeProto | None = None
    masks: list[MaskUse] = field(default_factory=list)
    scale: float = 1.0
    softcap: float = 0.0
    problem: str = ""


def match_attention_regions(
    model: OnnxModel, probes: Sequence[Probe], problems: dict[str, str]
) -> list[AttentionMatch]:
    """Return all matches, in the graph's order.

    `problems` collects, by softmax node, why one that looked like attention was not taken; the
    caller reports them if a past input stays unused.
    """
    matches = []
    for node in model.nodes:
        if node.domain not in ONNX_DOMAINS or not any(
            name in probes[0].unknown_data for name in node.input
        ):
            continue
        if node.op_type == "Softmax":
            match = _match_softmax(model, node, probes, problems)
        elif node.op_type == "Attention":
            match = _match_attention_op(model, node, probes)
        else:
            continue
        if match is not None:
            matches.append(match)
    return matches


def _match_softmax(
    model: OnnxModel, node: onnx.NodeProto, probes: Sequence[Probe], problems: dict[str, str]
) -> AttentionMatch | None:
    scores = _walk_scores(model, node.input[0], probes)
    if scores.product is None:
        if scores.problem:
            problems[describe_node(node)] = scores.problem
        return None
    joins = [find_cache_join(model, name, probes) for name in scores.product.input[:2]]
    if (joins[0] is None) == (joins[1] is None):
        raise BlinkError(
            f"{model.path}: {describe_node(scores.product)}: neither operand (or both) comes "
            "from a KV "
            "cache input",
            hint="cross attention and attention without a cache are not supported",
        )
    key_index = 0 if joins[0] is not None else 1
    key_join = joins[key_index]
    assert key_join is not None
    output = _walk_to_output(model, node, probes)
    if output is None:
        raise BlinkError(
            f"{model.path}: {describe_node(node)}: its result does not reach a product with "
            "cached values"
        )
    product, value_join = output
    check_all_tokens(model, scores.product, scores.product.input[key_index], probes)
    check_all_tokens(model, product, value_join.seen, probes)
    query, factor = _absorb_scalars(model, scores.product.input[1 - key_index], probes)
    softcap = scores.softcap
    match = AttentionMatch(
        node=node,
        query=heads_source(model, query, probes),
        key=joined_heads(model, key_join, probes),
        value=joined_heads(model, value_join, probes),
        output=heads_source(model, product.output[0], probes),
        past_key=key_join.past,
        past_value=value_join.past,
        scale=scores.scale * factor * key_join.factor,
        softcap=softcap,
        window=window_from_masks(model, node, scores.masks, probes),
    )
    return match


def _match_attention_op(
    model: OnnxModel, node: onnx.NodeProto, probes: Sequence[Probe]
) -> AttentionMatch:
    """Match the standard `Attention` op, its cache inside or concatenated in front of it."""
    attributes: dict[str, Any] = attribute_values(node)
    where = f"{model.path}: {describe_node(node)}"
    inputs = [*node.input, *[""] * (7 - len(node.input))]
    if attributes.get("qk_matmul_output_mode") and len(node.output) > 3 and node.output[3]:
        raise BlinkError(f"{where}: it returns its scores (qk_matmul_output)")
    if inputs[6]:
        raise BlinkError(f"{where}: it reads a fixed-size cache (nonpad_kv_seqlen)")
    is_flat = len(probes[0].shapes.get(inputs[0], ())) == 3
    kv_heads = attributes.get("kv_num_heads") if is_flat else None
    query_heads = attributes.get("q_num_heads") if is_flat else None
    query = attention_source(model, inputs[0], probes, query_heads)
    if inputs[4]:
        for name in (inputs[4], inputs[5]):
            if name not in model.past:
                raise BlinkError(f"{where}: its cache '{name}' is not an input of the model")
        past = (inputs[4], inputs[5])
        key = attention_source(model, inputs[1], probes, kv_heads)
        value = attention_source(model, inputs[2], probes, kv_heads)
    else:
        joins = [find_cache_join(model, name, probes) for name in inputs[1:3]]
        if joins[0] is None or joins[1] is None:
            raise BlinkError(
                f"{where}: its keys and values do not come from KV cache inputs",
                hint="cross attention and attention without a cache are not supported",
            )
        for name in inputs[1:3]:
            check_all_tokens(model, node, name, probes)
        past = (joins[0].past, joins[1].past)
        key, value = (joined_heads(model, join, probes) for join in joins if join is not None)
    left = int(attributes.get("left_window_size", -1))
    if int(attributes.get("right_window_size", -1)) > 0:
        raise BlinkError(f"{where}: it looks at later tokens (right_window_size)")
    masks = [MaskUse(node=node, name=inputs[3], kind="keep")] if inputs[3] else []
    window = window_from_masks(
        model,
        node,
        masks,
        probes,
        is_causal=bool(attributes.get("is_causal")) or attributes.get("right_window_size") == 0,
        window=left + 1 if left >= 0 else 0,
    )
    output = replace(query, name=node.output[0])
    return AttentionMatch(
        node=node,
        query=query,
        key=key,
        value=value,
        output=output,
        past_key=past[0],
        past_value=past[1],
        scale=float(attributes.get("scale") or query.head_dim**-0.5),
        softcap=float(attributes.get("softcap", 0.0)),
        window=window,
    )


def attention_source(
    model: OnnxModel, name: str, probes: Sequence[Probe], heads: int | None
) -> HeadsSource:
    """Return the layout of an attention op's operand: flat `[1, T, H * d]`, or heads apart."""
    if heads is None:
        return heads_source(model, name, probes)
    shape = probes[0].shapes[name]
    return HeadsSource(
        name=name,
        heads=heads,
        head_dim=shape[-1] // heads,
        token_axis=len(shape) - 2,
        dim_axis=len(shape) - 1,
        is_flat=True,
    )


def _walk_scores(model: OnnxModel, name: str, probes: Sequence[Probe]) -> _Scores:
    """Walk back from the softmax to the product of two tensors that both depend on data."""
    scores = _Scores()
    unknown = probes[0].unknown_data
    while True:
        node = model.producer.get(name)
        if node is None or node.domain not in ONNX_DOMAINS:
            return scores
        data = [i for i in node.input if i in unknown]
        known = [i for i in node.input if i and i not in unknown]
        op = node.op_type
        if op in ("MatMul", "Einsum") and len(data) == 2:
            scores.product = node
            return scores
        if len(data) != 1:
            scores.problem = f"{describe_node(node)} mixes the scores with other data"
            return scores
        if op == "Tanh":
            # softcap * tanh(inner): what multiplied so far is the cap, the rest is found further
            # on.
            scores.softcap, scores.scale = scores.scale, scores.scale
        elif op in ("Mul", "Div"):
            number = scalar_value(known[0], probes)
            if number is None or (op == "Div" and node.input[0] != data[0]):
                scores.problem = f"{describe_node(node)} scales the scores by a tensor"
                return scores
            scores.scale *= number if op == "Mul" else 1.0 / number
        elif op == "Add":
            scores.masks.append(MaskUse(node=node, name=known[0], kind="add"))
        elif op == "Where":
            scores.problem = _take_where(node, data[0], probes, scores)
            if scores.problem:
                return scores
        elif op == "Max" and (scalar_value(known[0], probes) or 0.0) <= MASKED_BELOW:
            pass  # clamps -inf to the type's minimum
        elif op not in VIEWS:
            if op not in ("Gemm", "MatMul", "TopK"):
                scores.problem = f"{describe_node(node)} is not expected between scores and softmax"
            return scores
        if scores.softcap and scores.masks and scores.masks[-1].node is node:
            scores.problem = f"{describe_node(node)} masks before the soft cap"
            return scores
        name = data[0]


def _take_where(node: onnx.NodeProto, data: str, probes: Sequence[Probe], scores: _Scores) -> str:
    """Record a mask applied by `Where`; return what is wrong with it, if anything."""
    condition, if_true, if_false = node.input
    if condition == data:
        return f"{describe_node(node)} chooses by the scores themselves"
    other = if_false if if_true == data else if_true
    number = scalar_value(other, probes)
    if number is None or number > MASKED_BELOW:
        return f"{describe_node(node)} replaces scores by something that is not a mask"
    kind = "keep" if if_true == data else "drop"
    scores.masks.append(MaskUse(node=node, name=condition, kind=kind))
    return ""


def _walk_to_output(
    model: OnnxModel, softmax: onnx.NodeProto, probes: Sequence[Probe]
) -> tuple[onnx.NodeProto, CacheJoin] | None:
    """Walk on from the softmax to its product with cached values."""
    name = softmax.output[0]
    for _ in range(16):
        following = [
            n for n in model.consumers.get(name, []) if n.op_type not in ("Shape", "IsNaN")
        ]
        if len(following) != 1:
            return None
        node = following[0]
        if node.op_type in ("MatMul", "Einsum"):
            other = next((i for i in node.input if i != name), "")
            join = find_cache_join(model, other, probes) if other else None
            return None if join is None else (node, join)
        if node.op_type not in VIEWS | {"Where", "Mul", "Add"}:
            return None
        name = node.output[0]
    return None


def _absorb_scalars(model: OnnxModel, name: str, probes: Sequence[Probe]) -> tuple[str, float]:
    """Step back over multiplications by numbers; return (queries, the numbers' product)."""
    factor = 1.0
    unknown = probes[0].unknown_data
    while True:
        node = model.producer.get(name)
        if node is None or node.op_type not in ("Mul", "Div"):
            return name, factor
        data = [i for i in node.input if i in unknown]
        known = [i for i in node.input if i not in unknown]
        number = scalar_value(known[0], probes) if len(data) == 1 and known else None
        if number is None or (node.op_type == "Div" and node.input[0] != data[0]):
            return name, factor
        factor *= number if node.op_type == "Mul" else 1.0 / number
        name = data[0]
