"""Which engine runs a segment: the launch list with plans, choices by key, refusals by machine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from blink_runtime import cuda_steps, engine_choice
from blink_runtime.cuda_steps import CudaSteps, ModelAddresses
from blink_runtime.engine_choice import calls_of, choose, measured_keys
from blinkc.bundle import inspect_bundle
from blinkc.bundle.write_bundle import engine_entry
from blinkc.capture.grid import GraphKey
from blinkc.capture.plan_capture import CaptureConfig, plan_capture
from blinkc.codegen.compile_model import engine_facts
from blinkc.config import CompileConfig
from blinkc.engine import build_engines
from blinkc.engine.build_engines import building_bytes, engine_tools, tensorrt_of
from blinkc.engine.cuda import render_cuda_model
from blinkc.engine.gpu_here import GpuHere
from blinkc.engine.options import EngineOptions
from blinkc.engine.segment_engines import OWN_KERNELS, SegmentEngine, choose_narrowest
from blinkc.engine.tensorrt_api import TABLE, api_of_module
from blinkc.engine.tensorrt_model import EngineInput, EngineModel
from blinkc.engine.tensorrt_profiles import RowRange
from blinkc.errors import BlinkError
from blinkc.surgery.segments import SegmentedModel
from tests.engine.tiny_decoder import tiny_decoder

RANGES = (
    RowRange(min_tokens=1, opt_tokens=1, max_tokens=1),
    RowRange(min_tokens=1, opt_tokens=8, max_tokens=64, opt_samples=2, max_samples=4),
)
ONE, FOUR, PROMPT = (
    GraphKey("decode", 1, 64),
    GraphKey("decode", 4, 64),
    GraphKey("prefill", 2, 32),
)
KEYS = (PROMPT, ONE, FOUR)


def half_decoder() -> SegmentedModel:
    """The tiny decoder said to be fp16, with a head size that the kernels have."""
    model = tiny_decoder()
    calls = tuple(
        replace(call, attributes={**call.attributes, "head_dim": 64})
        if hasattr(call, "op") and call.op == "PagedAttention"
        else call
        for call in model.calls
    )
    return replace(model, spec=replace(model.spec, dtype="fp16"), calls=calls)


def engine_of(model: SegmentedModel, number: int, *, has_kernels: bool) -> SegmentEngine:
    def tensors(values: Any) -> tuple[EngineInput, ...]:
        return tuple(
            EngineInput(name=v.name, rows=v.rows, shape=v.shape, dtype=v.dtype) for v in values
        )

    segment = model.segments[number]
    return SegmentEngine(
        segment=segment.name,
        plan=f"engines/{segment.name}.plan",
        activations=tensors(segment.activations),
        weights=tensors(segment.weights),
        outputs=tensors(segment.outputs),
        ranges=RANGES,
        choices=(1, 0, OWN_KERNELS) if has_kernels else (1, 0, 1),
        has_kernels=has_kernels,
    )


def launches_with(has_kernels: bool) -> dict[str, Any]:
    model = half_decoder()
    config = CaptureConfig(target="sm_90", max_batch=4, max_seqlen=64)
    plan = plan_capture(model, config)
    engines = {n: engine_of(model, n, has_kernels=has_kernels) for n in (0, 1)}
    return render_cuda_model(model, plan, engines).launches


def test_a_plan_replaces_the_kernels_of_its_segment() -> None:
    launches = launches_with(has_kernels=False)
    assert [step["op"] for step in launches["steps"]] == ["engine", "attention", "engine", "sample"]
    first, attention, last, sample = launches["steps"]
    assert first["tensors"]["ids"] == ["step", "input_ids"]
    assert {name for name in first["tensors"]} == {
        "ids", "hidden", "q", "k", "v", "table", "norm", "qkv"
    }  # fmt: skip
    assert attention["q"] == first["tensors"]["q"]
    assert last["tensors"]["attended"] == attention["out"]
    assert last["tensors"]["rows"] == ["step", "sample_token"]
    assert sample["logits"] == last["tensors"]["logits"] and sample["dtype"] == "fp32"
    assert [engine["segment"] for engine in launches["engines"]] == ["segment0", "segment1"]


def test_both_ways_end_in_the_same_buffers() -> None:
    launches = launches_with(has_kernels=True)
    (call,) = [calls_of(launches["steps"], 0, 8)]
    plan, kernels = call[0], call[1:]
    assert plan["op"] == "engine" and all(entry["instead_of"] == 0 for entry in kernels)
    written = [entry["out"] for entry in kernels if entry["op"] == "gemm"]
    written += [place for entry in kernels if entry["op"] == "rows" for place in entry["args"]]
    for name in ("hidden", "q", "k", "v"):
        assert plan["tensors"][name] in written, name


@pytest.mark.parametrize(
    ("key", "profiles"), [(PROMPT, [1, 1]), (ONE, [0, 0]), (FOUR, [])], ids=str
)
def test_a_key_runs_what_was_chosen_for_it(
    key: GraphKey, profiles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, Any]] = []

    class Engines:
        def choice(self, engine: int, key_index: int) -> int:
            return launches["engines"][engine]["choices"][key_index]

        def prepare(self, engine: int, profile: int, *_: Any) -> None:
            done.append(("prepare", profile))

        def enqueue(self, engine: int, profile: int, key: Any, addresses: Any, _: Any) -> None:
            assert addresses["table"] in (256, 512, 768, 1024)
            done.append(("engine", profile))

    launches = launches_with(has_kernels=True)
    launches["steps"] = [s for s in launches["steps"] if s["op"] not in ("attention", "sample")]
    monkeypatch.setattr(cuda_steps, "launch", lambda item, stream: done.append(("kernel", item)))
    kernels: Any = SimpleNamespace(
        finish=lambda step: "finish",
        function=lambda name: SimpleNamespace(name=name),
        gemv=lambda *a: "gemv",
        constant=lambda name: 0,
    )
    products: Any = SimpleNamespace(product=lambda *a: done.append(("kernel", a[0])))
    step: Any = SimpleNamespace(input_ids=16, positions=32, sample_token=48)
    addresses = ModelAddresses(arena=0x1000, weights=(256, 512, 768, 1024), kv_layers=(4096,))
    steps = CudaSteps(launches, kernels, products, addresses, step, KEYS, Engines())  # type: ignore[arg-type]
    stream: Any = None
    steps.prepare(key, stream)
    assert done == [("prepare", profile) for profile in profiles]
    done.clear()
    steps.enqueue(key, stream)
    assert [what for what in done if what[0] == "engine"] == [("engine", p) for p in profiles]
    kinds = [what[0] for what in done]
    assert (kinds.count("kernel") > 1) == (not profiles)  # `finish` always runs


def test_a_step_of_plans_alone_wants_no_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a machine with TensorRT and without cuBLASLt 13, such as one with 8.6."""
    launches = launches_with(has_kernels=False)
    launches["steps"] = [step for step in launches["steps"] if step["op"] == "engine"]
    monkeypatch.setattr(cuda_steps, "launch", lambda item, stream: None)
    ran: list[int] = []
    engines: Any = SimpleNamespace(
        choice=lambda engine, key: 0, enqueue=lambda engine, *_: ran.append(engine)
    )
    kernels: Any = SimpleNamespace(finish=lambda step: "finish")
    step: Any = SimpleNamespace(input_ids=16, positions=32, sample_token=48)
    addresses = ModelAddresses(arena=0x1000, weights=(256, 512, 768, 1024), kv_layers=(4096,))
    steps = CudaSteps(launches, kernels, None, addresses, step, KEYS, engines)
    stream: Any = None
    steps.tune(PROMPT, stream)
    steps.enqueue(PROMPT, stream)
    assert ran == [0, 1]


def test_the_fastest_is_chosen_and_a_tie_stays_with_the_kernels() -> None:
    model = half_decoder()
    engine = engine_of(model, 0, has_kernels=True)
    timings = {
        (1, 1): {OWN_KERNELS: 10.0, 0: 9.0, 1: 12.0},
        (4, 4): {OWN_KERNELS: 10.0, 1: 9.9},
        (32, 2): {OWN_KERNELS: 30.0, 1: 20.0},
    }
    assert choose(engine, KEYS, timings) == (1, 0, OWN_KERNELS)
    # A key takes the nearest measurement, but no profile that does not hold it.
    assert choose(engine, (GraphKey("decode", 2, 64),), timings) == (OWN_KERNELS,)
    without = {rows: {n: us for n, us in by.items() if n >= 0} for rows, by in timings.items()}
    assert choose(engine, KEYS, without) == (1, 0, 1)


def test_measured_keys_span_the_row_counts() -> None:
    keys = tuple(GraphKey("decode", batch, s) for batch in range(1, 65) for s in (256, 1024))
    chosen = measured_keys(keys)
    assert len(chosen) == 6 and chosen[0].batch == 1 and chosen[-1].batch == 64
    assert len({key.batch for key in chosen}) == 6


def test_a_key_that_no_profile_holds_is_refused_unless_there_are_kernels() -> None:
    big = (GraphKey("prefill", 1, 65),)
    assert choose_narrowest("s", RANGES, big, has_kernels=True) == (OWN_KERNELS,)
    with pytest.raises(BlinkError, match="no profile"):
        choose_narrowest("s", RANGES, big, has_kernels=False)


def config(engine: str, target: str = "sm_90", **changes: Any) -> CompileConfig:
    capture = CaptureConfig(target=target)
    return CompileConfig(model="m", target=target, engine=engine, capture=capture, **changes)


H200 = GpuHere(name="NVIDIA H200", target="sm_90", driver="580.1", free_bytes=100 << 30)


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: GpuHere | None, version: str) -> None:
    monkeypatch.setattr(build_engines, "find_gpu", lambda: gpu)

    def load(engine: str) -> Any:
        if not version:
            raise BlinkError(f"--engine {engine} needs a package")
        return api_of_module(engine, SimpleNamespace(__version__=version))  # type: ignore[arg-type]

    monkeypatch.setattr(build_engines, "load_tensorrt", load)


def test_engines_are_built_where_their_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None, "8.6.0")
    with pytest.raises(BlinkError, match="sm_90; this one has none") as caught:
        tensorrt_of(config("tensorrt", dtype="fp16"))
    assert "--until segment" in caught.value.hint
    assert engine_tools(config("tensorrt", dtype="fp16")) == {}  # what is built stays valid
    other = replace(H200, target="sm_89", name="L4")
    pretend(monkeypatch, other, "8.6.0")
    with pytest.raises(BlinkError, match="this one has L4, sm_89"):
        tensorrt_of(config("tensorrt", dtype="fp16"))
    pretend(monkeypatch, H200, "8.6.0")
    found = tensorrt_of(config("tensorrt", dtype="fp16"))
    assert found is not None and found[0].traits is TABLE["tensorrt", 8] and found[1] is H200
    assert engine_tools(config("tensorrt", dtype="fp16")) == {
        "tensorrt": "8.6.0", "compute capability": "9.0", "driver": "580.1"
    }  # fmt: skip
    with pytest.raises(BlinkError, match="has no bf16"):
        tensorrt_of(config("tensorrt"))


def test_auto_takes_tensorrt_only_where_it_can_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for gpu, version, takes in (
        (H200, "10.3.0", True),
        (H200, "", False),
        (None, "10.3.0", False),
        (replace(H200, target="sm_89"), "10.3.0", False),
        (H200, "8.6.0", False),  # the model is bf16
    ):
        pretend(monkeypatch, gpu, version)
        assert (tensorrt_of(config("auto")) is not None) == takes
    pretend(monkeypatch, H200, "10.3.0")
    assert tensorrt_of(config("cuda")) is None
    assert tensorrt_of(config("auto", "sm_90,sm_120")) is None


def test_quantized_weights_are_for_plans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a silent whole-precision build: each engine that cannot says so, and what can."""
    for engine, target, computes in (
        ("cuda", "sm_90", "engine cuda computes with weights in bf16"),
        ("auto", "sm_90", "engine cuda computes"),
        ("cpu", "cpu", "engine cpu computes with weights in fp32"),
    ):
        with pytest.raises(BlinkError, match=computes) as caught:
            config(engine, target, quantization="int4")
        assert "tensorrt-rtx 1" in caught.value.hint and "tensorrt 10" in caught.value.hint
    with pytest.raises(BlinkError, match="--engine onnxruntime is unknown"):
        config("onnxruntime", "sm_90")  # it ran nowhere; onnxruntime only checks the others
    config("tensorrt-rtx", "sm_89,sm_120", quantization="fp8")
    config("tensorrt-rtx", "sm_80", quantization="int4")
    with pytest.raises(BlinkError, match="sm_86 does not take fp8 weights") as caught:
        config("tensorrt-rtx", "sm_120,sm_86", quantization="fp8")
    assert "int4 from sm_80 on" in caught.value.hint
    with pytest.raises(BlinkError, match="--quantization int3 is unknown"):
        config("tensorrt", quantization="int3")
    pretend(monkeypatch, H200, "8.6.0")
    with pytest.raises(BlinkError, match=r"8\.6\.0 does not take fp8 weights") as caught:
        tensorrt_of(config("tensorrt", dtype="fp16", quantization="fp8"))
    assert "tensorrt 10" in caught.value.hint
    pretend(monkeypatch, H200, "10.3.0")
    assert tensorrt_of(config("tensorrt", quantization="fp8")) is not None


def test_several_targets_need_an_engine_that_builds_ahead_of_time() -> None:
    assert config("tensorrt-rtx", "sm_89,sm_120").architecture == "sm_89,sm_120a"
    with pytest.raises(BlinkError, match="builds for the GPU in this machine"):
        config("tensorrt", "sm_89,sm_120")
    with pytest.raises(BlinkError, match="names a GPU twice"):
        config("cuda", "sm_89,sm_89")


def test_options_out_of_range_are_refused() -> None:
    for options in (
        {"level": 6}, {"budget_s": -1.0}, {"num_profiles": 0}, {"max_workspace_bytes": 1 << 20}
    ):  # fmt: skip
        with pytest.raises(BlinkError, match="--engine-"):
            EngineOptions(**options)  # type: ignore[arg-type]


def test_memory_of_building_is_summed_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = EngineInput(name="x", rows="tokens", shape=(1000,), dtype="fp16")
    w = EngineInput(name="w", rows="", shape=(1000, 1000), dtype="fp16")
    model = EngineModel(name="s", model=b"", activations=(x,), weights=(w,), outputs=(x,))
    assert building_bytes([model], 2000) == 2 * 2000 * 1000 * 2 + 2_000_000
    said: list[str] = []
    build_engines._check_memory([model], 2000, None, H200, said.append)
    assert "MiB of tensors" in said[0] and "NVIDIA H200" in said[0]
    with pytest.raises(BlinkError, match="does not fit"):
        build_engines._check_memory([model], 2000, None, replace(H200, free_bytes=1 << 20), print)


def test_measuring_times_every_choice_and_says_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of ours instead of a GPU: plans win where they are faster, key by key, and what
    was measured stands in the manifest and in `blinkc inspect`."""
    launches = launches_with(has_kernels=True)
    fast = {0: 5.0, 1: 8.0, OWN_KERNELS: 6.0}  # microseconds of one row
    asked: list[tuple[int, int, GraphKey]] = []
    made: list[Any] = []

    class Target:
        def __init__(self, **given: Any) -> None:
            made.append(given)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    def timed(_target: Any, engine: int, choice: int, key: GraphKey) -> float:
        asked.append((engine, choice, key))
        rows = key.seqlen if key.kind == "prefill" else key.batch
        gain = 0.2 if choice == 1 and engine == 0 else 1.0  # profile 1 of one segment scales
        return fast[choice] * (1 + (rows - 1) * gain)

    monkeypatch.setattr(engine_choice, "CudaTarget", Target)
    monkeypatch.setattr(engine_choice, "_time", timed)
    plan = plan_capture(half_decoder(), CaptureConfig(target="sm_90", max_batch=4, max_seqlen=64))
    plan = replace(plan, keys=KEYS)
    api: Any = None
    found = engine_choice.measure_choices(
        api=api, plan=plan, launches=launches, kernels=b"", plans={}
    )
    # Prefill of 32 rows, decode of 1 and of 4: profile 0 holds one row alone.
    assert [engine.choices for engine in found.engines] == [
        (1, 0, 1),
        (OWN_KERNELS, 0, OWN_KERNELS),
    ]
    assert len(asked) == len(set(asked)) == 2 * (2 + 3 + 2)
    assert made[0]["placement"] == "none" and made[0]["plan"].keys == tuple(measured_keys(KEYS))
    assert found.timings["segment1"]["1 rows"] == {
        "kernels": 6.0, "profile 0": 5.0, "profile 1": 8.0
    }  # fmt: skip

    segments = [engine.segment for engine in found.engines]
    entries = [
        {"segment": name, "plan": f"engines/{name}.plan", "model": f"engines/{name}.onnx",
         "level": 2, "seconds": 1.0, "scratch_bytes": 64}
        for name in segments
    ]  # fmt: skip
    ranges = [{"max_tokens": item.max_tokens} for item in RANGES]
    built = {"tensorrt": {"engine": "tensorrt", "version": "10.0.1", "builds": {},
                          "ranges": ranges, "plans": entries}}  # fmt: skip
    facts = engine_facts(built, found.engines, found.timings)
    entry = engine_entry(facts, facts["segments"][0])
    assert entry.choice == {"profile 0": 1, "profile 1": 2}
    target = SimpleNamespace(engines=(entry,), builds={})
    ((_, text),) = inspect_bundle._engine_rows(target)  # type: ignore[arg-type]
    assert "profile 1 for 2 keys" in text and "4 rows: kernels 24 us profile 1 12.8 us" in text
