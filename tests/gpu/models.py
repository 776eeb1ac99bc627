"""Tiny models of many architectures as GPU bundles: name and dtype -> checkpoint, bundle.

Made once and kept in .cache/gpu_models, under a digest of the config and of the compiler's source,
so that a machine with a GPU but without the compiler's packages can run what another one made:
`python -m tests.gpu.models` makes all of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blinkc.provenance import source_digest

CACHE = Path(__file__).parents[2] / ".cache" / "gpu_models"
VOCAB_SIZE = 512
# Sizes that the GPU's kernels take: attention heads of 64, 80, 96, 128 or 256.
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "model_type": "gpt2", "vocab_size": VOCAB_SIZE, "n_embd": 256, "n_layer": 2, "n_head": 4,
    "n_positions": 1024, "n_inner": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-bias": {
        "model_type": "llama", "tie_word_embeddings": True, "attention_bias": True,
        "mlp_bias": True, "num_key_value_heads": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 128},
    "qwen3-moe": {"model_type": "qwen3_moe", "head_dim": 64, "norm_topk_prob": True, **_EXPERTS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "mistral-window": {"model_type": "mistral", "sliding_window": 21},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 256, "query_pre_attn_scalar": 200, "sliding_window": 19,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 64, "query_pre_attn_scalar": 64,
        "sliding_window": 17, "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": _GPT2,
    "phi4-partial-rope": {
        "model_type": "phi3", "partial_rotary_factor": 0.5,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        },
    },
    "olmo2": {"model_type": "olmo2"},
    "cohere": {"model_type": "cohere", "logit_scale": 0.25, "use_qk_norm": True},
    "gpt-neox": {"model_type": "gpt_neox", "hidden_size": 320, "num_key_value_heads": None},
    "phi": {"model_type": "phi", "hidden_size": 384},
    "glm4": {"model_type": "glm4", "head_dim": 128},
}  # fmt: skip
CASES = [(name, "bf16") for name in CONFIGS] + [("llama", "fp16"), ("qwen3-moe", "fp16")]
LIMITS = {
    "max_batch": 4,
    "max_seqlen": 512,
    "max_prefill_tokens": 128,
    "num_slots": 16,
    "shapes": "decode:1,2,4@256,512/prefill:1,4@64,128",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModel:
    """Where a model lies."""

    checkpoint: Path
    bundle: Path


def tiny_model(name: str, dtype: str) -> TinyModel:
    """Return a model, made now unless it was made before from the same source."""
    stages = ("read", "segment", "engine", "capture", "codegen")
    parts = [json.dumps(config_of(name)), dtype, json.dumps(LIMITS), *map(source_digest, stages)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = CACHE / f"{name}-{dtype}-{digest}"
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        _make(name, dtype, part)
        part.rename(folder)
    return TinyModel(checkpoint=folder / "checkpoint", bundle=folder / "bundle")


def config_of(name: str) -> dict[str, Any]:
    """Return the settings of one entry of CONFIGS."""
    common = {} if CONFIGS[name] is _GPT2 else _COMMON
    settings = {**common, **CONFIGS[name]}
    return {key: value for key, value in settings.items() if value is not None}


def _make(name: str, dtype: str, folder: Path) -> None:
    from blinkc.bundle.write_bundle import BundleConfig, write_bundle
    from blinkc.capture.plan_capture import CaptureConfig
    from blinkc.config import CompileConfig
    from blinkc.pipeline import compile_model
    from blinkc.progress import Progress

    save_checkpoint(name, dtype, folder / "checkpoint")
    config = CompileConfig(
        model=str(folder / "checkpoint"),
        target="sm_90",
        engine="cuda",
        dtype=dtype,
        capture=CaptureConfig(target="sm_90", **LIMITS),  # type: ignore[arg-type]
    )
    compile_model(config, folder / "build")
    bundle = BundleConfig(
        build=folder / "build", output=folder / "bundle", embed_weights=False, cross_check=True
    )
    write_bundle(bundle, Progress(quiet=True))
    shutil.rmtree(folder / "build")


def save_checkpoint(name: str, dtype: str, folder: Path) -> None:
    """Write random weights of the dtype, so that nothing is rounded on the way to the GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = config_of(name)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the usual initialization: a lost bias, scale or cap must show.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]).save_pretrained(folder)


def main() -> None:
    """Make all models, or those named."""
    for name, dtype in CASES:
        if not sys.argv[1:] or name in sys.argv[1:]:
            print(name, dtype, tiny_model(name, dtype).bundle, flush=True)


if __name__ == "__main__":
    main()
