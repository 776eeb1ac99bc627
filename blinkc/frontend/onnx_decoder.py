"""An ONNX decoder -> `DecoderGraph`: packed tokens, `blink::` nodes, weights as inputs.

Three dialects, also mixed in one file: com.microsoft's GroupQueryAttention and its fused
neighbours, the standard `Attention` op, and attention spelled out in primitive ops around past
inputs and present outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import AttentionSpec, DecoderGraph, ModelSpec
from blinkc.frontend.onnx_attention import AttentionMatch, verify_attention
from blinkc.frontend.onnx_attention_ops import match_contrib_attention
from blinkc.frontend.onnx_attention_region import match_attention_regions
from blinkc.frontend.onnx_config import ModelFacts, read_model_facts
from blinkc.frontend.onnx_meaning import MeaningOf
from blinkc.frontend.onnx_model import OnnxModel, describe_node, read_onnx_model
from blinkc.frontend.onnx_probe import Probe
from blinkc.frontend.onnx_weights import ELEMENT_TYPES

if TYPE_CHECKING:
    from blinkc.frontend.onnx_emit import DecoderEmitter

_UNKNOWN_POSITIONS = 2048  # assumed when no file says how long a sequence may be
_FILE_NAMES = ("model.onnx", "onnx/model.onnx", "decoder_model_merged.onnx", "decoder_model.onnx")


def decoder_graph_from_onnx(
    path: Path,
    *,
    dtype: str,
    max_seqlen: int | None = None,
    config_path: Path | None = None,
) -> DecoderGraph:
    """Read an ONNX decoder.

    Args:
        path: the .onnx file, or the folder that holds it.
        dtype: type of weights and activations in the graph: "fp32", "fp16" or "bf16".
        max_seqlen: longest sequence to serve, in tokens; what depends on length is fixed for it.
        config_path: config.json or its folder; default: beside the model.

    Raises:
        BlinkError: the model is not a decoder that can be served; the message names the node and
        why.
    """
    from blinkc.frontend.onnx_branches import hoist_constants, inline_branches, skip_identities
    from blinkc.frontend.onnx_check import check_nodes

    path = _model_file(Path(path))
    model = read_onnx_model(path)
    check_nodes(model)
    facts = read_model_facts(path, Path(config_path) if config_path else None)
    limit = _position_limit(model, facts, max_seqlen)
    inline_branches(model, limit)
    check_nodes(model)
    hoist_constants(model)
    skip_identities(model)
    probes = [Probe(model, seq=s, past=p) for s, p in _sizes(limit)]
    matches = find_attention(model, probes)
    meaning = MeaningOf(model, probes)
    return _write(model, meaning, matches, facts, dtype, limit)


def find_attention(model: OnnxModel, probes: Sequence[Probe]) -> list[AttentionMatch]:
    """Find every attention layer, prove what was matched, and account for every KV input."""
    problems: dict[str, str] = {}
    matches = match_contrib_attention(model, probes)
    matches += match_attention_regions(model, probes, problems)
    for match in matches:
        if match.needs_proof:
            verify_attention(model, match, probes[:-1])
    order = {id(node): index for index, node in enumerate(model.nodes)}
    matches.sort(key=lambda match: order[id(match.node)])
    used = [name for match in matches for name in (match.past_key, match.past_value)]
    for name in model.past:
        if used.count(name) == 1:
            continue
        if name in used:
            raise BlinkError(
                f"{model.path}: KV input '{name}' serves {used.count(name)} attention layers"
            )
        users = [node for node in model.consumers.get(name, []) if node.op_type != "Shape"]
        where = describe_node(users[0]) if users else "no node"
        reasons = "; ".join(dict.fromkeys(problems.values()))
        raise BlinkError(
            f"{model.path}: no attention was recognized around KV input '{name}', read by {where}"
            + (f": {reasons}" if reasons else ""),
            hint="supported: GroupQueryAttention, the standard Attention op, and attention as "
            "torch.onnx and optimum export it",
        )
    return matches


def _write(
    model: OnnxModel,
    meaning: MeaningOf,
    matches: Sequence[AttentionMatch],
    facts: ModelFacts,
    dtype: str,
    limit: int,
) -> DecoderGraph:
    """Write the new graph and its facts."""
    from blinkc.frontend.onnx_emit import DecoderEmitter
    from blinkc.frontend.onnx_head import emit_head, find_head
    from blinkc.frontend.onnx_lower import HANDLERS
    from blinkc.frontend.onnx_lower_fused import FUSED_HANDLERS
    from blinkc.frontend.onnx_writer import GraphWriter

    model_type = _float_type(model, meaning)
    writer = GraphWriter(model_type=model_type, float_type=ELEMENT_TYPES[dtype])
    emitter = DecoderEmitter(model, meaning, writer, matches, {**HANDLERS, **FUSED_HANDLERS})
    head = find_head(model, meaning)
    emitter.emit([head.hidden, *_operands_of_head(emitter, head.product, head.after)])
    logits = emit_head(emitter, head)
    proto = writer.finish(logits)
    attention = tuple(
        AttentionSpec(
            layer=layer,
            num_q_heads=match.query.heads,
            num_kv_heads=match.key.heads,
            head_dim=match.query.head_dim,
            scale=float(match.scale),
            window=match.window,
            softcap=match.softcap,
        )
        for layer, match in enumerate(matches)
    )
    spec = ModelSpec(
        name=facts.name,
        architecture=facts.architecture,
        dtype=dtype,
        vocab_size=meaning.shape(model.logits)[-1],
        hidden_size=meaning.shape(head.hidden)[-1],
        max_position_embeddings=limit,
        attention=attention,
        bos_token_id=facts.bos_token_id,
        eos_token_ids=facts.eos_token_ids,
        notes=tuple(model.notes),
    )
    return DecoderGraph(spec=spec, model=proto, weights=dict(writer.weights))


def _operands_of_head(
    emitter: DecoderEmitter, product: object, after: Sequence[object]
) -> list[str]:
    """Return what LM head and the nodes after it read besides the hidden states."""
    import onnx

    unknown = emitter.meaning.probes[0].unknown_data
    return [
        name
        for node in (product, *after)
        if isinstance(node, onnx.NodeProto)
        and node.op_type not in ("Reshape", "Squeeze", "Unsqueeze")
        for name in node.input
        if name and name not in unknown and node.op_type != "MatMulNBits"
    ]


def _model_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in _FILE_NAMES:
        if (path / name).is_file():
            return path / name
    found = sorted(path.glob("*.onnx"))
    if len(found) == 1:
        return found[0]
    raise BlinkError(f"{path}: holds {len(found)} ONNX files", hint="name the file itself")


def _sizes(limit: int) -> list[tuple[int, int]]:
    """Return (new, past) sizes: no past, some past, and the longest sequence last."""
    if limit < 20:
        raise BlinkError(f"max_seqlen is {limit}, at least 20 is needed", hint="raise --max-seqlen")
    return [(7, 0), (5, 11), (3, limit - 3)]


def _position_limit(model: OnnxModel, facts: ModelFacts, max_seqlen: int | None) -> int:
    """Return the longest sequence: what was asked for, but no more than the model's own limit."""
    known = [facts.max_positions] if facts.max_positions else []
    for node in model.nodes:
        cos = {"GroupQueryAttention": 7, "RotaryEmbedding": 2 if node.domain else 1}.get(
            node.op_type
        )
        if cos is not None and len(node.input) > cos and node.input[cos] in model.initializers:
            known.append(int(model.initializers[node.input[cos]].dims[0]))
    if max_seqlen is None:
        if not known:
            model.notes.append(f"max_seqlen: not stated anywhere, {_UNKNOWN_POSITIONS} assumed")
        return min(known, default=_UNKNOWN_POSITIONS)
    return min([max_seqlen, *known])


def _float_type(model: OnnxModel, meaning: MeaningOf) -> int:
    """Return the model's own float type: that of its KV cache."""
    return meaning.element_type(model.past[0])
