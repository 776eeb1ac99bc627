"""The engine stage: distinct segments -> lowered programs' facts and, with TensorRT, plans.

`--engine auto` builds plans beside this project's kernels where TensorRT can be imported and the
target's GPU is here, so that both can be measured; elsewhere it takes the kernels alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkc.capture.plan import DTYPE_BYTES
from blinkc.capture.plan_capture import plan_from_spec, weight_bytes
from blinkc.config import CompileConfig
from blinkc.engine.gpu_here import GpuHere, find_gpu
from blinkc.engine.lower_segment import lower_segment
from blinkc.engine.program import Program
from blinkc.engine.tensorrt_api import PACKAGES, TensorRtApi, load_tensorrt
from blinkc.engine.tensorrt_model import EngineModel, engine_model
from blinkc.engine.tensorrt_plans import DEFAULT_WORKSPACE_BYTES, BuiltPlan, build_plans
from blinkc.engine.tensorrt_profiles import DEFAULT_PROFILES, plan_ranges
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blinkc.surgery.segments import SegmentedModel

KEPT_PLANS = "plans"  # in the BUILD folder: plans survive a killed stage there
MIB = 1 << 20


def tensorrt_of(config: CompileConfig) -> tuple[TensorRtApi, GpuHere | None] | None:
    """Return the TensorRT that a compilation takes, and the GPU that it builds for if it is here.

    None: it takes none.

    Raises:
        BlinkError: one was asked for by name and is not installed, or builds for the GPU of a
            machine and this one has another or none.
    """
    if config.engine in PACKAGES:
        api = load_tensorrt(config.engine)
        api.check_dtype(config.resolved_dtype)
        if config.quantization:
            api.check_quantized(config.quantization)
        if api.named_targets:
            return api, None
        gpu = find_gpu()
        if gpu is None or gpu.target != config.target.rstrip("af"):
            found = f"this one has {gpu.name}, {gpu.target}" if gpu else "this one has none"
            raise BlinkError(
                f"{api.title} builds for the GPU in the machine, {config.target}; {found}",
                hint="stop here with --until segment, copy the BUILD folder to a machine with that "
                "GPU and compile again there; or use --engine cuda",
            )
        return api, gpu
    if config.engine != "auto" or not config.on_gpu or len(config.targets) > 1:
        return None
    gpu = find_gpu()
    if gpu is None or gpu.target != config.target.rstrip("af"):
        return None
    try:
        api = load_tensorrt("tensorrt")
        api.check_dtype(config.resolved_dtype)
    except BlinkError:
        return None
    return api, gpu


def engine_tools(config: CompileConfig) -> dict[str, str]:
    """Return what the engines depend on and this machine has: TensorRT, GPU, driver.

    Empty where TensorRT is missing: what was built elsewhere stays valid then.
    """
    try:
        found = tensorrt_of(config)
    except BlinkError:
        return {}
    if found is None:
        return {}
    api, gpu = found
    return {api.engine: api.version_text} | (gpu.builds if gpu else {})


def build_engines(
    config: CompileConfig,
    segmented: SegmentedModel,
    build_folder: Path,
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Lower or build every segment; return what engines.json says.

    Args:
        build_folder: keeps plans between runs.
        folder: gets `engines/`, the plans and the models that they are built from.
        say: gets progress that passes.
        note: gets lines that stay: what it will need, each plan that is done.

    Raises:
        BlinkError: a segment is refused; names the node.
    """
    found = tensorrt_of(config)
    has_kernels = config.engine not in PACKAGES
    engines: list[dict[str, Any]] = []
    for segment in segmented.segments:
        program = lower_segment(segment) if has_kernels else _try_lowering(segment)
        engines.append(
            {
                "segment": segment.name,
                "digest": segment.digest,
                "engine": config.resolved_engine,
                # Of a plan it is not known: about as many as of this project's.
                "num_kernels": len(program.kernels) if program else 8,
                "intermediates": [
                    [value.name, value.rows, value.size, value.dtype]
                    for value in (program.intermediates if program else ())
                ],
            }
        )
    data: dict[str, Any] = {"engines": engines}
    if found is not None:
        data["tensorrt"] = _build(config, segmented, found, build_folder, folder, say, note)
        data["tensorrt"]["has_kernels"] = has_kernels
    return data


def _try_lowering(segment: Any) -> Program | None:
    """Lower for the memory estimate; a plan may take what the lowering does not."""
    try:
        return lower_segment(segment)
    except BlinkError:
        return None


def _build(
    config: CompileConfig,
    segmented: SegmentedModel,
    found: tuple[TensorRtApi, GpuHere | None],
    build_folder: Path,
    folder: Path,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> dict[str, Any]:
    api, gpu = found
    plan = plan_from_spec(
        segmented.spec, config.capture, num_weight_bytes=weight_bytes(segmented.weights)
    )
    options = config.engine_options
    ranges = plan_ranges(plan.keys, options.num_profiles or DEFAULT_PROFILES)
    models = [engine_model(segment, api.traits) for segment in segmented.segments]
    _check_memory(models, max(r.max_tokens for r in ranges), options.max_workspace_bytes, gpu, note)
    if notice := api.notice("built"):
        note(f"notice: {notice}")
    plans = build_plans(
        api,
        models,
        ranges,
        build_folder / KEPT_PLANS,
        targets=() if gpu else config.targets,
        gpu=f"{gpu.target} {gpu.driver}" if gpu else "",
        options=options,
        say=say,
        note=note,
    )
    (folder / "engines").mkdir()
    return {
        "engine": api.engine,
        "version": api.version_text,
        "title": api.title,
        "gpu": gpu.name if gpu else "",
        "builds": {api.engine: api.version_text} | (gpu.builds if gpu else {}),
        "ranges": [asdict(item) for item in ranges],
        "plans": [_keep(folder, model, built) for model, built in zip(models, plans, strict=True)],
    }


def _keep(folder: Path, model: EngineModel, built: BuiltPlan) -> dict[str, Any]:
    plan, onnx = (f"engines/{model.name}.{kind}" for kind in ("plan", "onnx"))
    shutil.copyfile(built.path, folder / plan)
    (folder / onnx).write_bytes(model.model)
    tensors = {
        kind: [asdict(tensor) for tensor in getattr(model, kind)]
        for kind in ("activations", "weights", "outputs")
    }
    return {
        "segment": model.name,
        "plan": plan,
        "model": onnx,
        "version": built.version,
        "level": built.level,
        "seconds": built.seconds,
        "scratch_bytes": built.scratch_bytes,
        **tensors,
    }


def building_bytes(models: Sequence[EngineModel], max_tokens: int) -> int:
    """Estimate the GPU memory of building, without workspace: TensorRT times kernels on buffers of
    the largest shapes, weights among them, one segment at a time."""

    def size(tensors: Sequence[Any]) -> int:
        total = 0
        for tensor in tensors:
            count = max_tokens if tensor.rows else 1
            for axis in tensor.shape:
                count *= axis
            total += count // 2 if tensor.dtype == "int4" else count * DTYPE_BYTES[tensor.dtype]
        return total

    return max(size((*m.activations, *m.weights, *m.outputs)) for m in models)


def _check_memory(
    models: Sequence[EngineModel],
    max_tokens: int,
    max_workspace_bytes: int | None,
    gpu: GpuHere | None,
    say: Callable[[str], None],
) -> None:
    """Say what building needs, before it starts.

    Raises:
        BlinkError: the GPU has less free; the sums stand in the message.
    """
    tensors = building_bytes(models, max_tokens)
    if gpu is None:
        say(f"{len(models)} plans; weights stay outside, each takes about 0.5 GB of host memory")
        return
    workspace = min(max_workspace_bytes or DEFAULT_WORKSPACE_BYTES, gpu.free_bytes // 2)
    text = (
        f"{tensors // MIB} MiB of tensors and up to {workspace // MIB} MiB of workspace on "
        f"{gpu.name}, {gpu.free_bytes // MIB} MiB free"
    )
    if tensors > gpu.free_bytes:
        raise BlinkError(
            f"building the plans does not fit: {text}",
            hint="free the GPU, or lower --max-prefill-tokens",
        )
    say(f"{len(models)} plans: {text}")
