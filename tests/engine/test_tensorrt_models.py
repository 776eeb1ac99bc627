"""Real segments become TensorRT-RTX plans for GPUs that are not here, in seconds and megabytes.

Equal layers are one segment, so two or three layers give the same segments as thirty-two.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from blinkc.capture.plan_capture import CaptureConfig, plan_capture
from blinkc.engine.options import EngineOptions
from blinkc.engine.tensorrt_api import TensorRtApi, check_quantized_targets, load_tensorrt
from blinkc.engine.tensorrt_build import TensorRtConfig, build_plan
from blinkc.engine.tensorrt_model import engine_model
from blinkc.engine.tensorrt_plans import BuiltPlan, build_plans
from blinkc.engine.tensorrt_profiles import RowRange, plan_ranges
from blinkc.errors import BlinkError
from blinkc.frontend.hf import decoder_graph_from_hf
from blinkc.surgery import segment_decoder
from blinkc.surgery.quantize_products import quantize_products
from blinkc.surgery.segments import Segment, SegmentedModel
from tests.frontend.hf_models import CONFIGS, make_config

pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
TARGETS = ("sm_89", "sm_120")
# All others have one kind of middle layer.
LAYERS_DIFFER = (
    "qwen2-window", "gemma2", "gemma3", "cohere2", "smollm3", "exaone4", "glm4-moe", "olmo3",
)  # fmt: skip
RANGES = (
    RowRange(min_tokens=1, opt_tokens=1, max_tokens=1),
    RowRange(min_tokens=1, opt_tokens=16, max_tokens=64, opt_samples=2, max_samples=4),
)
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
SHAPES = {"Llama-3-8B": LLAMA_8B, "SmolLM2-135M": SMOLLM2}


def segmented(config: Any, folder: Path, dtype: str = "bf16") -> SegmentedModel:
    config.save_pretrained(folder)
    graph = decoder_graph_from_hf(
        str(folder), dtype=dtype, max_seqlen=config.max_position_embeddings, random_weights_seed=1
    )
    return segment_decoder(graph)


def plans_of(
    model: SegmentedModel, folder: Path, num_profiles: int
) -> tuple[list[BuiltPlan], float]:
    """Return the plans, and the seconds of building them in processes that had to start."""
    api = load_tensorrt("tensorrt-rtx")
    config = CaptureConfig(
        target=",".join(TARGETS), num_kv_pages=512, max_batch=64, memory_budget_bytes=40 << 30
    )
    plan = plan_capture(model, config)
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


@pytest.fixture(scope="module")
def api() -> TensorRtApi:
    return load_tensorrt("tensorrt-rtx")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SegmentedModel]:
    """Public shapes by name, each exported once."""
    from transformers import LlamaConfig

    @cache
    def made(name: str) -> SegmentedModel:
        config = LlamaConfig(num_hidden_layers=3, **SHAPES[name])
        return segmented(config, tmp_path_factory.mktemp("shape"))

    return made


@pytest.mark.parametrize("name", SHAPES)
def test_plans_of_a_model_are_small(
    name: str,
    shapes: Callable[[str], SegmentedModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Weights are inputs: an 8B model's plans are as small as a 135M model's."""
    model = shapes(name)
    assert len(model.segments) == 3
    for num_profiles, most_bytes in ((1, 5_000_000), (5, 20_000_000)):
        plans, seconds = plans_of(model, tmp_path / str(num_profiles), num_profiles)
        size = sum(plan.path.stat().st_size for plan in plans)
        with capsys.disabled():
            print(
                f"\n{name} for {', '.join(TARGETS)}, {num_profiles} profiles: {len(plans)} plans, "
                f"{size / 1e6:.2f} MB, {sum(p.seconds for p in plans):.1f} s "
                f"({seconds:.1f} s with starting)"
            )
        assert size < most_bytes


class PlanCache:
    """Plans by segment: architectures have many in common."""

    def __init__(self, api: TensorRtApi) -> None:
        self._api = api
        self._plans: dict[str, bytes] = {}

    def plan(self, segment: Segment) -> bytes:
        """Return a segment's plan, built in this process."""
        if segment.digest not in self._plans:
            model = engine_model(segment, self._api.traits)
            config = TensorRtConfig(targets=TARGETS)
            self._plans[segment.digest] = build_plan(self._api, model, RANGES, config).data
        return self._plans[segment.digest]


@pytest.fixture(scope="module")
def plans(api: TensorRtApi) -> PlanCache:
    return PlanCache(api)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_segment_of_an_architecture_builds(
    name: str, plans: PlanCache, tmp_path: Path
) -> None:
    config = make_config(name)
    if name not in LAYERS_DIFFER:  # the second layer's segments are those of the third
        config.num_hidden_layers = 2
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
    model = segmented(config, tmp_path)
    assert len(model.segments) >= 3
    for segment in model.segments:
        assert 100_000 < len(plans.plan(segment)) < 5_000_000, segment.name


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("name", SHAPES)
def test_quantized_weights_are_inputs(
    name: str, kind: str, shapes: Callable[[str], SegmentedModel], plans: PlanCache
) -> None:
    model = quantize_products(shapes(name), kind)
    assert len(model.segments) == 3
    for segment in model.segments:
        assert any(spec.dtype == kind for spec in segment.weights)
        plan = plans.plan(segment)
        assert len(plan) < 3_000_000
        # Guards the layout: of matrices [N, K] each step would make a transposed copy first.
        readers = re.findall(rb"function=\{ name=(\w*Tran\w*)[^\n]*? input_args=\{([^}]*)\}", plan)
        copied = [name for name, inputs in readers if re.search(rb'"w\d+[. ]', inputs)]
        assert not copied, segment.name


def test_quantized_weights_that_a_gpu_lacks_are_refused_by_rtx_too(
    api: TensorRtApi, shapes: Callable[[str], SegmentedModel]
) -> None:
    """Guards a refusal of ours that RTX would not need: then it should go."""
    for kind, target in (("fp8", "sm_86"), ("int4", "sm_75")):
        segment = quantize_products(shapes("SmolLM2-135M"), kind).segments[1]
        with pytest.raises(BlinkError, match="does not take"):
            check_quantized_targets(kind, (target,))
        with pytest.raises(BlinkError, match="could not build") as caught:
            config = TensorRtConfig(targets=(target,))
            build_plan(api, engine_model(segment, api.traits), RANGES, config)
        assert f"Cannot compile for target(s) {target.replace('_', '')}" in caught.value.log
