"""Every TensorRT's calls exist in it: builder and loader over each version's recorded names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blink_runtime import tensorrt_engines
from blink_runtime.tensorrt_engines import TensorRtEngines
from blinkc.capture.grid import GraphKey
from blinkc.engine.segment_engines import SegmentEngine
from blinkc.engine.tensorrt_api import TABLE, TensorRtApi, api_of_module
from blinkc.engine.tensorrt_build import BuildStopped, TensorRtConfig, build_plan
from blinkc.engine.tensorrt_model import EngineInput, EngineModel
from blinkc.engine.tensorrt_profiles import RowRange
from blinkc.errors import BlinkError
from tests.engine.fake_tensorrt import SURFACES, FakeTensorRt

RANGES = (
    RowRange(min_tokens=1, opt_tokens=1, max_tokens=1),
    RowRange(min_tokens=1, opt_tokens=8, max_tokens=64, opt_samples=2, max_samples=4),
)
ACTIVATION = EngineInput(name="a0", rows="tokens", shape=(16,), dtype="fp16")
SAMPLES = EngineInput(name="a1", rows="samples", shape=(), dtype="int32")
WEIGHT = EngineInput(name="w0", rows="", shape=(4, 4), dtype="fp16")
OUTPUT = EngineInput(name="o0", rows="tokens", shape=(4,), dtype="fp16")
MODEL = EngineModel(
    name="segment0",
    model=b"onnx",
    activations=(ACTIVATION, SAMPLES),
    weights=(WEIGHT,),
    outputs=(OUTPUT,),
)


def make(name: str) -> tuple[FakeTensorRt, TensorRtApi]:
    module = FakeTensorRt(name)
    module.input("a0", (-1, 16))
    module.input("a1", (-1,))
    module.input("w0", (4, 4))
    return module, api_of_module("tensorrt-rtx" if name.startswith("rtx") else "tensorrt", module)


@pytest.mark.parametrize("name", SURFACES)
def test_build_calls_exist(name: str, tmp_path: Path) -> None:
    module, api = make(name)
    targets = ("sm_89", "sm_120a") if api.named_targets else ()
    config = TensorRtConfig(targets=targets, timing_cache=tmp_path / "timing")
    seen: list[tuple[str, int, int]] = []
    plan = build_plan(api, MODEL, RANGES, config, lambda *step: seen.append(step) or True)
    assert plan.data == b"a plan"
    assert plan.scratch_bytes == (0 if targets else 4096)
    profiles = module.did("IOptimizationProfile", "set_shape")
    assert profiles == [
        ("a0", (1, 16), (1, 16), (1, 16)),
        ("a1", (1,), (1,), (1,)),
        ("a0", (1, 16), (8, 16), (64, 16)),
        ("a1", (1,), (2,), (4,)),
    ]
    assert bool(seen) == api.has_progress_monitor == (not name.startswith("8."))
    flag = "EXPLICIT_BATCH" if name.startswith("8.") else "STRONGLY_TYPED"
    wanted = 1 << getattr(module.NetworkDefinitionCreationFlag, flag)
    assert module.did("Builder", "create_network") == [(wanted,)]
    (sources,) = module.did("IBuilderConfig", "set_tactic_sources")[0]
    for library in ("CUBLAS", "CUBLAS_LT", "CUDNN"):
        if hasattr(module.TacticSource, library):
            assert not sources >> getattr(module.TacticSource, library) & 1
    if targets:
        chosen = [a for a, _ in module.did("IBuilderConfig", "set_compute_capability")]
        capability = module.ComputeCapability
        assert chosen == [capability.SM89, capability.SM120]


@pytest.mark.parametrize("name", [name for name in SURFACES if not name.startswith("8.")])
def test_progress_can_end_a_build(name: str) -> None:
    _, api = make(name)
    targets = ("sm_89",) if api.named_targets else ()
    with pytest.raises(BuildStopped):
        build_plan(api, MODEL, RANGES, TensorRtConfig(targets=targets), lambda *_: False)


def test_weak_types_hold_what_the_model_computes_in_fp32() -> None:
    """Guards norms in fp16: squares of values over 255 are infinite there."""
    module, api = make("8.6.0")
    norm = module.layer("n3_ReduceMean@fp32", "REDUCE", ["fp16"])
    module.layer("n4_Gemm", "MATRIX_MULTIPLY", ["fp16"])
    constant = module.layer("n5_Add@fp32_const", "CONSTANT", ["fp32"])
    topk = module.layer("n6_TopK@fp32", "TOPK", ["fp32", "int32"])
    build_plan(api, MODEL, RANGES, TensorRtConfig())
    flags = [flag for (flag,) in module.did("IBuilderConfig", "set_flag")]
    wanted = module.BuilderFlag
    assert flags == [wanted.FP16, wanted.OBEY_PRECISION_CONSTRAINTS]
    assert norm.precision == "fp32" and topk.precision == "fp32"
    assert "precision" not in constant.__dict__
    assert module.did("ILayer", "set_output_type") == [(0, "fp32"), (0, "fp32")]


@pytest.mark.parametrize("name", [name for name in SURFACES if not name.startswith("8.")])
def test_strong_types_are_the_models_own(name: str) -> None:
    module, api = make(name)
    module.layer("n3_ReduceMean@fp32", "REDUCE", ["fp32"])
    targets = ("sm_89",) if api.named_targets else ()
    build_plan(api, MODEL, RANGES, TensorRtConfig(targets=targets))
    assert not module.did("IBuilderConfig", "set_flag")
    assert not module.did("ILayer", "set_output_type")


class Buffer:
    def __init__(self, num_bytes: int, what: str) -> None:
        self.num_bytes, self.address = num_bytes, 0x1000

    def close(self) -> None:
        self.address = 0


class FakeStream:
    handle = 7

    def synchronize(self) -> None:
        pass


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeTensorRt, TensorRtEngines]:
    monkeypatch.setattr(tensorrt_engines, "DeviceBuffer", Buffer)
    module, api = make(name)
    engine = SegmentEngine(
        segment="segment0",
        plan="engines/segment0.plan",
        activations=MODEL.activations,
        weights=MODEL.weights,
        outputs=MODEL.outputs,
        ranges=RANGES,
        choices=(0, 1),
        has_kernels=False,
    )
    return module, TensorRtEngines(api, [engine.to_json()], {engine.plan: b"a plan"})


KEY = GraphKey("prefill", 2, 32)
ADDRESSES = {"a0": 256, "a1": 512, "w0": 768, "o0": 1024}


@pytest.mark.parametrize("name", SURFACES)
def test_loader_calls_exist(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, engines = loaded(name, monkeypatch)
    stream: Any = FakeStream()
    assert [engines.choice(0, index) for index in (0, 1)] == [0, 1]
    engines.prepare(0, 1, KEY, ADDRESSES, stream)
    engines.prepare(0, 1, KEY, ADDRESSES, stream)
    assert len(module.did("IExecutionContext", "execute_async_v3")) == 1  # once a shape
    shapes = module.did("IExecutionContext", "set_input_shape")
    assert shapes == [("a0", (32, 16)), ("a1", (2,))]
    assert module.did("IExecutionContext", "set_optimization_profile_async") == [(1, 7)]
    engines.enqueue(0, 1, KEY, {**ADDRESSES, "w0": 4096}, stream)
    assert module.did("IExecutionContext", "set_tensor_address")[-4:] == [
        ("a0", 256), ("a1", 512), ("w0", 4096), ("o0", 1024)
    ]  # fmt: skip
    gave = module.did("IExecutionContext", "set_device_memory") or [
        (address, 4096) for (address,) in module.did("IExecutionContext", "device_memory=")
    ]
    assert gave == [(0x1000, 4096)]
    engines.close()


def test_a_plan_is_not_run_before_its_shapes_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards captures that hold the shapes of another key."""
    _, engines = loaded("8.6.0", monkeypatch)
    stream: Any = FakeStream()
    with pytest.raises(BlinkError, match="not prepared"):
        engines.enqueue(0, 1, KEY, ADDRESSES, stream)
    engines.prepare(0, 1, KEY, ADDRESSES, stream)
    with pytest.raises(BlinkError, match="not prepared"):
        engines.enqueue(0, 1, GraphKey("decode", 2, 32), ADDRESSES, stream)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("execute_async_v3", "could not enqueue segment segment0"),
        ("set_input_shape", "refuses a0"),
        ("set_optimization_profile_async", "no profile 1"),
        ("create_execution_context_without_device_memory", "no context"),
    ],
)
def test_results_are_checked(method: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards graphs of zeros: an enqueue that returns false does nothing and raises nothing."""
    module, engines = loaded("8.6.0", monkeypatch)
    module.refuses.add(method)
    stream: Any = FakeStream()
    with pytest.raises(BlinkError, match=message):
        engines.prepare(0, 1, KEY, ADDRESSES, stream)


def test_a_plan_that_does_not_load_names_the_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTensorRt, "refuses", {"deserialize_cuda_engine"}, raising=False)
    original = FakeTensorRt.__init__

    def refusing(self: FakeTensorRt, name: str) -> None:
        original(self, name)
        self.refuses = {"deserialize_cuda_engine"}

    monkeypatch.setattr(FakeTensorRt, "__init__", refusing)
    with pytest.raises(BlinkError) as caught:
        loaded("8.6.0", monkeypatch)
    assert "segment0" in caught.value.message and "blinkc rebuild" in caught.value.hint


def module_of(version: str) -> Any:
    return SimpleNamespace(__version__=version)


def test_versions_find_their_column() -> None:
    assert api_of_module("tensorrt", module_of("8.6.1")).traits is TABLE["tensorrt", 8]
    assert api_of_module("tensorrt", module_of("10.3.0")).traits is TABLE["tensorrt", 10]
    newer = api_of_module("tensorrt", module_of("13.0.0.1"))
    assert newer.traits is TABLE["tensorrt", 11]
    assert "13.0.0.1" in newer.notice("served") and "golden prompt" in newer.notice("served")
    for engine, version in (("tensorrt", "8.5.3"), ("tensorrt", "9.1.0"), ("tensorrt-rtx", "1.3")):
        with pytest.raises(BlinkError, match="oldest that does"):
            api_of_module(engine, module_of(version))


def test_refusals_say_what_works() -> None:
    old = api_of_module("tensorrt", module_of("8.6.0"))
    with pytest.raises(BlinkError, match="has no bf16") as caught:
        old.check_dtype("bf16")
    assert "--dtype fp16" in caught.value.hint
    with pytest.raises(BlinkError, match="fp8 weights") as caught:
        old.check_quantized("fp8")
    assert "tensorrt 10" in caught.value.hint
    with pytest.raises(BlinkError, match="builds only for the GPU in this machine"):
        old.set_targets(SimpleNamespace(), ("sm_89",))
    _, rtx = make("rtx-1.7.1.116")
    with pytest.raises(BlinkError, match="builds no plans for sm_90") as caught:
        rtx.set_targets(SimpleNamespace(set_compute_capability=lambda *_: None), ("sm_90",))
    assert "sm_75, sm_80, sm_86, sm_89, sm_120, sm_121" in caught.value.hint
