"""The GPU's half of the codegen stage: segments, plan, engines -> cubins and the launch list.

Cubins are kept in the BUILD folder by the hash of what they were compiled from: building engines
again, or with other options, compiles nothing again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkc.build_folder import digest_of, write_atomically
from blinkc.codegen.compile_cuda import compile_cuda
from blinkc.engine.cuda import render_cuda_model
from blinkc.engine.cuda_source import compile_kernels
from blinkc.engine.segment_engines import (
    ENGINE_FACTS,
    SegmentEngine,
    choice_name,
    choose_narrowest,
    segment_engine_from_json,
)
from blinkc.engine.tensorrt_api import load_tensorrt
from blinkc.engine.tensorrt_profiles import RowRange
from blinkc.provenance import tool_versions
from blinkc.resources import include_folder

if TYPE_CHECKING:
    from blinkc.capture.plan import CapturePlan
    from blinkc.config import CompileConfig
    from blinkc.surgery.segments import SegmentedModel

KEPT_CUBINS = "cubins"
_TOOLS = ("nvidia-cuda-nvrtc", "nvidia-nvjitlink", "nvidia-cuda-runtime")


def compile_gpu_model(
    config: CompileConfig,
    segmented: SegmentedModel,
    plan: CapturePlan,
    scheduler: Mapping[str, str],
    built: Mapping[str, Any],
    build_folder: Path,
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, str]:
    """Write cubins, launches.json and the engines' files into `folder`.

    Args:
        scheduler: rendered sources of the scheduler.
        built: what the engine stage's engines.json says; its files lie in `build_folder`/engine.

    Returns:
        The rendered sources of the model's kernels, by file name.
    """
    engines = _segment_engines(built, plan)
    model = render_cuda_model(segmented, plan, engines)
    cubins = keep_cubins(config.architecture, scheduler, model.source, build_folder)
    for name, image in cubins.items():
        (folder / f"{name}.cubin").write_bytes(image)
    launches, facts = model.launches, engine_facts(built, list(engines.values()))
    if engines and all(engine.has_kernels for engine in engines.values()):
        from blink_runtime.engine_choice import measure_choices

        made = build_folder / "engine"
        measured = measure_choices(
            api=load_tensorrt(built["tensorrt"]["engine"]),
            plan=plan,
            launches=launches,
            kernels=cubins["kernels"],
            plans={e.plan: (made / e.plan).read_bytes() for e in engines.values()},
            say=say,
        )
        launches["engines"] = [engine.to_json() for engine in measured.engines]
        facts = engine_facts(built, measured.engines, measured.timings)
    (folder / "launches.json").write_text(json.dumps(launches, indent=1))
    if engines:
        (folder / ENGINE_FACTS).write_text(json.dumps(facts, indent=1))
        shutil.copytree(build_folder / "engine" / "engines", folder / "engines")
    return {"kernels.cu": model.source}


def keep_cubins(
    architectures: str, scheduler: Mapping[str, str], kernels: str, build_folder: Path
) -> dict[str, bytes]:
    """Return the cubins of both sources for each architecture, from BUILD or compiled into it."""
    kept = build_folder / KEPT_CUBINS
    cubins: dict[str, bytes] = {}
    for architecture in architectures.split(","):
        suffix = f".{architecture}" if "," in architectures else ""
        cubins[f"scheduler{suffix}"] = _kept(
            kept, architecture, scheduler, partial(compile_cuda, scheduler, architecture)
        )
        cubins[f"kernels{suffix}"] = _kept(
            kept, architecture, kernels, partial(compile_kernels, kernels, architecture)
        )
    return cubins


def _segment_engines(built: Mapping[str, Any], plan: CapturePlan) -> dict[int, SegmentEngine]:
    data = built.get("tensorrt")
    if data is None:
        return {}
    ranges = tuple(RowRange(**item) for item in data["ranges"])
    has_kernels = bool(data["has_kernels"])
    engines = {}
    for number, entry in enumerate(data["plans"]):
        values = {
            "segment": entry["segment"],
            "plan": entry["plan"],
            **{kind: entry[kind] for kind in ("activations", "weights", "outputs")},
            "ranges": data["ranges"],
            "choices": choose_narrowest(
                entry["segment"], ranges, plan.keys, has_kernels=has_kernels
            ),
            "has_kernels": has_kernels,
        }
        engines[number] = segment_engine_from_json(values)
    return engines


def engine_facts(
    built: Mapping[str, Any],
    engines: Sequence[SegmentEngine],
    timings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what the manifest says of the engines: builds, versions, choice and timings."""
    data = built.get("tensorrt")
    if data is None:
        return {}
    entries = []
    for entry, engine in zip(data["plans"], engines, strict=True):
        counts = {
            choice_name(choice): engine.choices.count(choice)
            for choice in sorted(set(engine.choices))
        }
        entries.append(
            {
                **{
                    name: entry[name]
                    for name in ("segment", "plan", "model", "level", "seconds", "scratch_bytes")
                },
                "max_tokens": [item["max_tokens"] for item in data["ranges"]],
                "choice": counts,
                "timings_us": dict(timings[entry["segment"]]) if timings else {},
            }
        )
    return {
        "engine": data["engine"],
        "version": data["version"],
        "builds": data["builds"],
        "segments": entries,
    }


def _kept(folder: Path, architecture: str, sources: Any, compile_it: Callable[[], bytes]) -> bytes:
    """Return a cubin that was compiled of the same sources before, or compile it.

    A tool that this machine lacks cannot have changed a cubin since it was compiled.
    """
    path = folder / f"{digest_of(architecture, sources, _headers_digest())[:32]}.cubin"
    facts = path.with_suffix(".json")
    tools = tool_versions(_TOOLS)
    if path.is_file() and facts.is_file():
        made_with: dict[str, str] = json.loads(facts.read_text(encoding="utf-8"))
        if all(made_with.get(name) == version for name, version in tools.items()):
            return path.read_bytes()
    image = compile_it()
    folder.mkdir(exist_ok=True)
    write_atomically(path, image)
    write_atomically(facts, json.dumps(tools).encode())
    return image


def _headers_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(include_folder().rglob("*.*h*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
