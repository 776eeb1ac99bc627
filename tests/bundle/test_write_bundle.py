"""A real model through compile and bundle: whole or absent, the same bytes, and right tokens."""

from __future__ import annotations

import ctypes
import fcntl
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blinkc import artifacts, stages
from blinkc.build_folder import BuildFolder
from blinkc.bundle import cross_check as cross_check_module
from blinkc.bundle import kept_reference
from blinkc.bundle import write_bundle as module
from blinkc.bundle.cross_check import cross_check, reference_completion
from blinkc.bundle.kept_reference import KeptReference
from blinkc.bundle.manifest import MANIFEST_NAME, Manifest, manifest_to_bytes
from blinkc.bundle.reader import open_bundle
from blinkc.bundle.verify_bundle import verify_bundle
from blinkc.bundle.write_bundle import BundleConfig, write_bundle
from blinkc.capture.plan_capture import CaptureConfig
from blinkc.config import CompileConfig
from blinkc.errors import BlinkError
from blinkc.pipeline import compile_model
from blinkc.plan_report import plan_model
from blinkc.progress import Progress
from tests.bundle.tiny_model import TEMPLATE, write_tiny_model

QUIET = Progress(quiet=True)
_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE = 24, 1  # of linux/prctl.h and linux/capability.h


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def build(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("build") / "b"
    capture = CaptureConfig(max_batch=2, max_seqlen=96, max_prefill_tokens=32, num_slots=4)
    compile_model(CompileConfig(model=str(model), capture=capture), path)
    return path


@pytest.fixture(scope="module")
def bundle(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bundle") / "bundle"
    write_bundle(BundleConfig(build=build, output=output), QUIET)
    return output


def test_golden_tokens_are_transformers_own(bundle: Path) -> None:
    with open_bundle(bundle) as opened:
        golden = opened.manifest.golden
    assert golden is not None
    assert len(golden.output_token_ids) == module.NUM_GOLDEN_TOKENS
    assert len(set(golden.output_token_ids)) > 3  # a stuck model would agree with itself
    assert golden.checked_against.startswith("transformers ")
    assert verify_bundle(bundle, progress=QUIET).golden == "gives its tokens"


def test_cross_check_finds_one_wrong_token(bundle: Path, model: Path) -> None:
    with open_bundle(bundle) as opened:
        golden = opened.manifest.golden
    assert golden is not None
    wrong = list(golden.output_token_ids)
    wrong[7] = (wrong[7] + 1) % 300
    with pytest.raises(BlinkError, match="position 7"):
        cross_check(model, golden.prompt_token_ids, wrong)


def test_torch_follows_a_quota(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: a container of two cores of a large machine got as many threads as the machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(cross_check_module, "usable_cores", lambda: 3)
    try:
        reference_completion(model, [5, 6], 1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_transformers_is_not_asked_again(
    build: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: each bundling of an unchanged build loaded the checkpoint and compared it anew."""

    def fail(*_: Any) -> str:
        raise AssertionError("asked again")

    monkeypatch.setattr(cross_check_module, "cross_check", fail)
    manifest = write_bundle(BundleConfig(build=build, output=tmp_path / "again"), QUIET)
    with open_bundle(bundle) as first:
        assert manifest.golden == first.manifest.golden


def test_a_hub_snapshot_is_compared_with_transformers(model: Path, tmp_path: Path) -> None:
    """The bug: its files are links to files named by hash, where no config.json lies beside."""
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copyfile(path, blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(blobs / f"blob{number}")
    compile_model(CompileConfig(model=str(snapshot), until="segment"), tmp_path / "b")
    with BuildFolder(tmp_path / "b", create=False) as folder:
        files = artifacts.WeightFiles(folder)
        segmented = artifacts.load_segmented(folder.stage_folder("segment"), files)
    assert cross_check_module.checkpoint_folder(segmented) == snapshot


def test_kept_answer_is_of_this_checkpoint_and_question(
    build: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(build, tmp_path / "b")
    shutil.copytree(model, tmp_path / "m")
    asked: list[tuple[list[int], int]] = []

    def complete(_: Path, prompt: list[int], count: int) -> tuple[list[int], list[float], str]:
        asked.append((prompt, count))
        return [len(asked)] * count, [0.1] * count, "transformers"

    monkeypatch.setattr(cross_check_module, "reference_completion", complete)

    def ask(prompt: list[int], count: int) -> tuple[list[int], list[float], str]:
        with BuildFolder(tmp_path / "b", create=False) as folder:
            reference = KeptReference(folder, artifacts.WeightFiles(folder))
            return reference.completion(tmp_path / "m", prompt, count)

    first = ask([5, 6], 3)
    assert ask([5, 6], 3) == first and len(asked) == 1
    for question in (([5, 7], 3), ([5, 7], 2)):
        ask(*question)
        assert asked[-1] == question
    weights = bytearray((tmp_path / "m" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "m" / "model.safetensors").write_bytes(weights)
    ask([5, 7], 2)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    ask([5, 7], 2)
    monkeypatch.setattr(kept_reference, "tool_versions", lambda _: {"transformers": "0"})
    ask([5, 7], 2)
    assert len(asked) == 6


def test_bundle_carries_tokenizer_template_and_provenance(bundle: Path) -> None:
    with open_bundle(bundle) as opened:
        manifest = opened.manifest
        template = manifest.tokenizer.chat_template
        assert template is not None and opened.read_bytes(template).decode() == TEMPLATE
    assert manifest.model_name == "tiny-llama"
    assert manifest.tokenizer.compiled is not None
    assert manifest.tokenizer.eos_token_ids == (1,)
    assert manifest.tokenizer.bos_token_id == 0
    assert manifest.tokenizer.special_token_ids == (0, 1)
    assert {"torch", "transformers", "onnx", "c++", "blinkc"} <= set(manifest.tools)
    assert "--max-seqlen 96" in manifest.rebuild
    text = (bundle / MANIFEST_NAME).read_text()
    assert str(bundle.parent.parent) not in text  # no path of this machine


def test_same_build_gives_the_same_bytes(bundle: Path, build: Path, tmp_path: Path) -> None:
    write_bundle(BundleConfig(build=build, output=tmp_path / "again"), QUIET)
    for path in sorted(p for p in bundle.rglob("*") if p.is_file()):
        other = tmp_path / "again" / path.relative_to(bundle)
        assert path.read_bytes() == other.read_bytes(), path


def test_archive_runs_in_place(build: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.blink"
    write_bundle(BundleConfig(build=build, output=output, archive=True), QUIET)
    assert verify_bundle(output, progress=QUIET).golden == "gives its tokens"


def test_referenced_weights_give_the_same_tokens(
    build: Path, bundle: Path, model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "referring"
    manifest = write_bundle(BundleConfig(build=build, output=output, embed_weights=False), QUIET)
    assert [Path(f.path).name for f in manifest.external_files] == ["model.safetensors"]
    with open_bundle(bundle) as embedded:
        assert manifest.golden == embedded.manifest.golden


def copy_elsewhere(build: Path, model: Path, folder: Path) -> None:
    """Copy build and weights to `folder`/b and /m; the build knows of a place that is gone."""
    shutil.copytree(build, folder / "b")
    shutil.copytree(model, folder / "m")
    paths = json.loads((folder / "b" / "weight_paths.json").read_text())
    for entry in paths.values():
        entry["path"] = "/nowhere/model.safetensors"
    (folder / "b" / "weight_paths.json").write_text(json.dumps(paths))


def test_build_moved_to_another_place_with_its_weights(
    build: Path, model: Path, tmp_path: Path
) -> None:
    copy_elsewhere(build, model, tmp_path)
    config = BundleConfig(build=tmp_path / "b", output=tmp_path / "out", cross_check=False)
    with pytest.raises(BlinkError, match="missing or have changed"):
        write_bundle(config, QUIET)
    write_bundle(replace(config, weights_from=(tmp_path / "m",)), QUIET)
    verify_bundle(tmp_path / "out", progress=QUIET)


def _drop_override() -> None:
    """Have the program to be run obey the modes of files, also where root runs it."""
    ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)


def test_build_that_may_not_be_written_is_bundled(build: Path, model: Path, tmp_path: Path) -> None:
    """The bug: the lock's file was opened for writing, and answers were kept."""
    copy_elsewhere(build, model, tmp_path)
    (tmp_path / "b" / "reference.json").unlink(missing_ok=True)
    (tmp_path / "b" / ".lock").chmod(0o444)
    (tmp_path / "b").chmod(0o555)
    before = sorted((tmp_path / "b").iterdir())
    if subprocess.run(["touch", tmp_path / "b" / "new"], preexec_fn=_drop_override).returncode == 0:
        pytest.skip("this user may write wherever it likes")
    options = ["-o", tmp_path / "out", "--weights-from", tmp_path / "m"]
    command = [sys.executable, "-m", "blinkc.cli", "bundle", tmp_path / "b", *options]

    def bundle_it() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, preexec_fn=_drop_override, capture_output=True, text=True, timeout=600
        )

    with BuildFolder(tmp_path / "b", create=False):  # of one who may write
        refused = bundle_it()
    assert refused.returncode == 1 and "another blinkc is working" in refused.stderr
    with (tmp_path / "b" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # of another who may not write either
        done = bundle_it()
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "b").iterdir()) == before
    verify_bundle(tmp_path / "out", progress=QUIET)


def test_failure_half_way_leaves_nothing(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BundleConfig(build=build, output=tmp_path / "out", cross_check=False)

    def fail(*_: Any, **__: Any) -> list[int]:
        raise BlinkError("the golden prompt failed")

    monkeypatch.setattr(module, "run_golden", fail)
    with pytest.raises(BlinkError, match="golden"):
        write_bundle(config, QUIET)
    assert list(tmp_path.iterdir()) == []


def test_failure_half_way_keeps_the_old_bundle(
    build: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(bundle, tmp_path / "out")

    def fail(*_: Any, **__: Any) -> list[int]:
        raise BlinkError("no")

    monkeypatch.setattr(module, "run_golden", fail)
    with pytest.raises(BlinkError):
        write_bundle(BundleConfig(build=build, output=tmp_path / "out"), QUIET)
    verify_bundle(tmp_path / "out", progress=QUIET)


def test_target_that_gives_other_tokens_is_found(bundle: Path, tmp_path: Path) -> None:
    """Guards against a target that runs and is wrong, such as a graph that writes zeros."""
    shutil.copytree(bundle, tmp_path / "b")
    with open_bundle(bundle) as opened:
        data = dict(opened.manifest)
    golden = data["golden"].model_copy(update={"output_token_ids": (0,) * 16})
    manifest = Manifest.model_validate({**data, "golden": golden})
    (tmp_path / "b" / MANIFEST_NAME).write_bytes(manifest_to_bytes(manifest))
    with pytest.raises(BlinkError, match="the golden prompt gives"):
        verify_bundle(tmp_path / "b", progress=QUIET)
    # The server runs it at each start, before it listens.
    command = [sys.executable, "-m", "blink_runtime.cli", "run", str(tmp_path / "b"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "the golden prompt gives" in done.stderr
    assert "http://" not in done.stdout


def test_unfinished_build_is_refused(build: Path, tmp_path: Path) -> None:
    shutil.copytree(build, tmp_path / "b")
    (tmp_path / "b" / "codegen" / "target.so").write_bytes(b"")
    with pytest.raises(BlinkError, match="codegen is missing or damaged") as caught:
        write_bundle(BundleConfig(build=tmp_path / "b", output=tmp_path / "out"), QUIET)
    assert "blinkc compile" in caught.value.hint


def test_build_of_another_version_is_refused(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: a build without a field that had been added since ended in a KeyError."""
    monkeypatch.setattr(artifacts, "_weights_from_json", lambda data, files: data[0]["new field"])
    with pytest.raises(BlinkError, match="another version of blinkc") as caught:
        write_bundle(BundleConfig(build=build, output=tmp_path / "b"), QUIET)
    assert "blinkc compile" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_build_with_a_stage_of_other_options_is_refused(
    build: Path, model: Path, tmp_path: Path
) -> None:
    """Guards against code for one plan bundled with another plan."""
    shutil.copytree(build, tmp_path / "b")
    capture = CaptureConfig(max_batch=1, max_seqlen=96, max_prefill_tokens=32, num_slots=4)
    config = CompileConfig(model=str(model), capture=capture, until="capture")
    compile_model(config, tmp_path / "b")
    with pytest.raises(BlinkError, match="codegen is of an earlier compilation"):
        write_bundle(BundleConfig(build=tmp_path / "b", output=tmp_path / "out"), QUIET)


def test_output_that_is_something_else_is_left_alone(build: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(BlinkError, match="not a bundle"):
        write_bundle(BundleConfig(build=build, output=tmp_path / "home"), QUIET)
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"


def test_what_was_planned_is_what_was_made(model: Path, build: Path) -> None:
    """The bug: `blinkc plan` told less than half of the scratch that the bundle then took."""
    capture = CaptureConfig(max_batch=2, max_seqlen=96, max_prefill_tokens=32, num_slots=4)
    planned = plan_model(CompileConfig(model=str(model), capture=capture)).plan
    with BuildFolder(build, create=False) as folder:
        made = stages.load_plan(folder)
    assert planned.keys == made.keys
    assert planned.memory.arena_bytes == made.memory.arena_bytes
    assert planned.memory.total_bytes == pytest.approx(made.memory.total_bytes, rel=1e-3)


def test_graphs_are_planned_as_they_are_made(model: Path, tmp_path: Path) -> None:
    """The bug: `blinkc plan` counted half of a step's kernels."""
    capture = CaptureConfig(target="sm_90", max_batch=2, max_seqlen=96, num_slots=4)
    config = CompileConfig(model=str(model), target="sm_90", capture=capture, until="capture")
    compile_model(config, tmp_path / "build")
    planned = plan_model(config).plan
    with BuildFolder(tmp_path / "build", create=False) as folder:
        made = stages.load_plan(folder)
    assert planned.keys == made.keys
    assert planned.memory.graph_bytes == made.memory.graph_bytes > 0
    assert planned.memory.arena_bytes == made.memory.arena_bytes


def test_checkpoint_that_transformers_cannot_load_is_named(tmp_path: Path) -> None:
    # Guards: a traceback of transformers' own code, after the whole compilation.
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BlinkError, match="transformers cannot load") as refusal:
        cross_check(tmp_path, [1], [2])
    assert "--no-cross-check" in refusal.value.hint
