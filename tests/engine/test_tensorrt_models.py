"""Real segments become TensorRT-RTX plans for GPUs that are not here, in seconds and megabytes.

Equal layers are one segment, so three layers give the same segments as thirty-two.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from blinkc.capture.plan_capture import CaptureConfig, plan_capture
from blinkc.engine.options import EngineOptions
from blinkc.engine.tensorrt_api import load_tensorrt
from blinkc.engine.tensorrt_model import engine_model
from blinkc.engine.tensorrt_plans import BuiltPlan, build_plans
from blinkc.engine.tensorrt_profiles import plan_ranges
from blinkc.frontend.hf import decoder_graph_from_hf
from blinkc.surgery import segment_decoder
from blinkc.surgery.segments import SegmentedModel
from tests.frontend.hf_models import CONFIGS, make_config

pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
TARGETS = ("sm_89", "sm_120")
IN_CI = ("qwen3-moe",)
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}  # fmt: skip
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rope_theta": 100000.0, "tie_word_embeddings": True,
}  # fmt: skip


def segmented(config: Any, folder: Path, dtype: str = "bf16") -> SegmentedModel:
    config.save_pretrained(folder)
    graph = decoder_graph_from_hf(
        str(folder), dtype=dtype, max_seqlen=config.max_position_embeddings, random_weights_seed=1
    )
    return segment_decoder(graph)


def plans_of(
    model: SegmentedModel, folder: Path, num_profiles: int, **limits: int
) -> tuple[list[BuiltPlan], float]:
    """Return the plans, and the seconds of building them in processes that had to start."""
    api = load_tensorrt("tensorrt-rtx")
    plan = plan_capture(model, CaptureConfig(target="sm_89,sm_120", **limits))
    models = [engine_model(segment, api.traits) for segment in model.segments]
    started = time.monotonic()
    plans = build_plans(
        api,
        models,
        plan_ranges(plan.keys, num_profiles),
        folder,
        targets=TARGETS,
        gpu="",
        options=EngineOptions(),
    )
    return plans, time.monotonic() - started


@pytest.mark.parametrize(("name", "sizes"), [("Llama-3-8B", LLAMA_8B), ("SmolLM2-135M", SMOLLM2)])
def test_plans_of_a_model_are_small(
    name: str, sizes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are inputs: an 8B model's plans are as small as a 135M model's."""
    from transformers import LlamaConfig

    config = LlamaConfig(num_hidden_layers=3, **sizes)
    limits = {"num_kv_pages": 512, "max_batch": 64, "memory_budget_bytes": 40 << 30}
    model = segmented(config, tmp_path)
    assert len(model.segments) == 3
    for num_profiles, most_bytes in ((1, 5_000_000), (5, 20_000_000)):
        plans, seconds = plans_of(model, tmp_path / str(num_profiles), num_profiles, **limits)
        size = sum(plan.path.stat().st_size for plan in plans)
        with capsys.disabled():
            print(
                f"\n{name} for {', '.join(TARGETS)}, {num_profiles} profiles: {len(plans)} plans, "
                f"{size / 1e6:.2f} MB, {sum(p.seconds for p in plans):.1f} s "
                f"({seconds:.1f} s with starting)"
            )
        assert size < most_bytes


@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS],
)
def test_every_segment_of_an_architecture_builds(name: str, tmp_path: Path) -> None:
    model = segmented(make_config(name), tmp_path / "model")
    plans, _ = plans_of(model, tmp_path / "plans", 2, max_seqlen=64, max_batch=4)
    assert [plan.segment for plan in plans] == [segment.name for segment in model.segments]
