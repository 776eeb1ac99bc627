"""A model through compile, bundle and rebuild with TensorRT-RTX: all but what wants its GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blink_runtime.cuda_bundle import read_files
from blink_runtime.cuda_steps import pack_weights
from blinkc.bundle.inspect_bundle import inspect_text
from blinkc.bundle.reader import open_bundle
from blinkc.bundle.rebuild_engines import rebuild_engines
from blinkc.bundle.write_bundle import BundleConfig, write_bundle
from blinkc.capture.plan_capture import CaptureConfig
from blinkc.config import CompileConfig
from blinkc.engine.options import EngineOptions
from blinkc.pipeline import compile_model
from blinkc.progress import Progress
from tests.frontend_onnx.op_models import build_op_model

pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed")
QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rtx")
    model = build_op_model(
        folder / "model.onnx", hidden=128, intermediate=192, heads=2, head_dim=64, fp16=True
    )
    config = CompileConfig(
        model=str(model),
        target="sm_89",
        engine="tensorrt-rtx",
        dtype="fp16",
        quantization="int4",
        capture=CaptureConfig(
            target="sm_89", max_batch=4, max_seqlen=64, max_prefill_tokens=64, num_slots=4
        ),
    )
    compile_model(config, folder / "build")
    write_bundle(BundleConfig(build=folder / "build", output=folder / "bundle"), QUIET)
    return folder / "bundle"


def test_a_bundle_says_what_is_in_it(bundle: Path) -> None:
    with open_bundle(bundle) as opened:
        manifest, text = opened.manifest, inspect_text(opened)
    assert [entry.engine for entry in manifest.target.engines] == ["tensorrt-rtx"] * 3
    assert "int4 weights in 8 of" in text and "not been run on a GPU" in text
    assert "--quantization int4 --engine tensorrt-rtx" in manifest.rebuild
    assert manifest.golden is not None and not manifest.golden.output_token_ids


def test_a_loader_finds_plans_kernels_and_places_for_every_weight(bundle: Path) -> None:
    with open_bundle(bundle) as opened:
        files, weights = read_files(opened, {}), opened.manifest.weights
    names = {entry["plan"] for entry in files.launches["engines"]}
    assert names == set(files.plans) and all(files.plans.values())
    assert files.kernels[:4] == files.scheduler[:4] == b"\x7fELF"
    assert not any(step["op"] in ("gemm", "rows") for step in files.launches["steps"])
    _, total = pack_weights(files.launches)
    assert sum(weight.num_bytes for weight in weights) <= total
    assert [w.name for w in weights] == [w["name"] for w in files.launches["weights"]]
    assert {w.dtype for w in weights} >= {"uint8", "fp16"}


def test_rebuilding_replaces_plans_alone(bundle: Path) -> None:
    """By the same version, from the models that the bundle holds; the kernels stay.

    RTX numbers what it names inside a plan by chance, so that plans may differ in bytes.
    """
    with open_bundle(bundle) as opened:
        before = opened.manifest
    report = rebuild_engines(bundle, EngineOptions(), QUIET)
    assert report["num_plans"] == 3
    with open_bundle(bundle) as opened:
        after = opened.manifest
        names = {path.name for path in (bundle / "code" / "engines").glob("*.plan")}
        assert names == {Path(entry.plan).name for entry in after.target.engines}
        assert json.loads(opened.read_bytes("code/launches.json"))["engines"]
    for old, new in zip(before.target.engines, after.target.engines, strict=True):
        same = {"plan": old.plan, "seconds": old.seconds}
        assert new.model_copy(update=same) == old
        sizes = [entry.file(engine.plan).bytes for entry, engine in ((before, old), (after, new))]
        assert abs(sizes[0] - sizes[1]) < 0.01 * sizes[0]
    cubin = before.target.cubins["kernels"]
    assert before.file(cubin) == after.file(cubin)
