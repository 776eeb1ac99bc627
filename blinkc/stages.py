"""What each stage does: config and earlier artifacts in, files in its folder out.

torch, onnx and the engines' tools are imported inside the stage that needs them.
"""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkc.artifacts import (
    WeightFiles,
    load_graph,
    load_segmented,
    save_graph,
    save_segmented,
)
from blinkc.build_folder import BuildFolder, hash_file
from blinkc.capture.host_memory import check_host_memory
from blinkc.capture.plan import CapturePlan, plan_from_json, plan_to_json
from blinkc.capture.plan_capture import ScratchSpec, plan_capture, plan_from_spec
from blinkc.config import CompileConfig
from blinkc.errors import BlinkError
from blinkc.foresee import check_refusal
from blinkc.model_source import ModelSource, find_model
from blinkc.progress import Progress
from blinkc.provenance import tool_versions

if TYPE_CHECKING:
    from blinkc.frontend.decoder_graph import DecoderGraph

# Distributions (and "c++") whose version decides what a stage writes.
TOOLS: dict[str, tuple[str, ...]] = {
    "read": ("torch", "transformers", "onnx", "onnxscript", "onnx-ir"),
    "segment": ("onnx", "onnx-graphsurgeon"),
    "engine": ("onnx", "numpy"),
    "capture": (),
    "codegen": ("jinja2", "c++"),
}

FACTS_NAME = "facts.json"


def build_facts(config: CompileConfig) -> dict[str, Any]:
    """Return what a bundle says about how its code was made; kept beside the code."""
    return {
        "target": config.target,
        "architecture": config.architecture,
        "engine": config.resolved_engine,
        "dtype": config.resolved_dtype,
    }


def read_options(config: CompileConfig, files: WeightFiles) -> dict[str, Any]:
    """Return what the read stage depends on: everything about the model, and the type wanted."""
    source = find_model(config.model)
    seed = config.random_weights_seed
    return {
        "name": source.name,
        "model": source.digest,
        # By content: a fine-tuned checkpoint has the same config and shapes.
        "weights": [files.add(path) for path in source.weight_files()] if seed is None else [],
        "tokenizer": [hash_file(path) for path in source.tokenizer_files(config.tokenizer)],
        "dtype": config.resolved_dtype,
        "rope_seqlen": config.rope_seqlen if source.depends_on_seqlen() else 0,
        "seed": seed,
    }


def read_model(
    config: CompileConfig,
    build: BuildFolder,
    folder: Path,
    files: WeightFiles,
    progress: Progress | None = None,
) -> None:
    """Read the model into one decoder graph; keep the tokenizer's files beside it."""
    source = find_model(config.model)
    if not source.is_onnx:  # an ONNX graph must be read first; the capture stage checks it
        _check_size(config)
    graph = _decoder_graph(config, source, build.path.resolve() / "weights")
    if progress is not None:
        for text in graph.spec.notes:
            progress.note(f"note: {text}")
    save_graph(graph, folder, files)
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    for path in source.tokenizer_files(config.tokenizer):
        shutil.copyfile(path, tokenizer / path.name)


def _check_size(config: CompileConfig) -> None:
    """Plan from facts alone, so that what cannot fit is said before the export.

    Raises:
        BlinkError: the model or the grid is too large; the sums stand in the message.
    """
    from blinkc.model_facts import facts_from_model

    facts = facts_from_model(config)
    check_host_memory(
        plan_from_spec(facts.spec, config.capture, num_weight_bytes=facts.num_weight_bytes)
    )


def _decoder_graph(config: CompileConfig, source: ModelSource, rewritten: Path) -> DecoderGraph:
    if source.is_onnx:
        if config.random_weights_seed is not None:
            raise BlinkError("--random-weights is for checkpoints; an ONNX file brings its own")
        from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx

        return decoder_graph_from_onnx(
            source.path, dtype=config.resolved_dtype, max_seqlen=config.capture.max_seqlen
        )
    from blinkc.frontend.hf import decoder_graph_from_hf

    return decoder_graph_from_hf(
        source.reference,
        dtype=config.resolved_dtype,
        max_seqlen=config.rope_seqlen,
        random_weights_seed=config.random_weights_seed,
        cache_dir=rewritten,  # checkpoints that transformers must rewrite, such as GGUF
    )


def segment_options(config: CompileConfig) -> dict[str, Any]:
    """Return what segments depend on besides the graph."""
    return {"quantization": config.quantization}


def segment_model(
    config: CompileConfig, build: BuildFolder, folder: Path, files: WeightFiles
) -> None:
    """Cut the graph into few distinct segments; have their products read quantized weights."""
    from blinkc.surgery import segment_decoder

    segmented = segment_decoder(load_graph(build.stage_folder("read"), files))
    if config.quantization:
        from blinkc.surgery.quantize_products import quantize_products

        segmented = quantize_products(segmented, config.quantization)
    save_segmented(segmented, folder, files)


def engine_options(config: CompileConfig) -> dict[str, Any]:
    """Return what engines depend on besides the segments."""
    options: dict[str, Any] = {"engine": config.engine, "architecture": config.architecture}
    if config.on_gpu and config.engine not in ("cpu", "cuda"):  # plans are made for row ranges
        options |= {"capture": asdict(config.capture), "options": asdict(config.engine_options)}
    return options


def stage_tools(stage: str, config: CompileConfig) -> dict[str, str]:
    """Return the versions of what a stage uses, as far as this machine has it."""
    versions = tool_versions(TOOLS[stage])
    if stage == "engine" and config.on_gpu and config.engine != "cuda":
        from blinkc.engine.build_engines import engine_tools

        versions |= engine_tools(config)
    return versions


def build_engines(
    config: CompileConfig,
    build: BuildFolder,
    folder: Path,
    files: WeightFiles,
    progress: Progress | None = None,
) -> None:
    """Lower or build each distinct segment, so that what cannot work is said here."""
    from blinkc.engine.build_engines import build_engines as build_segments

    segmented = load_segmented(build.stage_folder("segment"), files)
    update, note = (progress.update, progress.note) if progress else (_ignore, _ignore)
    data = build_segments(config, segmented, build.path, folder, update, note)
    (folder / "engines.json").write_text(json.dumps(data, indent=1))


def capture_options(config: CompileConfig) -> dict[str, Any]:
    """Return what the capture plan depends on besides model and engines."""
    return asdict(config.capture)


def plan_graphs(
    config: CompileConfig, build: BuildFolder, folder: Path, files: WeightFiles
) -> None:
    """Plan keys, tables, arena and memory."""
    segmented = load_segmented(build.stage_folder("segment"), files)
    engines = json.loads((build.stage_folder("engine") / "engines.json").read_text())["engines"]
    num_kernels = [engine["num_kernels"] for engine in engines]
    nodes = sum(2 if hasattr(c, "op") else num_kernels[c.segment] for c in segmented.calls)
    intermediates = {
        number: [ScratchSpec(*value) for value in engines[call.segment]["intermediates"]]
        for number, call in enumerate(segmented.calls)
        if not hasattr(call, "op")
    }
    plan = plan_capture(segmented, config.capture, scratch=intermediates, nodes_per_step=nodes)
    check_host_memory(plan)
    (folder / "plan.json").write_text(json.dumps(plan_to_json(plan), indent=1))


def _ignore(_text: str) -> None:
    """Take progress that nobody wants."""


def load_plan(build: BuildFolder) -> CapturePlan:
    """Read the capture stage's plan."""
    text = (build.stage_folder("capture") / "plan.json").read_text(encoding="utf-8")
    return plan_from_json(json.loads(text))


def codegen_options(config: CompileConfig) -> dict[str, Any]:
    """Return what the generated code depends on besides model and plan."""
    return {**build_facts(config), "machine": platform.machine()}


def generate_code(
    config: CompileConfig,
    build: BuildFolder,
    folder: Path,
    files: WeightFiles,
    progress: Progress | None = None,
) -> None:
    """Render the scheduler and the model's code and compile both; sources stay beside binaries."""
    from blinkc.codegen.render_scheduler import render_scheduler

    plan = load_plan(build)
    sources = render_scheduler(plan, config.target)
    segmented = load_segmented(build.stage_folder("segment"), files)
    if config.on_gpu:
        from blinkc.codegen.compile_model import compile_gpu_model

        built = json.loads((build.stage_folder("engine") / "engines.json").read_text())
        say = progress.update if progress else _ignore
        sources |= compile_gpu_model(
            config, segmented, plan, sources, built, build.path, folder, say
        )
    else:
        from blinkc.codegen.compile_cpu import compile_cpu
        from blinkc.engine.cpu import render_cpu_model

        sources["segments.cpp"] = render_cpu_model(segmented, plan)
        compile_cpu(sources, out=folder / "target.so")
    for name, text in sources.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / FACTS_NAME).write_text(json.dumps(codegen_options(config), indent=1))


def check_segments(config: CompileConfig, build: BuildFolder, files: WeightFiles) -> None:
    """Compare each segment, as its engine runs it, with onnxruntime on random inputs.

    Raises:
        BlinkError: an output differs, or the engine cannot run on this machine.
    """
    from blinkc.engine.check_segments import check_segments as compare_segments

    segmented = load_segmented(build.stage_folder("segment"), files)
    if config.resolved_engine == "cpu":
        from blinkc.engine.cpu_segments import CpuSegments

        with tempfile.TemporaryDirectory(prefix="blinkc-check-") as folder:
            compare_segments(segmented, CpuSegments(segmented.segments, Path(folder) / "s.so"))
        return
    built = json.loads((build.stage_folder("engine") / "engines.json").read_text())
    if "tensorrt" not in built:
        raise check_refusal(config.resolved_engine)
    from blink_runtime.tensorrt_segments import TensorRtSegments

    with TensorRtSegments(
        config.targets, built["tensorrt"], build.stage_folder("engine")
    ) as runner:
        compare_segments(segmented, runner)
