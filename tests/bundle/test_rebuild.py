"""`blinkc rebuild`: new plans into a bundle whose TensorRT, GPU or driver is not this machine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from blinkc.bundle import rebuild_engines as rebuilding
from blinkc.bundle.inspect_bundle import inspect_text
from blinkc.bundle.manifest import MANIFEST_NAME, EngineEntry, Target, manifest_to_bytes
from blinkc.bundle.reader import open_bundle
from blinkc.cli import main
from blinkc.engine.gpu_here import GpuHere
from blinkc.engine.options import EngineOptions
from blinkc.engine.tensorrt_plans import BuiltPlan
from blinkc.errors import BlinkError
from blinkc.progress import Progress
from tests.bundle.small_bundle import manifest_of, write_small_bundle

SEGMENTS = ("segment0", "segment1")
RANGE = {"min_tokens": 1, "opt_tokens": 4, "max_tokens": 16, "min_samples": 1, "opt_samples": 1}
TENSOR = {"rows": "tokens", "shape": [4], "dtype": "fp16"}


def engine_of(segment: str) -> dict[str, Any]:
    return {
        "segment": segment,
        "plan": f"engines/{segment}.plan",
        "activations": [{"name": "a0", **TENSOR}],
        "weights": [],
        "outputs": [{"name": "o0", **TENSOR}],
        "ranges": [{**RANGE, "max_samples": 2}],
        "choices": [0, 0],
        "has_kernels": False,
    }


def write_bundle_with_plans(folder: Path, engine: str, target: str) -> None:
    """A small bundle whose code is two plans of another version."""
    write_small_bundle(folder)
    (folder / "code" / "engines").mkdir()
    for segment in SEGMENTS:
        (folder / "code" / "engines" / f"{segment}.plan").write_bytes(b"an old plan")
        (folder / "code" / "engines" / f"{segment}.onnx").write_bytes(segment.encode())
    launches = {"engines": [engine_of(segment) for segment in SEGMENTS]}
    (folder / "code" / "launches.json").write_text(json.dumps(launches))
    with open_bundle(folder, check_hashes=False) as bundle:
        manifest = bundle.manifest
    entries = tuple(
        EngineEntry(
            segment=segment,
            engine=engine,  # type: ignore[arg-type]
            version="8.5.9",
            plan=f"code/engines/{segment}.plan",
            model=f"code/engines/{segment}.onnx",
            level=2,
            seconds=1.5,
            scratch_bytes=64,
            max_tokens=(16,),
            choice={"profile 0": 2},
        )
        for segment in SEGMENTS
    )
    changed = Target(
        name=target,
        machine=manifest.target.machine,
        architecture=target,
        engine=engine,
        builds={engine: "8.5.9"},
        engines=entries,
    )
    (folder / MANIFEST_NAME).unlink()
    new = manifest_of(folder, manifest.weights, target=changed)
    (folder / MANIFEST_NAME).write_bytes(manifest_to_bytes(new))


def quiet() -> Progress:
    return Progress(quiet=True)


class FakeApi:
    engine, title, version_text = "tensorrt", "TensorRT 10.0.1", "10.0.1"
    named_targets = False

    def notice(self, _doing: str) -> str:
        return ""


GPU = GpuHere(name="A GPU", target="sm_90", driver="580.1", free_bytes=1 << 30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle for sm_90 on a machine with that GPU and another TensorRT."""
    write_bundle_with_plans(tmp_path / "b", "tensorrt", "sm_90")
    monkeypatch.setattr(rebuilding, "load_tensorrt", lambda _: FakeApi())
    monkeypatch.setattr(rebuilding, "find_gpu", lambda: GPU)

    def build(_api: Any, models: Any, ranges: Any, kept: Path, **options: Any) -> list[BuiltPlan]:
        kept.mkdir(exist_ok=True)
        plans = []
        for model in models:
            assert model.model == model.name.encode() and ranges[0].max_tokens == 16
            path = kept / model.name
            path.write_bytes(f"a new plan of {model.name} for {options['gpu']}".encode())
            plans.append(
                BuiltPlan(
                    segment=model.name,
                    path=path,
                    version="10.0.1",
                    level=3,
                    seconds=0.5,
                    scratch_bytes=128,
                )
            )
        return plans

    monkeypatch.setattr(rebuilding, "build_plans", build)
    return tmp_path / "b"


FOUND = {"tensorrt": "10.0.1", "compute capability": "9.0", "driver": "580.1"}


def test_another_version_is_refused_and_rebuilt(folder: Path) -> None:
    with open_bundle(folder) as bundle, pytest.raises(BlinkError) as caught:
        bundle.check_builds(FOUND)
    assert "tensorrt 8.5.9" in caught.value.message and "10.0.1" in caught.value.message
    assert f"blinkc rebuild {folder}" in caught.value.hint
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    report = rebuilding.rebuild_engines(folder, EngineOptions(), quiet())
    assert report["num_plans"] == 2
    with open_bundle(folder) as bundle:  # every hash is right
        bundle.check_builds(FOUND)
        for entry in bundle.manifest.target.engines:
            assert (entry.version, entry.level, entry.scratch_bytes) == ("10.0.1", 3, 128)
            assert bundle.read_bytes(entry.plan).startswith(
                b"a new plan of " + entry.segment.encode()
            )
        assert "tensorrt 10.0.1, level 3" in inspect_text(bundle)
        with pytest.raises(BlinkError, match=r"driver 580\.1; this machine has 581\.0"):
            bundle.check_builds({**FOUND, "driver": "581.0"})
        with pytest.raises(BlinkError, match="this machine has none"):
            bundle.check_builds({"driver": "580.1", "compute capability": "9.0"})
    changed = {
        path.relative_to(folder).as_posix()
        for path in {*before, *(p for p in folder.rglob("*") if p.is_file())}
        if not path.exists() or before.get(path) != path.read_bytes()
    }
    assert all(name == MANIFEST_NAME or name.endswith(".plan") for name in changed)
    assert not list(folder.parent.glob(".b-plans"))


def test_a_killed_rebuild_leaves_the_old_bundle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a manifest that names plans which are not there."""
    write = rebuilding.write_atomically

    def killed(path: Path, data: bytes) -> None:
        if path.name == MANIFEST_NAME:
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(rebuilding, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        rebuilding.rebuild_engines(folder, EngineOptions(), quiet())
    with open_bundle(folder) as bundle:
        assert bundle.manifest.target.builds == {"tensorrt": "8.5.9"}
    monkeypatch.setattr(rebuilding, "write_atomically", write)
    rebuilding.rebuild_engines(folder, EngineOptions(), quiet())
    with open_bundle(folder) as bundle:
        bundle.check_builds(FOUND)


def test_what_cannot_be_rebuilt_says_why(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small_bundle(tmp_path / "cpu")
    with pytest.raises(BlinkError, match="holds no TensorRT plans"):
        rebuilding.rebuild_engines(tmp_path / "cpu", EngineOptions(), quiet())
    monkeypatch.setattr(rebuilding, "find_gpu", lambda: None)
    with pytest.raises(BlinkError, match="the bundle is for sm_90, this one has none"):
        rebuilding.rebuild_engines(folder, EngineOptions(), quiet())
    (folder / "code" / "engines" / "segment1.onnx").write_bytes(b"segment2")
    with pytest.raises(BlinkError, match=r"segment1\.onnx is damaged"):
        rebuilding.rebuild_engines(folder, EngineOptions(), quiet())


def test_the_command_rebuilds_with_rtx(tmp_path: Path) -> None:
    """With the real builder: a plan's segment comes back from the bundle alone."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")
    from onnx import TensorProto, helper

    write_bundle_with_plans(tmp_path / "b", "tensorrt-rtx", "sm_89,sm_120")
    tensors = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT16, ["t", 4]) for n in ("a0", "o0")
    ]
    graph = helper.make_graph(
        [helper.make_node("Neg", ["a0"], ["o0"])], "g", tensors[:1], tensors[1:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with open_bundle(tmp_path / "b") as bundle:
        manifest = bundle.manifest
    for segment in SEGMENTS:
        path = tmp_path / "b" / "code" / "engines" / f"{segment}.onnx"
        path.write_bytes(model.SerializeToString())
    (tmp_path / "b" / MANIFEST_NAME).unlink()
    new = manifest_of(tmp_path / "b", manifest.weights, target=manifest.target)
    (tmp_path / "b" / MANIFEST_NAME).write_bytes(manifest_to_bytes(new))
    result = CliRunner().invoke(main, ["rebuild", str(tmp_path / "b")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "2 plans built with TensorRT-RTX" in result.output
    with open_bundle(tmp_path / "b") as bundle:
        (version,) = set(bundle.manifest.target.builds.values())
        assert {entry.version for entry in bundle.manifest.target.engines} == {version}
        assert version != "8.5.9"
