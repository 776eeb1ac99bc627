"""Build TensorRT plans: engine model + row ranges -> small plans, whose weights stay inputs.

Equal layers are one segment, so a Llama shape of any depth needs three plans. A plan holds one
optimization profile for each row range it is asked for. Needs TensorRT alone, no onnx.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blinkc.engine.tensorrt_api import TensorRtApi
from blinkc.engine.tensorrt_model import FP32_SUFFIX, EngineInput, EngineModel
from blinkc.engine.tensorrt_profiles import RowRange
from blinkc.errors import BlinkError

OTHER_ENGINE = "--engine cuda builds it with this project's own kernels"
MAX_LEVEL = 5
Progress = Callable[[str, int, int], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRtConfig:
    """How plans are built. `targets` are GPUs that are not here (RTX); empty: this machine's."""

    targets: tuple[str, ...] = ()
    optimization_level: int = 3
    max_workspace_bytes: int = 4 << 30
    timing_cache: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRtPlan:
    """A built plan and what it took; `scratch_bytes` is 0 where only a GPU could tell."""

    data: bytes
    seconds: float
    scratch_bytes: int


class BuildStopped(Exception):
    """The progress callback ended a build."""


def build_plan(
    api: TensorRtApi,
    model: EngineModel,
    ranges: Sequence[RowRange],
    config: TensorRtConfig,
    on_progress: Progress | None = None,
) -> TensorRtPlan:
    """Build one segment's plan with a profile for each range.

    Args:
        api: the TensorRT to build with.
        model: has weights as inputs.
        ranges: one optimization profile each, in this order.
        config: targets and effort.
        on_progress: called with phase, step and number of steps where the version reports them;
            False ends the build.

    Raises:
        BlinkError: a node or a target is refused; TensorRT's own log is attached.
        BuildStopped: `on_progress` said so.
    """
    start = time.perf_counter()
    log = BuildLog(api)
    builder = api.module.Builder(log.logger)
    network = builder.create_network(api.network_flags())
    parser = _parse(api, network, model, log)
    stopped: list[bool] = []
    build_config = _builder_config(api, builder, config, on_progress, stopped)
    if not api.strongly_typed:
        hold_to_fp32(api, network)
    for row_range in ranges:
        _add_profile(builder, network, build_config, model, row_range)
    data = builder.build_serialized_network(network, build_config)
    if data is None:
        if stopped:
            raise BuildStopped
        raise BlinkError(
            f"{api.title} could not build segment {model.name}", hint=OTHER_ENGINE, log=log.text()
        )
    _save_timing_cache(build_config, config)
    del parser  # owns the constants that the network points to: it must outlive the build
    plan = bytes(data)
    return TensorRtPlan(
        data=plan,
        seconds=time.perf_counter() - start,
        scratch_bytes=0 if config.targets else _scratch_bytes(api, log, plan),
    )


class BuildLog:
    """Collects TensorRT's warnings and errors, for the error that may follow."""

    def __init__(self, api: TensorRtApi) -> None:
        trt = api.module
        lines: list[str] = []

        class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if int(severity) <= int(trt.ILogger.WARNING):
                    lines.append(message)

        self.logger = Logger()
        self._lines = lines

    def text(self) -> str:
        """Return what was said so far."""
        return "\n".join(self._lines)


def _parse(api: TensorRtApi, network: Any, model: EngineModel, log: BuildLog) -> Any:
    parser = api.module.OnnxParser(network, log.logger)
    if parser.parse(model.model):
        return parser
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    named = [str(e.node_name()) for e in errors if hasattr(e, "node_name") and e.node_name()]
    numbered = [f"number {e.node()}" for e in errors if e.node() >= 0]
    nodes = ", ".join(named or numbered)
    raise BlinkError(
        f"{api.title} does not take segment {model.name}" + (f": node {nodes}" if nodes else ""),
        hint=OTHER_ENGINE,
        log="\n".join(error.desc() for error in errors) or log.text(),
    )


def _builder_config(
    api: TensorRtApi,
    builder: Any,
    config: TensorRtConfig,
    on_progress: Progress | None,
    stopped: list[bool],
) -> Any:
    trt = api.module
    result = builder.create_builder_config()
    result.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, config.max_workspace_bytes)
    result.builder_optimization_level = config.optimization_level
    result.max_aux_streams = 0  # a captured graph runs on one stream
    api.set_targets(result, config.targets)
    api.turn_off_libraries(result)
    if not api.strongly_typed:
        result.set_flag(trt.BuilderFlag.FP16)
        result.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    if config.timing_cache is not None and hasattr(result, "create_timing_cache"):
        stored = config.timing_cache.read_bytes() if config.timing_cache.exists() else b""
        result.set_timing_cache(result.create_timing_cache(stored), ignore_mismatch=False)
    if on_progress is not None and api.has_progress_monitor:
        result.progress_monitor = _progress_monitor(trt, on_progress, stopped)
    return result


def _progress_monitor(trt: Any, on_progress: Progress, stopped: list[bool]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._num_steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._num_steps[phase_name] = num_steps
            on_progress(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            goes_on = on_progress(phase_name, step + 1, self._num_steps.get(phase_name, step + 1))
            if not goes_on:
                stopped.append(True)
            return goes_on

        def phase_finish(self, phase_name: str) -> None:
            num_steps = self._num_steps.pop(phase_name, 1)
            on_progress(phase_name, num_steps, num_steps)

    return Monitor()


def hold_to_fp32(api: TensorRtApi, network: Any) -> int:
    """Constrain what the model computes in fp32 to fp32; return how many layers that is.

    A weakly typed build may drop the model's own casts: norms would then square in fp16, where
    values over 255 overflow.
    """
    trt = api.module
    half = (trt.float32, trt.float16)
    fixed = ("CONSTANT", "SHAPE")  # have no precision to choose
    held = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if FP32_SUFFIX not in layer.name or layer.type.name in fixed:
            continue
        outputs = [number for number in range(layer.num_outputs)]
        if not any(layer.get_output(number).dtype in half for number in outputs):
            continue
        layer.precision = trt.float32
        for number in outputs:
            if layer.get_output(number).dtype in half:
                layer.set_output_type(number, trt.float32)
        held += 1
    return held


def _add_profile(
    builder: Any, network: Any, config: Any, model: EngineModel, row_range: RowRange
) -> None:
    """Give every activation its range of rows; a weight has one shape."""
    profile = builder.create_optimization_profile()
    specs = {spec.name: spec for spec in (*model.activations, *model.weights)}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if all(axis >= 0 for axis in tensor.shape):
            continue
        profile.set_shape(tensor.name, *shapes_of(specs[tensor.name], row_range))
    if config.add_optimization_profile(profile) < 0:
        raise BlinkError(f"segment {model.name}: {row_range} was refused")


def shapes_of(spec: EngineInput, row_range: RowRange) -> list[tuple[int, ...]]:
    """Return an input's smallest, best and largest shape."""
    if not spec.rows:
        return [spec.shape] * 3
    return [(rows, *spec.shape) for rows in row_range.sizes(spec.rows)]


def _save_timing_cache(build_config: Any, config: TensorRtConfig) -> None:
    if config.timing_cache is None or not hasattr(build_config, "get_timing_cache"):
        return
    cache = build_config.get_timing_cache()
    if cache is not None:
        partial = config.timing_cache.with_suffix(".part")
        partial.write_bytes(bytes(cache.serialize()))
        partial.replace(config.timing_cache)


def _scratch_bytes(api: TensorRtApi, log: BuildLog, plan: bytes) -> int:
    """Ask a plan for the GPU of this machine how much scratch its contexts want."""
    runtime = api.module.Runtime(log.logger)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise BlinkError(f"{api.title} cannot load the plan that it has just built", log=log.text())
    return api.scratch_bytes(engine)
