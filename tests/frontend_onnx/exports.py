"""Tiny random transformers models exported with past key values by torch's exporters."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.cache_utils import DynamicCache

VOCAB = 97
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@cache
def config_of(kind: str) -> PretrainedConfig:
    """Return the tiny configuration of an architecture."""
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=VOCAB,
            n_positions=128,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    if kind == "gptj":
        return GPTJConfig(
            vocab_size=VOCAB,
            n_positions=128,
            n_embd=32,
            n_layer=2,
            n_head=4,
            rotary_dim=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    if kind == "opt":
        return OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            word_embed_proj_dim=32,
            bos_token_id=1,
            eos_token_id=2,
        )
    if kind == "gpt_neox":
        return GPTNeoXConfig(**{k: v for k, v in _SIZES.items() if k != "num_key_value_heads"})
    configs: dict[str, Any] = {
        "llama": lambda: LlamaConfig(**_SIZES),
        "llama3_rope": lambda: LlamaConfig(
            **_SIZES,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        "qwen2": lambda: Qwen2Config(**_SIZES),
        "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=8),
        "phi": lambda: PhiConfig(**_SIZES, partial_rotary_factor=0.5),
        "phi3": lambda: Phi3Config(**_SIZES),
        "mistral": lambda: MistralConfig(**_SIZES, sliding_window=6),
        "gemma2": lambda: Gemma2Config(**_SIZES, head_dim=8, sliding_window=6),
    }
    config: PretrainedConfig = configs[kind]()
    return config


class WithPast(torch.nn.Module):
    """The model with its cache as a flat list of tensors, as every exporter lays it out."""

    def __init__(self, model: Any, takes_positions: bool) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = takes_positions

    def forward(self, input_ids: Any, attention_mask: Any, *rest: Any) -> tuple[Any, ...]:
        past = rest[1:] if self.takes_positions else rest
        cache_object = DynamicCache()
        for index in range(len(past) // 2):
            cache_object.update(past[2 * index], past[2 * index + 1], index)
        extra = {"position_ids": rest[0]} if self.takes_positions else {}
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=cache_object,
            use_cache=True,
            **extra,
        )
        presents = [t for layer in cache_object.layers for t in (layer.keys, layer.values)]
        return (output.logits, *presents)


def random_model(kind: str, attention: str) -> Any:
    """Return the model with random weights, norms and biases included."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
    return model


def export_model(
    path: Path,
    kind: str,
    *,
    dynamo: bool,
    attention: str = "sdpa",
    opset: int = 18,
    takes_positions: bool = True,
    is_half: bool = False,
) -> Path:
    """Export `kind` with dynamic batch, sequence and past lengths."""
    config = config_of(kind)
    dtype = torch.float16 if is_half else torch.float32
    model = WithPast(random_model(kind, attention).to(dtype), takes_positions)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    batch, seq, past_length, layers = 2, 3, 5, config.num_hidden_layers
    args = [
        torch.randint(0, VOCAB, (batch, seq)),
        torch.ones(batch, seq + past_length, dtype=torch.long),
    ]
    names = ["input_ids", "attention_mask"]
    axes: list[dict[int, str]] = [{0: "batch", 1: "seq"}, {0: "batch", 1: "total"}]
    if takes_positions:
        args.append(torch.arange(past_length, past_length + seq)[None].repeat(batch, 1))
        names.append("position_ids")
        axes.append({0: "batch", 1: "seq"})
    outputs = ["logits"]
    for index in range(layers):
        for what in ("key", "value"):
            args.append(torch.randn(batch, heads, past_length, head_dim, dtype=dtype))
            names.append(f"past_key_values.{index}.{what}")
            axes.append({0: "batch", 2: "past"})
            outputs.append(f"present.{index}.{what}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            dims = [{axis: torch.export.Dim.DYNAMIC for axis in a} for a in axes]
            torch.onnx.export(
                model,
                tuple(args),
                str(path),
                dynamo=True,
                dynamic_shapes=(dims[0], dims[1], tuple(dims[2:])),
                opset_version=opset,
                input_names=names,
                output_names=outputs,
                external_data=False,
                verbose=False,
            )
        else:
            torch.onnx.export(
                model,
                tuple(args),
                str(path),
                dynamo=False,
                dynamic_axes=dict(zip(names, axes, strict=True)),
                opset_version=opset,
                input_names=names,
                output_names=outputs,
            )
    return path
