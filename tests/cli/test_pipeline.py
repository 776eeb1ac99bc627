"""The build folder: killed runs resume, unchanged stages stay, half an artifact never counts."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blinkc import pipeline, stages
from blinkc.artifacts import WeightFiles
from blinkc.build_folder import BuildFolder, write_atomically
from blinkc.capture.plan_capture import CaptureConfig
from blinkc.codegen import compile_cuda
from blinkc.config import STAGES, CompileConfig
from blinkc.engine import build_engines
from blinkc.errors import BlinkError
from blinkc.model_source import find_model
from tests.cli import fake_stages
from tests.cli.fake_stages import config_for, make_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def _use_fake_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLINK_CACHE_DIR", "off")
    monkeypatch.setattr(pipeline, "source_digest", fake_stages.fake_source_digest)
    for name, function in fake_stages.fake_stages().items():
        monkeypatch.setattr(stages, name, function)


def run(config: CompileConfig, build: Path) -> dict[str, bool]:
    """Compile; return for each stage whether its artifact was kept."""
    return {o.stage: o.cached for o in pipeline.compile_model(config, build)}


def content(build: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(build)): path.read_bytes()
        for path in build.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize("stage", STAGES)
def test_killed_run_resumes_where_it_stopped(stage: str, model: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    command = [sys.executable, "-m", "tests.cli.fake_stages", str(model), str(build), stage]
    killed = subprocess.run(command, cwd=ROOT, timeout=600, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (build / stage).exists()
    assert list(build.glob(".new-*"))
    outcome = run(config_for(model), build)
    position = STAGES.index(stage)
    assert [outcome[name] for name in STAGES] == [number < position for number in range(5)]
    assert not list(build.glob(".new-*"))

    run(config_for(model), tmp_path / "at_once")
    assert content(build) == content(tmp_path / "at_once")


def test_second_run_does_nothing(model: Path, tmp_path: Path) -> None:
    assert not any(run(config_for(model), tmp_path / "build").values())
    assert all(run(config_for(model), tmp_path / "build").values())


def test_option_reruns_only_the_stages_that_follow_from_it(model: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    run(config_for(model), build)
    outcome = run(config_for(model, num_slots=8), build)
    assert outcome == {
        "read": True, "segment": True, "engine": True, "capture": False,
        "codegen": True,  # what the fake capture stage writes has not changed
    }  # fmt: skip
    (model / "tokenizer.json").write_text('{"changed": 1}')
    assert run(config_for(model, num_slots=8), build)["read"] is False


def test_tool_of_another_version_reruns_its_stage(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tmp_path / "build"
    run(config_for(model), build)
    versions = stages.tool_versions

    def newer(names: Any) -> dict[str, str]:
        return {**versions(names), **({"torch": "99"} if "torch" in names else {})}

    monkeypatch.setattr(stages, "tool_versions", newer)
    assert run(config_for(model), build)["read"] is False


def test_build_goes_on_on_a_machine_without_the_tools(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config_for(model), tmp_path / "build")
    shutil.copytree(tmp_path / "build", tmp_path / "elsewhere" / "b", symlinks=True)
    shutil.rmtree(tmp_path / "build")
    monkeypatch.setattr(stages, "tool_versions", lambda names: {})
    assert all(run(config_for(model), tmp_path / "elsewhere" / "b").values())
    # Nor does another onnx count where the stage lacks torch: it could not be run again.
    other = {"onnx": "0.1"}
    monkeypatch.setattr(
        stages, "tool_versions", lambda names: {n: v for n, v in other.items() if n in names}
    )
    assert run(config_for(model), tmp_path / "elsewhere" / "b")["read"]


@pytest.mark.parametrize("damage", ["flip", "remove", "record"])
def test_damaged_artifact_is_made_again(damage: str, model: Path, tmp_path: Path) -> None:
    build = tmp_path / "build"
    run(config_for(model), build)
    before = content(build)
    path = build / "segment" / ("stage.json" if damage == "record" else "first.txt")
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(b"x" + path.read_bytes()[1:])
    outcome = run(config_for(model), build)
    assert outcome["read"] and not outcome["segment"]
    assert content(build) == before


def test_what_the_last_stage_wants_is_missed_before_the_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: minutes of reading the model, and only then no compiler, no TensorRT, no check."""
    build = tmp_path / "build"
    gpu = CaptureConfig(target="sm_90")

    def refusal(**options: Any) -> str:
        with pytest.raises((BlinkError, OSError)) as caught:
            pipeline.compile_model(CompileConfig(model=str(model), **options), build)
        assert not [stage for stage in STAGES if (build / stage).exists()]
        return str(caught.value)

    (tmp_path / "file").touch()
    assert "Not a directory" in refusal(debug_dir=tmp_path / "file" / "sub")
    assert "--until engine" in refusal(check=True, until="segment")
    assert "which engine cuda does not" in refusal(
        target="sm_90", engine="cuda", capture=gpu, check=True
    )
    monkeypatch.setattr(compile_cuda, "_import", raise_missing)
    assert "missing" in refusal(target="sm_90", engine="cuda", capture=gpu)
    monkeypatch.setattr(build_engines, "load_tensorrt", raise_missing)
    assert "missing" in refusal(target="sm_90", engine="tensorrt-rtx", capture=gpu)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler does not exist" in refusal()
    assert run(CompileConfig(model=str(model), until="capture"), build)["capture"] is False


def raise_missing(name: str) -> None:
    raise BlinkError(f"{name} is missing")


def test_a_finished_build_wants_no_tools(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a build that another machine finished."""
    run(config_for(model), tmp_path / "build")
    monkeypatch.setattr(stages, "tool_versions", lambda names: {})
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert all(run(config_for(model), tmp_path / "build").values())


def test_until_stops_and_a_later_run_goes_on(model: Path, tmp_path: Path) -> None:
    config = CompileConfig(model=str(model), until="segment")
    assert list(run(config, tmp_path / "build")) == ["read", "segment"]
    assert not (tmp_path / "build" / "capture").exists()
    assert run(config_for(model), tmp_path / "build")["segment"] is True


def test_fine_tuned_weights_of_equal_shape_are_read_again(model: Path, tmp_path: Path) -> None:
    """Guards against a build, or the cache, that goes by names and shapes alone."""
    weights = model / "model.safetensors"
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    run(config_for(model), tmp_path / "build")
    weights.write_bytes(weights.read_bytes()[:-1] + b"2")
    assert run(config_for(model), tmp_path / "build")["read"] is False


@pytest.mark.parametrize("cache", ["off", "cache"])
def test_code_follows_every_stage_before_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """Guards models whose engines and plans are equal and whose code is not, such as one with a
    sliding window and one without."""
    monkeypatch.setenv("BLINK_CACHE_DIR", "off" if cache == "off" else str(tmp_path / cache))

    def write_config(*arguments: Any) -> None:
        folder = next(a for a in arguments if isinstance(a, Path))
        shutil.copyfile(model / "config.json", folder / "first.txt")

    monkeypatch.setattr(stages, "read_model", write_config)
    monkeypatch.setattr(stages, "segment_model", write_config)
    run(config_for(model), tmp_path / "one")
    (model / "config.json").write_text('{"model_type": "llama", "sliding_window": 21}')
    same_build = run(config_for(model), tmp_path / "one")
    assert same_build["codegen"] is False
    assert all(run(config_for(model), tmp_path / "one").values())


def test_another_build_takes_stages_from_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLINK_CACHE_DIR", str(tmp_path / "cache"))
    assert not any(run(config_for(model), tmp_path / "one").values())
    assert all(run(config_for(model), tmp_path / "two").values())
    assert content(tmp_path / "one") == content(tmp_path / "two")
    for entry in (tmp_path / "cache").rglob("first.txt"):
        entry.write_text("damaged")
    assert not any(run(config_for(model), tmp_path / "three").values())
    assert content(tmp_path / "one") == content(tmp_path / "three")
    assert all(run(config_for(model), tmp_path / "four").values())  # and the cache is whole again


def test_debug_dir_gets_every_artifact_in_order(model: Path, tmp_path: Path) -> None:
    config = CompileConfig(model=str(model), debug_dir=tmp_path / "debug")
    run(config, tmp_path / "build")
    names = sorted(path.name for path in (tmp_path / "debug").iterdir())
    assert names == ["1_read", "2_segment", "3_engine", "4_capture", "5_codegen"]


def test_stage_that_fails_leaves_the_old_artifact(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tmp_path / "build"
    run(config_for(model), build)
    before = content(build / "capture")

    def fail(*_: Any) -> None:
        raise BlinkError("no")

    monkeypatch.setattr(stages, "plan_graphs", fail)
    with pytest.raises(BlinkError, match="no"):
        run(config_for(model, num_slots=8), build)
    assert content(build / "capture") == before
    assert not list(build.glob(".new-*"))


def test_two_compiles_in_one_build_are_refused(model: Path, tmp_path: Path) -> None:
    with BuildFolder(tmp_path / "build"), pytest.raises(BlinkError, match="another blinkc"):
        run(config_for(model), tmp_path / "build")


def test_another_index_of_shards_is_another_model(model: Path) -> None:
    # Guards: the stage was taken from the cache though the index names other shards.
    before = find_model(str(model)).digest
    (model / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert find_model(str(model)).digest != before


@pytest.mark.parametrize("name", [".lock", ".build.json.4711"])
def test_folder_that_another_begins_is_a_build(name: str, tmp_path: Path) -> None:
    # Guards: of two compiles at once the later one said that the folder is no build.
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / name).touch()
    with BuildFolder(tmp_path / "b"):
        pass


def test_write_without_a_name_names_the_folder(tmp_path: Path) -> None:
    # Guards: "No space left on device" alone leaves open of three places which one is full.
    with (
        BuildFolder(tmp_path / "b") as build,
        pytest.raises(OSError, match="No space") as full,
        build.write_stage("read", inputs_digest="", follows="", tools={}),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.filename == str(tmp_path / "b")


def test_model_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BlinkError):
        run(config_for(tmp_path / "nothing"), tmp_path / "build")
    assert not (tmp_path / "build").exists()


def test_folder_that_is_something_else_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(BlinkError, match="not a build"):
        run(config_for(model), tmp_path / "home")
    assert os.listdir(tmp_path / "home") == ["letter.txt"]


def test_moved_weights_are_found_by_content(tmp_path: Path) -> None:
    weights = tmp_path / "a" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    with BuildFolder(tmp_path / "build") as build:
        digest = WeightFiles(build).add(weights)
        assert WeightFiles(build).path(digest) == weights
        moved = tmp_path / "b"
        weights.parent.rename(moved)
        with pytest.raises(BlinkError, match="missing or have changed"):
            WeightFiles(build).path(digest)
        assert WeightFiles(build, [moved]).path(digest) == moved / weights.name
        assert WeightFiles(build).path(digest) == moved / weights.name  # and remembered
        (moved / weights.name).write_bytes(b"WEIGHTS")
        with pytest.raises(BlinkError, match="missing or have changed"):
            WeightFiles(build, [moved]).path(digest)


@pytest.mark.parametrize("content", [None, b"old"])
def test_a_write_that_fails_gives_its_bytes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    """The bug: a disk that was full kept the part that had been written."""

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "manifest.json"
    if content is not None:
        path.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert sorted(tmp_path.iterdir()) == before
    assert content is None or path.read_bytes() == content
