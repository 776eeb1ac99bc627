"""The command that makes a build again: a compile's config -> words for a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from blinkc.config import CompileConfig

COMMAND_NAME = "command.json"  # in the BUILD folder, of the compile that was last there


def compile_command(config: CompileConfig) -> str:
    """Return `blinkc compile` with all that decides the build, to be pasted into a shell.

    It travels with the bundle, so it holds no path of the machine that compiled: a model on disk is
    $MODEL there, and without it the shell says which one is meant. A hub id stands as it is.
    """
    capture, engine = config.capture, config.engine_options
    options: dict[str, object] = {
        "--target": config.target,
        "--shapes": capture.shapes if capture.shapes != "auto" else None,
        "--max-batch": capture.max_batch,
        "--max-seqlen": capture.max_seqlen,
        "--max-prefill-tokens": capture.max_prefill_tokens,
        "--num-slots": capture.num_slots,
        "--num-kv-pages": capture.num_kv_pages,
        "--num-front-ends": capture.num_front_ends if capture.num_front_ends != 1 else None,
        "--memory-budget": capture.memory_budget_bytes,
        "--dtype": config.dtype,
        "--quantization": config.quantization,
        "--engine": config.engine if config.engine != "auto" else None,
        "--random-weights": config.random_weights_seed,
        "--engine-level": engine.level,
        "--engine-seconds": engine.budget_s or None,
        "--engine-profiles": engine.num_profiles,
        "--engine-workspace": engine.max_workspace_bytes,
    }
    words = ["blinkc", "compile", _place_of(config.model, "MODEL")]
    if config.tokenizer is not None:
        words += ["--tokenizer", _place_of(str(config.tokenizer), "TOKENIZER")]
    for name, value in options.items():
        words += [name, shlex.quote(str(value))] if value is not None else []
    if capture.logprobs is not None:
        words.append("--logprobs" if capture.logprobs else "--no-logprobs")
    return " ".join([*words, "-o BUILD"])


def _place_of(given: str, variable: str) -> str:
    """Return a variable for what lies on this machine's disk; the shell refuses it while unset."""
    path = Path(given)
    if not path.exists():
        return shlex.quote(given)
    name = "".join(c for c in path.resolve().name if c.isalnum() or c in " -_.+@")
    return f'"${{{variable}:?set it to where {name} lies}}"'
