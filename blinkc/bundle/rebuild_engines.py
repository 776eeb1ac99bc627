"""`blinkc rebuild`: a bundle's plans again, for the TensorRT, GPU and driver of this machine.

New plans get new names, the manifest is replaced at once, then the old plans go: a killed run
leaves a bundle that is whole, the old one or the new one.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from blinkc.build_folder import hash_file, write_atomically
from blinkc.bundle.manifest import (
    MANIFEST_NAME,
    EngineEntry,
    FileEntry,
    Manifest,
    manifest_to_bytes,
)
from blinkc.bundle.reader import Bundle, open_bundle
from blinkc.engine.gpu_here import GpuHere, find_gpu
from blinkc.engine.options import EngineOptions
from blinkc.engine.segment_engines import SegmentEngine, segment_engine_from_json
from blinkc.engine.tensorrt_api import TensorRtApi, load_tensorrt
from blinkc.engine.tensorrt_model import EngineModel
from blinkc.engine.tensorrt_plans import BuiltPlan, build_plans
from blinkc.errors import BlinkError
from blinkc.progress import Progress

CODE = "code/"
LAUNCHES = "code/launches.json"


def rebuild_engines(path: Path, options: EngineOptions, progress: Progress) -> dict[str, Any]:
    """Build every plan of a bundle again and write them into it.

    Raises:
        BlinkError: the bundle has no plans, is an archive, is damaged, or this machine cannot
            build them.
    """
    started = time.monotonic()
    with open_bundle(path, check_hashes=False) as bundle:
        _check(bundle)
        manifest = bundle.manifest
        launches = json.loads(bundle.read_bytes(LAUNCHES))
        engines = [segment_engine_from_json(entry) for entry in launches["engines"]]
        models = [
            _model(bundle, entry, engine)
            for entry, engine in zip(manifest.target.engines, engines, strict=True)
        ]
    api = load_tensorrt(manifest.target.engines[0].engine)
    gpu = _gpu(api, manifest)
    if notice := api.notice("built"):
        progress.note(notice)
    kept = path.resolve().with_name(f".{path.resolve().name}-plans")  # a killed run goes on there
    with progress.step("engines", f"building {len(models)} plans with {api.title}"):
        plans = build_plans(
            api,
            models,
            engines[0].ranges,
            kept,
            targets=() if gpu else tuple(manifest.target.name.split(",")),
            gpu=f"{gpu.target} {gpu.driver}" if gpu else "",
            options=options,
            say=progress.update,
            note=progress.note,
        )
        _replace(path, manifest, api, gpu, plans)
    shutil.rmtree(kept, ignore_errors=True)
    return {
        "bundle": str(path),
        "title": api.title,
        "num_plans": len(plans),
        "seconds": round(time.monotonic() - started, 3),
    }


def _check(bundle: Bundle) -> None:
    if not bundle.manifest.target.engines:
        raise BlinkError(
            f"{bundle.path} holds no TensorRT plans",
            hint=f"its code is made by: {bundle.manifest.rebuild}",
        )
    if bundle.is_archive:
        raise BlinkError(
            f"{bundle.path} is an archive; plans are replaced in folders",
            hint=f"blinkc extract {bundle.path} -o FOLDER && blinkc rebuild FOLDER",
        )
    wanted = {LAUNCHES, *(entry.model for entry in bundle.manifest.target.engines)}
    for file in bundle.manifest.files:
        if file.path in wanted and hash_file(bundle.file(file.path)) != file.sha256:
            raise BlinkError(f"{bundle.path}: {file.path} is damaged", hint="copy the bundle again")


def _model(bundle: Bundle, entry: EngineEntry, engine: SegmentEngine) -> EngineModel:
    return EngineModel(
        name=engine.segment,
        model=bundle.read_bytes(entry.model),
        activations=engine.activations,
        weights=engine.weights,
        outputs=engine.outputs,
    )


def _gpu(api: TensorRtApi, manifest: Manifest) -> GpuHere | None:
    """Return the GPU to build for; None where the bundle's own targets are named."""
    if api.named_targets:
        return None
    gpu = find_gpu()
    if gpu is None or gpu.target != manifest.target.name.rstrip("af"):
        found = f"this one has {gpu.name}, {gpu.target}" if gpu else "this one has none"
        raise BlinkError(
            f"{api.title} builds for the GPU in the machine; the bundle is for "
            f"{manifest.target.name}, {found}",
            hint=f"rebuild on the machine that serves, or compile again: {manifest.rebuild}",
        )
    return gpu


def _replace(
    path: Path,
    manifest: Manifest,
    api: TensorRtApi,
    gpu: GpuHere | None,
    plans: list[BuiltPlan],
) -> None:
    files = {entry.path: entry for entry in manifest.files}
    entries, stale = [], []
    for entry, built in zip(manifest.target.engines, plans, strict=True):
        place = f"{CODE}engines/{entry.segment}-{built.sha256[:12]}.plan"
        write_atomically(path / place, built.path.read_bytes())
        if entry.plan != place:
            stale.append(entry.plan)
            del files[entry.plan]
        files[place] = FileEntry(
            path=place, bytes=(path / place).stat().st_size, sha256=hash_file(path / place)
        )
        facts = {
            "plan": place,
            "version": built.version,
            "level": built.level,
            "seconds": built.seconds,
            "scratch_bytes": built.scratch_bytes,
        }
        entries.append(entry.model_copy(update=facts))
    builds = {api.engine: api.version_text} | (gpu.builds if gpu else {})
    target = manifest.target.model_copy(update={"builds": builds, "engines": tuple(entries)})
    ordered = tuple(files[name] for name in sorted(files))
    changed = manifest.model_copy(update={"target": target, "files": ordered})
    write_atomically(path / MANIFEST_NAME, manifest_to_bytes(changed))
    for name in stale:
        (path / name).unlink(missing_ok=True)
