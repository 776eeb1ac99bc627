"""Writes a bundle: a finished BUILD -> a folder or archive that is whole or not there."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkc import abi, stages
from blinkc.artifacts import WeightFiles, load_segmented
from blinkc.build_folder import RECORD_NAME, BuildFolder, hash_file, replace_folder
from blinkc.bundle.cross_check import checkpoint_folder
from blinkc.bundle.golden import NUM_GOLDEN_TOKENS, golden_prompt, run_golden
from blinkc.bundle.kept_reference import KeptReference
from blinkc.bundle.manifest import (
    MANIFEST_NAME,
    EngineEntry,
    ExternalFile,
    FileEntry,
    Golden,
    Limits,
    Manifest,
    PlanSummary,
    Target,
    WeightEntry,
    manifest_to_bytes,
)
from blinkc.bundle.reader import open_bundle
from blinkc.bundle.tokenizer_files import write_tokenizer
from blinkc.bundle.write_weights import (
    WEIGHTS_NAME,
    drawn_entry,
    embed_weights,
    reference_weights,
    split_random,
)
from blinkc.command_text import COMMAND_NAME
from blinkc.config import STAGES
from blinkc.engine.segment_engines import ENGINE_FACTS
from blinkc.errors import BlinkError
from blinkc.progress import Progress
from blinkc.provenance import all_tool_versions
from blinkc.staging import staging_folder

if TYPE_CHECKING:
    from blinkc.capture.plan import CapturePlan
    from blinkc.surgery.segments import SegmentedModel

MIN_CUDA_DRIVER = "13.0"  # cubins of NVRTC 13 and their device-side graph launch
CPU_MARCH = {"x86_64": "x86-64-v3", "aarch64": "armv8.2-a"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleConfig:
    """What the user asked `blinkc bundle` for."""

    build: Path
    output: Path
    archive: bool = False
    embed_weights: bool = True
    weights_from: Sequence[Path] = ()
    model_name: str | None = None
    tool_format: str = "auto"
    golden: bool = True
    cross_check: bool = True


def write_bundle(config: BundleConfig, progress: Progress) -> Manifest:
    """Write the bundle and return its manifest.

    Everything is written and checked in a folder beside the output, which is renamed at the end.

    Raises:
        BlinkError: the build is not finished, weights are missing, the output is something else, or
            the golden prompt fails.
    """
    _check_output(config.output, config.archive)
    with (
        BuildFolder(config.build, create=False) as build,
        staging_folder(config.output) as staging,
    ):
        _check_stages(build)
        folder = staging / "bundle"
        folder.mkdir()
        manifest = _write_content(config, build, folder, progress)
        if config.archive:
            with progress.step("archive", f"writing {config.output.name}"):
                _write_archive(folder, manifest, staging / "archive")
                os.replace(staging / "archive", config.output)
        else:
            replace_folder(folder, config.output)
    return manifest


def _write_content(
    config: BundleConfig, build: BuildFolder, folder: Path, progress: Progress
) -> Manifest:
    files = WeightFiles(build, config.weights_from)
    try:
        segmented = load_segmented(build.stage_folder("segment"), files)
        plan = stages.load_plan(build)
        command: str = build.read_json(COMMAND_NAME)["compile"]
    except (KeyError, TypeError) as error:  # a field that came or went
        raise BlinkError(
            f"{config.build} was made by another version of blinkc",
            hint="run blinkc compile again with the same options",
        ) from error
    spec = segmented.spec
    facts = build.read_json(f"codegen/{stages.FACTS_NAME}")
    _copy_code(build, folder)
    tokenizer = write_tokenizer(
        build.stage_folder("read") / "tokenizer",
        folder,
        spec_bos_id=spec.bos_token_id,
        spec_eos_ids=spec.eos_token_ids,
        note=progress.note,
        tool_format=config.tool_format,
    )
    with progress.step("weights", "writing" if config.embed_weights else "referring to"):
        weights, external = _write_weights(
            config, segmented, folder, progress, facts["target"] != "cpu"
        )
    limits = limits_from_plan(plan)
    manifest = Manifest.model_validate(
        {
            "schema_version": 1,
            "abi_version": abi.constants()["BLINK_ABI_VERSION"],
            "model_name": config.model_name or spec.name,
            "architecture": spec.architecture,
            "dtype": spec.dtype,
            "target": _target(facts, folder),
            "limits": limits,
            "plan": _summary(plan),
            "tokenizer": tokenizer,
            "notes": spec.notes,
            "tools": _tools(build),
            "rebuild": f"{command} && {_bundle_command(config)}",
            "files": _list_files(folder),
            "external_files": external,
            "weights": weights,
        }
    )
    (folder / MANIFEST_NAME).write_bytes(manifest_to_bytes(manifest))
    golden = _golden(config, manifest, folder, segmented, KeptReference(build, files), progress)
    manifest = Manifest.model_validate({**dict(manifest), "golden": golden})
    (folder / MANIFEST_NAME).write_bytes(manifest_to_bytes(manifest))
    return manifest


def _bundle_command(config: BundleConfig) -> str:
    """Return the command that bundles the build again."""
    words = ["blinkc", "bundle", "BUILD"]
    words += ["--archive"] if config.archive else []
    words += [] if config.embed_weights else ["--weights", "reference"]
    words += ["--name", config.model_name] if config.model_name else []
    words += ["--tool-format", config.tool_format] if config.tool_format != "auto" else []
    return shlex.join([*words, "-o", "BUNDLE"])


def _golden(
    config: BundleConfig,
    manifest: Manifest,
    folder: Path,
    segmented: SegmentedModel,
    reference: KeptReference,
    progress: Progress,
) -> Golden:
    """Compute the golden tokens: on the CPU target itself; for a GPU by transformers, with margins,
    or by that GPU at its first load."""
    tokenizer = manifest.tokenizer
    path = folder / tokenizer.tokenizer_json if tokenizer.tokenizer_json else None
    prompt = golden_prompt(path, manifest.limits)
    output: list[int] = []
    count = max(min(NUM_GOLDEN_TOKENS, manifest.limits.max_seqlen - len(prompt)), 1)
    if config.golden and manifest.target.name == "cpu":
        with (
            progress.step("golden", "running the golden prompt"),
            open_bundle(folder, check_hashes=False) as bundle,
        ):
            output = run_golden(bundle, prompt, count, weights_from=config.weights_from)
    checked_against, made_by = "", "the cpu target" if output else ""
    margins: list[float] = []
    is_quantized = any(weight.encoding for weight in segmented.weights.values())
    # transformers' tokens are those of the whole weights: a quantized model records its own.
    compares = config.golden and config.cross_check and not is_quantized
    checkpoint = checkpoint_folder(segmented) if compares else None
    if checkpoint is not None and output:
        with progress.step("golden", "comparing it with transformers"):
            checked_against = reference.cross_check(checkpoint, prompt, output)
    elif checkpoint is not None:
        with progress.step("golden", "asking transformers"):
            output, margins, made_by = reference.completion(checkpoint, prompt, count)
    return Golden(
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        margins=tuple(margins),
        made_by=made_by,
        checked_against=checked_against,
    )


def _write_weights(
    config: BundleConfig,
    segmented: SegmentedModel,
    folder: Path,
    progress: Progress,
    on_gpu: bool,
) -> tuple[tuple[WeightEntry, ...], tuple[ExternalFile, ...]]:
    weights = list(segmented.weights.values())
    path = folder / WEIGHTS_NAME
    seeds, in_files = split_random(weights, segmented.spec.dtype) if on_gpu else ({}, weights)
    external: tuple[ExternalFile, ...] = ()
    if config.embed_weights:
        entries = embed_weights(in_files, path, progress.update)
    else:
        entries, external = reference_weights(in_files, path, progress.update)
    by_name = {entry.name: entry for entry in entries}
    ordered = [by_name.get(w.name) or drawn_entry(w, seeds[w.name]) for w in weights]
    return tuple(ordered), external


def limits_from_plan(plan: CapturePlan) -> Limits:
    """Return the manifest's limits for a plan."""
    return Limits.model_validate({name: getattr(plan, name) for name in Limits.model_fields})


def _summary(plan: CapturePlan) -> PlanSummary:
    num_prefill = sum(1 for key in plan.keys if key.kind == "prefill")
    return PlanSummary(
        plan="plan.json",
        num_prefill_keys=num_prefill,
        num_decode_keys=len(plan.keys) - num_prefill,
        ring_bytes=plan.memory.ring_bytes,
        kv_bytes=plan.memory.kv_bytes,
        weight_bytes=plan.memory.weight_bytes,
        arena_bytes=plan.memory.arena_bytes,
        graph_bytes=plan.memory.graph_bytes,
    )


def _target(facts: dict[str, Any], folder: Path) -> Target:
    machine = facts["machine"]
    is_cpu = facts["target"] == "cpu"
    cubins = {file.stem: str(file.relative_to(folder)) for file in folder.glob("code/*.cubin")}
    engines = _engines(folder / "code")
    return Target.model_validate(
        {
            "name": facts["target"],
            "machine": machine,
            "march": CPU_MARCH.get(machine, "") if is_cpu else "",
            "architecture": facts["architecture"],
            "library": "code/target.so" if is_cpu else None,
            "engine": _engine_name(facts["engine"], engines),
            "cubins": cubins,
            "requires": {} if is_cpu else {"cuda driver": MIN_CUDA_DRIVER},
            **engines,
        }
    )


def _engine_name(engine: str, engines: dict[str, Any]) -> str:
    """Name both engines where `--engine auto` mixes them."""
    kinds = sorted({entry.engine for entry in engines.get("engines", ())})
    return ", ".join([engine, *(kind for kind in kinds if kind != engine)])


def _engines(code: Path) -> dict[str, Any]:
    """Return what the manifest says of plans, where the build has any."""
    path = code / ENGINE_FACTS
    if not path.is_file():
        return {}
    facts = json.loads(path.read_text(encoding="utf-8"))
    entries = tuple(engine_entry(facts, segment) for segment in facts["segments"])
    return {"builds": facts["builds"], "engines": entries}


def engine_entry(facts: dict[str, Any], segment: dict[str, Any]) -> EngineEntry:
    """Return a plan's entry; its files lie in the bundle's code folder."""
    data = {**segment, "engine": facts["engine"], "version": facts["version"]}
    data |= {name: f"code/{segment[name]}" for name in ("plan", "model")}
    return EngineEntry.model_validate({**data, "max_tokens": tuple(segment["max_tokens"])})


def _copy_code(build: BuildFolder, folder: Path) -> None:
    shutil.copyfile(build.stage_folder("capture") / "plan.json", folder / "plan.json")
    code = folder / "code"
    code.mkdir()
    source = build.stage_folder("codegen")
    for file in sorted(source.rglob("*")):
        if file.is_file() and file.name not in (RECORD_NAME, stages.FACTS_NAME):
            place = code / file.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place)


def _tools(build: BuildFolder) -> dict[str, str]:
    tools = all_tool_versions()
    for stage in STAGES:
        record = build.record(stage)
        tools.update(record.tools if record else {})
    return dict(sorted(tools.items()))


def _list_files(folder: Path) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(
            path=path.relative_to(folder).as_posix(),
            bytes=path.stat().st_size,
            sha256=hash_file(path),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    )


def _check_stages(build: BuildFolder) -> None:
    """Raise `BlinkError` unless every stage is there and was made from the one before it."""
    previous = ""
    for stage in STAGES:
        record = build.record(stage)
        if record is None or record.follows != previous:
            what = "is missing or damaged" if record is None else "is of an earlier compilation"
            raise BlinkError(
                f"{build.path} is not finished: stage {stage} {what}",
                hint="run blinkc compile again with the same options; it goes on from there",
            )
        previous = record.outputs_digest


def _check_output(output: Path, archive: bool) -> None:
    if not output.exists():
        return
    is_ours = output.is_file() if archive else (output / MANIFEST_NAME).is_file()
    is_empty = output.is_dir() and not archive and not any(output.iterdir())
    if not is_ours and not is_empty:
        raise BlinkError(f"{output} exists and is not a bundle", hint="choose another place for -o")


def _write_archive(folder: Path, manifest: Manifest, path: Path) -> None:
    """Write a plain tar: the manifest first, the weights last, no times or owners."""
    names = sorted((f.path for f in manifest.files), key=lambda name: (name == WEIGHTS_NAME, name))
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name in [MANIFEST_NAME, *names]:
            info = tarfile.TarInfo(name)
            info.size = (folder / name).stat().st_size
            info.mode = 0o644
            with (folder / name).open("rb") as file:
                archive.addfile(info, file)
