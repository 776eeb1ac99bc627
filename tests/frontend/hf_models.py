"""Tiny random models of many architectures, and transformers' own answer to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# GPT-2 has names of its own for all of these.
_WITHOUT_USUAL_NAMES = dict.fromkeys(
    (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("max_position_embeddings", "intermediate_size"),
    )
)

# name -> (model type, what differs from _COMMON); None takes a key away.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-bias": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "phi3": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "phi4-partial-rope": (
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, **_MOE, "norm_topk_prob": True}),
    "qwen2-moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 40}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4}
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 24}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 48}
        | _WITHOUT_USUAL_NAMES,
    ),
    "gpt-neox": ("gpt_neox", {"num_key_value_heads": None}),
    "gpt-neox-sequential": (
        "gpt_neox",
        {"num_key_value_heads": None, "use_parallel_residual": False},
    ),
    "phi": ("phi", {}),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 6, "use_bias": True}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
        | {"attention_multiplier": 0.3},
    ),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": (
        "cohere2",
        {"sliding_window": 4}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "glm": ("glm", {"head_dim": 8, "pad_token_id": 0}),
    "glm4": ("glm4", {"head_dim": 8}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "nemotron": ("nemotron", {"head_dim": 8}),
    "exaone4": ("exaone4", {"sliding_window": 4, "sliding_window_pattern": 3}),
    "ernie4-5": ("ernie4_5", {"head_dim": 8}),
    "helium": ("helium", {"head_dim": 8}),
    "seed-oss": ("seed_oss", {"head_dim": 8}),
    "arcee": ("arcee", {"head_dim": 8}),
    "apertus": ("apertus", {}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 8}),
    "glm4-moe": (
        "glm4_moe",
        {"head_dim": 8, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 2}
        | {"moe_intermediate_size": 16, "topk_group": 1, "num_experts_per_tok": 2},
    ),
    "granite-moe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gptj": ("gptj", {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4}),
    "codegen": ("codegen", {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4}),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo3": ("olmo3", {"sliding_window": 4}),
    "persimmon": ("persimmon", {}),
    "biogpt": ("biogpt", {}),
    "bert-decoder": ("bert", {"is_decoder": True}),
    "bitnet": ("bitnet", {}),
    "ernie4-5-moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    ),
    "flex-olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": (
        "opt",
        {
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "num_key_value_heads": None,
            "intermediate_size": None,
        },
    ),
    "gpt-bigcode": (
        "gpt_bigcode",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 48}
        | _WITHOUT_USUAL_NAMES,
    ),
}


def make_config(name: str) -> Any:
    """Build the tiny config of one entry of CONFIGS."""
    from transformers import AutoConfig

    model_type, changes = CONFIGS[name]
    settings = {k: v for k, v in {**_COMMON, **changes}.items() if v is not None}
    return AutoConfig.for_model(model_type, **settings)


def save_tiny_model(config: Any, folder: Path, *, seed: int = 0) -> Any:
    """Write a random checkpoint as transformers would; return the model, attention eager."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the usual initialization: a lost bias, scale or cap must show in the
            # logits.
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.eval()
    model.save_pretrained(folder)
    return model


def eager_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Return transformers' logits of every token, `[n, V]`, without any cache."""
    import torch

    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return np.asarray(out.float().numpy())
