"""Build TensorRT plans: segment + token ranges -> small plans, whose weights stay inputs.

Equal layers are one segment, so a Llama shape of any depth needs three plans. A plan holds one
optimization profile for each token range it is asked for.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blinkc.engine.tensorrt_api import TensorRtApi
from blinkc.errors import BlinkError
from blinkc.surgery.segments import Segment, ValueSpec

# Ops whose results leave fp16's range or precision on real models; weakly typed builds hold them
# to fp32. Strongly typed ones read the same from the casts in the segment.
FP32_LAYERS = {"REDUCE", "SOFTMAX", "NORMALIZATION", "TOPK", "UNARY", "ELEMENTWISE"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRange:
    """One optimization profile: rows from `min_tokens` to `max_tokens`, fastest at `opt_tokens`."""

    min_tokens: int
    opt_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_tokens <= self.opt_tokens <= self.max_tokens:
            raise BlinkError(
                f"token range {self.min_tokens}..{self.opt_tokens}..{self.max_tokens} is not "
                "ascending from 1"
            )


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

    segment: str
    data: bytes
    seconds: float
    version: str

    @property
    def sha256(self) -> str:
        """Return the digest that the manifest records."""
        return hashlib.sha256(self.data).hexdigest()


def build_plan(
    api: TensorRtApi,
    segment: Segment,
    ranges: Sequence[TokenRange],
    config: TensorRtConfig,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> TensorRtPlan:
    """Build one segment's plan with a profile for each range.

    Args:
        api: the TensorRT to build with.
        segment: its model has weights as inputs.
        ranges: one optimization profile each, in this order.
        config: targets and effort.
        on_progress: called with phase, step and number of steps where the version reports them.

    Raises:
        BlinkError: a node or a target is refused; TensorRT's own log is attached.
    """
    start = time.perf_counter()
    log = _Log(api)
    builder = api.module.Builder(log.logger)
    network = builder.create_network(api.network_flags())
    _parse(api, network, segment, log)
    build_config = _builder_config(api, builder, config, on_progress)
    if not api.strongly_typed:
        _hold_to_fp32(api, network, build_config)
    for token_range in ranges:
        _add_profile(builder, network, build_config, segment, token_range)
    data = builder.build_serialized_network(network, build_config)
    if data is None:
        raise BlinkError(
            f"{api.engine} {api.version_text} could not build segment {segment.name}",
            hint="--engine cuda builds it with this project's own kernels",
            log=log.text(),
        )
    _save_timing_cache(build_config, config)
    return TensorRtPlan(
        segment=segment.name,
        data=bytes(data),
        seconds=time.perf_counter() - start,
        version=api.version_text,
    )


class _Log:
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
        return "\n".join(self._lines)


def _parse(api: TensorRtApi, network: Any, segment: Segment, log: _Log) -> None:
    parser = api.module.OnnxParser(network, log.logger)
    if parser.parse(segment.model.SerializeToString()):
        return
    nodes = [segment.model.graph.node[error.node()].name for error in _errors_with_nodes(parser)]
    raise BlinkError(
        f"{api.engine} {api.version_text} does not take segment {segment.name}"
        + (f": node {', '.join(nodes)}" if nodes else ""),
        hint="--engine cuda builds it with this project's own kernels",
        log="\n".join(parser.get_error(i).desc() for i in range(parser.num_errors)) or log.text(),
    )


def _errors_with_nodes(parser: Any) -> list[Any]:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return [error for error in errors if error.node() >= 0]


def _builder_config(
    api: TensorRtApi,
    builder: Any,
    config: TensorRtConfig,
    on_progress: Callable[[str, int, int], None] | None,
) -> Any:
    trt = api.module
    result = builder.create_builder_config()
    result.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, config.max_workspace_bytes)
    result.builder_optimization_level = config.optimization_level
    result.max_aux_streams = 0  # a captured graph runs on one stream
    if config.targets:
        if not api.named_targets:
            raise BlinkError(
                f"TensorRT {api.version_text} builds only for the GPU in this machine",
                hint=f"build on a machine with {', '.join(config.targets)}, "
                "or take --engine tensorrt-rtx",
            )
        api.set_targets(result, config.targets)
    if not api.strongly_typed:
        result.set_flag(trt.BuilderFlag.FP16)
        result.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    if config.timing_cache is not None and hasattr(result, "create_timing_cache"):
        stored = config.timing_cache.read_bytes() if config.timing_cache.exists() else b""
        result.set_timing_cache(result.create_timing_cache(stored), ignore_mismatch=False)
    if on_progress is not None and api.has_progress_monitor:
        result.progress_monitor = _progress_monitor(trt, on_progress)
    return result


def _progress_monitor(trt: Any, on_progress: Callable[[str, int, int], None]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._num_steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, num_steps: int) -> None:
            self._num_steps[phase] = num_steps
            on_progress(phase, 0, num_steps)

        def step_complete(self, phase: str, step: int) -> bool:
            on_progress(phase, step + 1, self._num_steps.get(phase, step + 1))
            return True

        def phase_finish(self, phase: str) -> None:
            num_steps = self._num_steps.pop(phase, 1)
            on_progress(phase, num_steps, num_steps)

    return Monitor()


def _hold_to_fp32(api: TensorRtApi, network: Any, config: Any) -> None:
    """Constrain norms, softmax and routing of a weakly typed network to fp32."""
    trt = api.module
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type.name not in FP32_LAYERS:
            continue
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        if all(output.dtype == trt.float32 for output in outputs):
            layer.precision = trt.float32


def _add_profile(
    builder: Any, network: Any, config: Any, segment: Segment, token_range: TokenRange
) -> None:
    """Give every activation its range of rows, and every weight its one shape."""
    profile = builder.create_optimization_profile()
    specs = {spec.name: spec for spec in (*segment.activations, *segment.weights)}
    sizes = (token_range.min_tokens, token_range.opt_tokens, token_range.max_tokens)
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if all(axis >= 0 for axis in tensor.shape):
            continue
        shapes = [_shape_at(specs[tensor.name], rows) for rows in sizes]
        profile.set_shape(tensor.name, *shapes)
    if config.add_optimization_profile(profile) < 0:
        raise BlinkError(f"segment {segment.name}: token range {token_range} was refused")


def _shape_at(spec: ValueSpec, rows: int) -> tuple[int, ...]:
    return (rows, *spec.shape) if spec.rows else spec.shape


def _save_timing_cache(build_config: Any, config: TensorRtConfig) -> None:
    if config.timing_cache is None or not hasattr(build_config, "get_timing_cache"):
        return
    cache = build_config.get_timing_cache()
    if cache is not None:
        config.timing_cache.write_bytes(bytes(cache.serialize()))
