"""The HuggingFace road: checkpoint, GGUF file or hub id in, graph and weight references out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import (
    AttentionSpec,
    DecoderGraph,
    ExpertsSpec,
    ModelSpec,
    WeightRef,
)
from blinkc.frontend.hf_checkpoint import (
    Checkpoint,
    eos_token_ids,
    find_checkpoint,
    list_tensors,
    read_config,
)

if TYPE_CHECKING:
    import onnx

    from blinkc.frontend.hf_model import HollowModel
    from blinkc.frontend.hf_weights import GraphWeights

DTYPES = ("fp32", "fp16", "bf16")


def decoder_graph_from_hf(
    path_or_id: str,
    *,
    dtype: str,
    max_seqlen: int | None,
    random_weights_seed: int | None = None,
    cache_dir: Path | None = None,
) -> DecoderGraph:
    """Export a decoder once, from tensors without memory; weights stay where they are.

    `max_seqlen` (tokens) fixes rope scaling that depends on length; None takes the config's
    limit. With `random_weights_seed` a config.json is enough. `cache_dir` holds what must be
    rewritten (GGUF).

    Raises:
        BlinkError: the model cannot be compiled; the message names the node or file and the reason.
    """
    if dtype not in DTYPES:
        raise BlinkError(f"dtype `{dtype}` is none of {', '.join(DTYPES)}")
    checkpoint = find_checkpoint(path_or_id)
    config = read_config(checkpoint)

    from blinkc.frontend.hf_export import export_decoder
    from blinkc.frontend.hf_guard import check_token_independence
    from blinkc.frontend.hf_interfaces import interfaces
    from blinkc.frontend.hf_model import hollow_model

    limit = int(getattr(config, "max_position_embeddings", None) or 0)
    with interfaces():
        hollow = hollow_model(config, dtype=dtype, max_seqlen=max_seqlen or limit or 4096)
        check_token_independence(hollow.model)
    model = export_decoder(hollow)
    graph_weights = _graph_weights(model)
    weights, unused = _find_weights(
        checkpoint, hollow, graph_weights, dtype, random_weights_seed, cache_dir
    )
    notes = (*hollow.notes, *_note_of_unused(unused))
    spec = _model_spec(checkpoint, config, model, dtype, limit, notes)
    return DecoderGraph(spec=spec, model=model, weights=weights)


def _graph_weights(model: onnx.ModelProto) -> GraphWeights:
    from blinkc.frontend.hf_export import STEP_INPUTS

    names = {1: "fp32", 10: "fp16", 16: "bf16", 6: "int32", 7: "int64", 9: "bool"}
    return {
        value.name: (
            tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim),
            names[value.type.tensor_type.elem_type],
        )
        for value in model.graph.input
        if value.name not in STEP_INPUTS
    }


def _find_weights(
    checkpoint: Checkpoint,
    hollow: HollowModel,
    graph_weights: GraphWeights,
    dtype: str,
    seed: int | None,
    cache_dir: Path | None,
) -> tuple[dict[str, WeightRef], list[str]]:
    """Return the weights and the names of the checkpoint's tensors that none of them takes."""
    from blinkc.frontend.hf_materialize import materialize_checkpoint
    from blinkc.frontend.hf_weights import (
        UnmappedError,
        random_references,
        references_from_checkpoint,
        unused_tensors,
    )

    if seed is not None:
        return random_references(graph_weights, hollow, seed), []
    if checkpoint.gguf is None:
        tensors = list_tensors(checkpoint.folder)
        try:
            references = references_from_checkpoint(graph_weights, hollow, tensors)
            return references, unused_tensors(hollow, tensors, references)
        except UnmappedError:
            pass  # transformers itself must do it
    tensors = materialize_checkpoint(checkpoint, dtype=dtype, cache_dir=cache_dir)
    return references_from_checkpoint(graph_weights, hollow, tensors), []


def _note_of_unused(names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    number = "a tensor" if len(names) == 1 else f"{len(names)} tensors"
    return (f"{number} of the checkpoint have no use in the model of config.json: {some}",)


def _model_spec(
    checkpoint: Checkpoint,
    config: Any,
    model: onnx.ModelProto,
    dtype: str,
    limit: int,
    notes: tuple[str, ...],
) -> ModelSpec:
    architectures = getattr(config, "architectures", None) or [config.model_type]
    bos = getattr(config, "bos_token_id", None)
    return ModelSpec(
        name=checkpoint.name,
        architecture=architectures[0],
        dtype=dtype,
        vocab_size=model.graph.output[0].type.tensor_type.shape.dim[1].dim_value,
        hidden_size=config.hidden_size,
        max_position_embeddings=limit,
        attention=_attention_specs(model),
        experts=_experts_specs(model),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=eos_token_ids(checkpoint, config),
        notes=notes,
    )


def _shapes(model: onnx.ModelProto) -> dict[str, list[int]]:
    values = [*model.graph.value_info, *model.graph.input]
    return {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values
    }


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    import onnx

    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def _attention_specs(model: onnx.ModelProto) -> tuple[AttentionSpec, ...]:
    shapes = _shapes(model)
    nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    specs = []
    for layer, node in enumerate(nodes):
        attributes = _attributes(node)
        _, num_q_heads, head_dim = shapes[node.input[0]]
        specs.append(
            AttentionSpec(
                layer=layer,
                num_q_heads=num_q_heads,
                num_kv_heads=shapes[node.input[1]][1],
                head_dim=head_dim,
                scale=attributes["scale"],
                window=attributes["window"],
                softcap=attributes["softcap"],
            )
        )
    return tuple(specs)


def _experts_specs(model: onnx.ModelProto) -> tuple[ExpertsSpec, ...]:
    shapes = _shapes(model)
    nodes = [node for node in model.graph.node if node.op_type == "MoeExperts"]
    specs = []
    for layer, node in enumerate(nodes):
        num_experts, _, intermediate_size = shapes[node.input[4]]
        specs.append(
            ExpertsSpec(
                layer=layer,
                num_experts=num_experts,
                experts_per_token=shapes[node.input[1]][1],
                intermediate_size=intermediate_size,
                activation=_attributes(node)["activation"].decode(),
            )
        )
    return tuple(specs)
