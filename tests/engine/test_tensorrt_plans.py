"""Plans built by TensorRT-RTX without a GPU: what comes out, killed builds, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from blinkc.capture.grid import GraphKey
from blinkc.engine import tensorrt_plans
from blinkc.engine.options import EngineOptions
from blinkc.engine.tensorrt_api import TABLE, TensorRtApi, load_tensorrt
from blinkc.engine.tensorrt_model import EngineModel, engine_model
from blinkc.engine.tensorrt_plans import BuiltPlan, build_plans
from blinkc.engine.tensorrt_profiles import narrowest, plan_ranges
from blinkc.errors import BlinkError
from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from blinkc.surgery import segment_decoder
from tests.frontend_onnx.op_models import build_op_model

pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
TARGETS = ("sm_89", "sm_120")
KEYS = (
    GraphKey("prefill", 1, 16),
    GraphKey("prefill", 2, 64),
    GraphKey("decode", 1, 64),
    GraphKey("decode", 4, 64),
)


@pytest.fixture(scope="module")
def api() -> TensorRtApi:
    return load_tensorrt("tensorrt-rtx")


@pytest.fixture(scope="module")
def models(api: TensorRtApi, tmp_path_factory: pytest.TempPathFactory) -> list[EngineModel]:
    path = build_op_model(tmp_path_factory.mktemp("onnx") / "model.onnx", qkv_bias=True)
    graph = decoder_graph_from_onnx(path, dtype="fp16", max_seqlen=64)
    segments = segment_decoder(graph).segments
    return [engine_model(segment, api.traits) for segment in (segments[0], segments[-1])]


def build(
    api: TensorRtApi, models: list[EngineModel], folder: Path, **changes: Any
) -> list[BuiltPlan]:
    options = {"targets": TARGETS, "gpu": "", "options": EngineOptions()} | changes
    return build_plans(api, models, plan_ranges(KEYS, 2), folder, **options)


def test_plans_are_small(api: TensorRtApi, models: list[EngineModel], tmp_path: Path) -> None:
    plans = build(api, models, tmp_path)
    assert all(p.version == api.version_text and p.scratch_bytes == 0 for p in plans)
    assert all(0 < p.path.stat().st_size < 4 << 20 for p in plans)


def test_a_plan_that_is_there_is_not_built_again(
    api: TensorRtApi, models: list[EngineModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards resuming: of a killed build only what is missing is built."""
    first = build(api, models, tmp_path)
    for name in (first[-1].path.name, first[-1].path.name + ".json"):
        (tmp_path / name).unlink()
    (tmp_path / (first[0].path.name + ".json")).write_text("{")  # half written
    built: list[str] = []
    run = tensorrt_plans._Workers.run

    def noting(workers: Any, jobs: Any) -> None:
        built.extend(plan.name for job in jobs for plan in job.plans)
        run(workers, jobs)

    monkeypatch.setattr(tensorrt_plans._Workers, "run", noting)
    again = build(api, models, tmp_path)
    assert built == [models[0].name, models[-1].name]
    assert [p.path for p in again] == [p.path for p in first]
    built.clear()
    build(api, models, tmp_path, options=EngineOptions(level=1))
    assert len(built) == len(models)  # other effort, other plans


_KILLED = """
import sys, pickle, signal
from pathlib import Path
from tests.engine.test_tensorrt_plans import build
api_models = pickle.loads(Path(sys.argv[1]).read_bytes())
from blinkc.engine.tensorrt_api import load_tensorrt
signal.signal(signal.SIGINT, signal.default_int_handler)
from blinkc.engine.options import EngineOptions
def say(text):
    print(text, flush=True)
build(load_tensorrt("tensorrt-rtx"), api_models, Path(sys.argv[2]), note=say)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_leaves_whole_plans_and_no_worker(
    number: signal.Signals, api: TensorRtApi, models: list[EngineModel], tmp_path: Path
) -> None:
    import pickle

    (tmp_path / "models").write_bytes(pickle.dumps(models))
    folder = tmp_path / "plans"
    process = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path / "models"), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}", "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if " s at level " in line:  # the first plan is done
            break
    process.send_signal(number)
    process.wait(300)
    process.stdout.close()
    kept = sorted(path.stem for path in folder.glob("*.plan.json"))
    assert kept
    deadline = time.monotonic() + 300
    while workers := [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"{tmp_path}/blinkc-plans".encode() in _read(path)  # its job file
    ]:
        assert time.monotonic() < deadline, workers
        time.sleep(0.05)
    plans = build(api, models, folder)
    assert len(plans) == len(models) and all(p.path.stat().st_size for p in plans)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_crash_of_the_worker_is_an_error_message(
    api: TensorRtApi, models: list[EngineModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against TensorRT taking the compiler down with it: it aborts on some inputs."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho terminate called >&2\nkill -ABRT $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(tensorrt_plans.sys, "executable", str(script))
    with pytest.raises(BlinkError) as caught:
        build(api, models, tmp_path / "plans")
    assert "signal 6" in caught.value.message and models[0].name in caught.value.message
    assert "terminate called" in caught.value.log


def test_a_target_that_rtx_does_not_build_for_is_named(
    api: TensorRtApi, models: list[EngineModel], tmp_path: Path
) -> None:
    with pytest.raises(BlinkError, match="builds no plans for sm_90") as caught:
        build(api, models, tmp_path, targets=("sm_90",))
    assert "--engine tensorrt on a machine with that GPU" in caught.value.hint


def test_a_node_that_is_refused_is_named(api: TensorRtApi, tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    node = helper.make_node("NoSuchOp", ["x"], ["y"], name="culprit")
    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, ["t", 4]) for n in "xy"]
    graph = helper.make_graph([node], "g", tensors[:1], tensors[1:])
    text = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model = EngineModel(
        name="odd", model=text.SerializeToString(), activations=(), weights=(), outputs=()
    )
    with pytest.raises(BlinkError, match="does not take segment odd") as caught:
        build(api, [model], tmp_path)
    assert "culprit" in caught.value.message or "NoSuchOp" in caught.value.log


def test_a_time_budget_lowers_the_effort(
    api: TensorRtApi, models: list[EngineModel], tmp_path: Path
) -> None:
    """A plan comes out however short the time is."""
    plans = build(api, models, tmp_path, options=EngineOptions(level=3, budget_s=0.01))
    assert all(plan.level == 0 for plan in plans)


def test_the_worker_needs_no_tools_of_the_compiler(
    api: TensorRtApi, models: list[EngineModel], tmp_path: Path
) -> None:
    """Guards rebuilding on a server, which has TensorRT and neither onnx nor numpy."""
    code = (
        "import sys\n"
        "for name in ('onnx', 'numpy', 'torch'): sys.modules[name] = None\n"
        "import blinkc.engine.tensorrt_worker, blinkc.engine.tensorrt_plans\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_ranges_cover_every_key_and_keys_take_the_narrowest() -> None:
    for wanted in range(1, 9):
        ranges = plan_ranges(KEYS, wanted)
        assert 1 <= len(ranges) <= wanted
        assert all(narrowest(ranges, key) >= 0 for key in KEYS)
        assert narrowest(ranges, GraphKey("prefill", 1, 65)) == -1
    three = plan_ranges(KEYS, 3)
    assert [(r.max_tokens, r.max_samples) for r in three] == [(1, 1), (4, 4), (64, 4)]
    assert [narrowest(three, key) for key in KEYS] == [2, 2, 0, 1]
    (one,) = plan_ranges((GraphKey("decode", 1, 64),), 3)
    assert (one.min_tokens, one.opt_tokens, one.max_tokens) == (1, 1, 1)


@pytest.mark.parametrize("kind", sorted(TABLE))
def test_fitted_models_compute_what_the_segment_does(kind: tuple[str, int], tmp_path: Path) -> None:
    """Guards the older form of reductions, without which all axes would be reduced."""
    import numpy as np
    import onnxruntime

    from tests.engine.tiny_decoder import tiny_decoder  # RMSNormalization: no older form

    path = build_op_model(tmp_path / "model.onnx", qkv_bias=True)
    model = segment_decoder(decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=64))
    random = np.random.default_rng(0)
    for segment in model.segments:
        fitted = engine_model(segment, TABLE[kind])
        wide: dict[str, Any] = {}
        for value in (*segment.activations, *segment.weights):
            rows = {"tokens": (3,), "samples": (2,), "": ()}[value.rows]
            if value.dtype == "int64":
                wide[value.name] = random.integers(0, 2, (*rows, *value.shape))
            else:
                wide[value.name] = random.standard_normal((*rows, *value.shape), np.float32)
        narrow = {n: a.astype(np.int32) if a.dtype == np.int64 else a for n, a in wide.items()}
        want = onnxruntime.InferenceSession(segment.model.SerializeToString()).run(None, wide)
        got = onnxruntime.InferenceSession(fitted.model).run(None, narrow)
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a, b)
    newer = tiny_decoder().segments[0]
    if TABLE[kind].max_opset == 17:
        with pytest.raises(BlinkError, match="RMSNormalization"):
            engine_model(newer, TABLE[kind])
    else:
        assert b"RMSNormalization" in engine_model(newer, TABLE[kind]).model


def test_facts_beside_a_plan_say_what_it_took(
    api: TensorRtApi, models: list[EngineModel], tmp_path: Path
) -> None:
    (plan, *_) = build(api, models[:1], tmp_path)
    facts = json.loads((tmp_path / f"{plan.path.name}.json").read_text())
    assert facts["version"] == api.version_text and facts["seconds"] > 0
    assert time.time() - plan.path.stat().st_mtime < 600
