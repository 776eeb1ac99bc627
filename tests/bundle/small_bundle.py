"""A small bundle for tests, made without a compiler: the files are there, the code is not real."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np

from blinkc.bundle.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Limits,
    Manifest,
    PlanSummary,
    Target,
    Tokenizer,
    WeightEntry,
    manifest_to_bytes,
)
from blinkc.bundle.write_bundle import _list_files
from blinkc.bundle.write_weights import WEIGHTS_NAME, embed_weights
from blinkc.frontend.decoder_graph import WeightPart, WeightRef

LIMITS = Limits(
    max_batch=2,
    max_seqlen=64,
    max_prefill_tokens=32,
    max_prefill_batch=2,
    page_size_tokens=16,
    num_kv_pages=8,
    max_pages_per_lane=4,
    num_slots=4,
    num_front_ends=1,
    max_prompt_tokens=64,
    max_output_tokens=64,
    output_record_bytes=8,
    trace_capacity=16,
    sampler_features=7,
    vocab_size=50,
)


def inline_weight(name: str, *arrays: np.ndarray, dtype: str = "fp32") -> WeightRef:
    """Return a weight made of inline parts, concatenated along axis 0."""
    parts = tuple(
        WeightPart(
            source="inline", key=name, shape=array.shape, dtype="fp32", inline=array.tobytes()
        )
        for array in arrays
    )
    shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
    return WeightRef(name=name, shape=shape, dtype=dtype, parts=parts)


def some_weights() -> list[WeightRef]:
    """Return weights of awkward sizes: 12 bytes, a merged matrix, one float."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    return [
        inline_weight("norm", draw(3)),
        inline_weight("qkv", draw(4, 5), draw(2, 5), draw(2, 5)),
        inline_weight("bias", draw(1)),
    ]


def manifest_of(folder: Path, weights: tuple[WeightEntry, ...], **changes: Any) -> Manifest:
    """Return the manifest of the files in `folder`."""
    files: tuple[FileEntry, ...] = _list_files(folder)
    values: dict[str, Any] = {
        "schema_version": 1,
        "abi_version": 1,
        "model_name": "small",
        "architecture": "LlamaForCausalLM",
        "dtype": "fp32",
        "target": Target(
            name="cpu", machine=platform.machine(), library="code/target.so", engine="cpu"
        ),
        "limits": LIMITS,
        "plan": PlanSummary(
            plan="plan.json",
            num_prefill_keys=1,
            num_decode_keys=1,
            ring_bytes=1,
            kv_bytes=1,
            weight_bytes=1,
            arena_bytes=1,
            graph_bytes=0,
        ),
        "tokenizer": Tokenizer(),
        "tools": {"blinkc": "0.1.0"},
        "rebuild": "blinkc compile small --target cpu",
        "files": files,
        "weights": weights,
    }
    return Manifest.model_validate({**values, **changes})


def write_small_bundle(folder: Path) -> Manifest:
    """Write the bundle's files and manifest."""
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "target.so").write_bytes(b"\x7fELF not really")
    (folder / "plan.json").write_text("{}")
    weights = embed_weights(some_weights(), folder / WEIGHTS_NAME, lambda _: None)
    manifest = manifest_of(folder, weights)
    (folder / MANIFEST_NAME).write_bytes(manifest_to_bytes(manifest))
    return manifest
