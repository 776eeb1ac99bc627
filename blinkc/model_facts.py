"""Reads a model's facts without exporting it: config -> `ModelFacts`, for `blinkc plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blinkc.capture.plan import DTYPE_BYTES
from blinkc.capture.plan_capture import weight_bytes
from blinkc.config import CompileConfig
from blinkc.errors import BlinkError
from blinkc.model_source import ModelSource, find_model

if TYPE_CHECKING:
    from blinkc.frontend.decoder_graph import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a plan needs to know about a model."""

    spec: ModelSpec
    num_weight_bytes: int  # in the type that is compiled for
    intermediate_size: int = 0  # of the layers' MLP; 0: not known


def facts_from_model(config: CompileConfig) -> ModelFacts:
    """Read facts: a checkpoint's from its config and a model without memory, ONNX's from the graph.

    Raises:
        BlinkError: the model is unknown, or its config lacks what a decoder has.
    """
    source = find_model(config.model)
    if source.is_onnx:
        from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx

        graph = decoder_graph_from_onnx(
            source.path, dtype=config.resolved_dtype, max_seqlen=config.capture.max_seqlen
        )
        return ModelFacts(spec=graph.spec, num_weight_bytes=weight_bytes(graph.weights))
    return _facts_from_checkpoint(config, source)


def _facts_from_checkpoint(config: CompileConfig, source: ModelSource) -> ModelFacts:
    from blinkc.frontend.hf_checkpoint import find_checkpoint, read_config
    from blinkc.frontend.hf_interfaces import interfaces
    from blinkc.frontend.hf_model import hollow_model

    checkpoint = find_checkpoint(source.reference)
    hf_config = read_config(checkpoint)
    with interfaces():
        hollow = hollow_model(hf_config, dtype=config.resolved_dtype, max_seqlen=config.rope_seqlen)
    unique = {names: hollow.model.get_parameter(names[0]) for names in hollow.tied.values()}
    text_config = hf_config.get_text_config()
    return ModelFacts(
        spec=_spec_from_config(text_config, checkpoint.name, config.resolved_dtype, hollow.notes),
        num_weight_bytes=_weight_bytes(config, hollow.model, list(unique.values())),
        intermediate_size=_intermediate_size(text_config),
    )


def _weight_bytes(config: CompileConfig, model: Any, parameters: list[Any]) -> int:
    """Sum the parameters; of a quantized model all matrices but its tables are taken for small."""
    tables = {
        id(parameter)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        for parameter in (module.parameters() if module is not None else ())
    }
    total = 0.0
    for parameter in parameters:
        width: float = DTYPE_BYTES[config.resolved_dtype]
        if config.quantization and len(parameter.shape) == 2 and id(parameter) not in tables:
            from blinkc.frontend.quantize_weights import BYTES_PER_WEIGHT

            width = BYTES_PER_WEIGHT[config.quantization]
        total += math.prod(parameter.shape) * width
    return int(total)


def _intermediate_size(hf: Any) -> int:
    """Return the MLP's size by the names that configs have for it, or the habit."""
    names = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    sizes = [size for name in names if isinstance(size := getattr(hf, name, None), int)]
    return sizes[0] if sizes else 4 * int(hf.hidden_size)


def _spec_from_config(hf: Any, name: str, dtype: str, notes: tuple[str, ...]) -> ModelSpec:
    from blinkc.frontend.decoder_graph import AttentionSpec, ExpertsSpec, ModelSpec

    try:
        num_layers, num_heads = int(hf.num_hidden_layers), int(hf.num_attention_heads)
        hidden, vocab = int(hf.hidden_size), int(hf.vocab_size)
    except (AttributeError, TypeError) as error:
        raise BlinkError(f"{name}: the config lacks what a decoder has: {error}") from error
    num_kv_heads = int(getattr(hf, "num_key_value_heads", None) or num_heads)
    head_dim = int(getattr(hf, "head_dim", None) or hidden // num_heads)
    num_experts = getattr(hf, "num_experts", None) or getattr(hf, "num_local_experts", None) or 0
    experts = tuple(
        ExpertsSpec(
            layer=layer,
            num_experts=int(num_experts),
            experts_per_token=int(getattr(hf, "num_experts_per_tok", 1)),
            intermediate_size=int(getattr(hf, "moe_intermediate_size", None) or 0),
            activation="",
        )
        for layer in range(num_layers if num_experts else 0)
    )
    return ModelSpec(
        name=name,
        architecture=(getattr(hf, "architectures", None) or [hf.model_type])[0],
        dtype=dtype,
        vocab_size=vocab,
        hidden_size=hidden,
        max_position_embeddings=int(getattr(hf, "max_position_embeddings", None) or 0),
        attention=tuple(
            AttentionSpec(
                layer=layer,
                num_q_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
            )
            for layer in range(num_layers)
        ),
        experts=experts,
        notes=notes,
    )
