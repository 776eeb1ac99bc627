"""Compiles the benchmark models without weights -> folders that bench_gpu.py runs on a GPU.

`python -m benchmarks.prepare_gpu FOLDER [NAME ...]`; needs no GPU and no network. Shapes of public
models, written out here; weights are made at random on the GPU, so their values are nobody's. An
invented tokenizer gives every id a text of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blinkc.bundle.compile_tokenizer import compile_tokenizer

_COMMON = {
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
LLAMA_8B = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
QWEN3_30B_A3B = {
    **_COMMON,
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TWO_LAYERS = {
    **LLAMA_8B,
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# Every 1,024 tokens: a step pays for its bucket's tokens, and requests seldom come all at once.
SERVED = "prefill:1,2,4,8,16@64..512x2,1024..16384+1024/decode:1,2,4,8,16,32,64@256..2048x2"
MANY = "prefill:1,2,4@64..2048+64/decode:1..64@256..2048+256,64,128,384"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkModel:
    """What to compile for one folder."""

    name: str
    config: dict[str, Any]
    shapes: str
    max_batch: int = 64
    max_seqlen: int = 2048
    max_prefill_tokens: int = 16384  # sixteen prompts of 1024 a step: fewer, fuller steps
    num_kv_pages: int = 8192
    has_bundle: bool = False  # also as a bundle, for `blink-runtime run`


MODELS = (
    BenchmarkModel(name="llama8b", config=LLAMA_8B, shapes=SERVED),
    BenchmarkModel(
        name="llama8b_cache", config=LLAMA_8B, shapes=MANY, max_prefill_tokens=2048, has_bundle=True
    ),
    BenchmarkModel(name="qwen3moe", config=QWEN3_30B_A3B, shapes=SERVED),
    BenchmarkModel(
        name="two_layers",
        config=TWO_LAYERS,
        shapes="prefill:1@64,512/decode:1@512..4096x2",
        max_batch=1,
        max_seqlen=4096,
        max_prefill_tokens=512,
        num_kv_pages=512,
        has_bundle=True,
    ),
)


def invented_tokenizer(vocab_size: int) -> str:
    """Return a byte-level tokenizer.json with `vocab_size` ids: bytes, then numbered words."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120w{number}" for number in range(vocab_size - len(letters))]
    vocab = {text: number for number, text in enumerate([*letters, *words])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    )


def prepare(model: BenchmarkModel, root: Path) -> Path:
    """Compile one model; a build of the same config is taken up where it is."""
    name = f"{model.config['model_type']}-{model.config['num_hidden_layers']}"
    source = root / "configs" / name
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(json.dumps(model.config))
    tokenizer = invented_tokenizer(int(model.config["vocab_size"]))
    (source / "tokenizer.json").write_text(tokenizer)
    build, folder = root / "builds" / name, root / model.name
    blinkc = [sys.executable, "-m", "blinkc.cli"]
    limits = [
        "--max-seqlen", str(model.max_seqlen), "--max-batch", str(model.max_batch),
        "--num-slots", "256",
        "--max-prefill-tokens", str(model.max_prefill_tokens),
        "--num-kv-pages", str(model.num_kv_pages), "--shapes", model.shapes,
    ]  # fmt: skip
    compile_command = [
        *blinkc, "compile", str(source), "--target", "sm_90", "--random-weights", "1", *limits,
        "-o", str(build),
    ]  # fmt: skip
    subprocess.run(compile_command, check=True)
    script = str(Path(__file__).with_name("prepare_model.py"))
    subprocess.run([sys.executable, script, str(build), str(source), str(folder)], check=True)
    (folder / "tokenizer.blob").write_bytes(compile_tokenizer(tokenizer))
    if model.has_bundle:
        shutil.rmtree(folder / "bundle", ignore_errors=True)
        subprocess.run([*blinkc, "bundle", str(build), "-o", str(folder / "bundle")], check=True)
    return folder


def main() -> None:
    """Prepare the named models, or all."""
    root, names = Path(sys.argv[1]), sys.argv[2:]
    for model in MODELS:
        if not names or model.name in names:
            print(f"{model.name}: {prepare(model, root)}", flush=True)


if __name__ == "__main__":
    main()
