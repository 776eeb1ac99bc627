"""What the user chose on the command line: options -> `CompileConfig`, checked before any work."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from blinkc.capture.plan_capture import CaptureConfig
from blinkc.capture.shapes import parse_shapes
from blinkc.engine.options import EngineOptions
from blinkc.engine.tensorrt_api import (
    PACKAGES,
    check_quantized_targets,
    engines_with_quantized,
)
from blinkc.errors import BlinkError

STAGES = ("read", "segment", "engine", "capture", "codegen")
ENGINES = ("auto", "cpu", "cuda", "tensorrt", "tensorrt-rtx")
DTYPES = ("fp32", "fp16", "bf16")
QUANTIZATIONS = ("fp8", "int4")
# Compute capabilities that NVIDIA's compilers know, without the dot.
_ARCHITECTURES = ("75", "80", "86", "87", "88", "89", "90", "100", "103", "110", "120", "121")
_GPU = rf"sm_(?:{'|'.join(_ARCHITECTURES)})[af]?"
_TARGET = re.compile(rf"cpu|{_GPU}(,{_GPU}){{0,7}}")
# Architectures whose own instructions need the "a" variant of the target.
_NATIVE_VARIANTS = ("90", "100", "103", "120", "121")
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgt]?)i?b?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Everything that decides what `blinkc compile` makes, and how it reports."""

    model: str
    target: str = "cpu"  # or GPUs: "sm_90", "sm_89,sm_120"
    engine: str = "auto"
    dtype: str | None = None
    quantization: str | None = None  # of the weights of products
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    engine_options: EngineOptions = field(default_factory=EngineOptions)
    tokenizer: Path | None = None
    random_weights_seed: int | None = None
    until: str = STAGES[-1]
    check: bool = False
    debug_dir: Path | None = None

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise BlinkError(
                f"--target {self.target} is unknown",
                hint=f"use cpu, or one or more of sm_{', sm_'.join(_ARCHITECTURES)} with commas",
            )
        if len(set(self.targets)) != len(self.targets):
            raise BlinkError(f"--target {self.target} names a GPU twice")
        if len(self.targets) > 1 and self.engine == "tensorrt":
            raise BlinkError(
                f"--target {self.target}: --engine tensorrt builds for the GPU in this machine",
                hint="use --engine tensorrt-rtx or cuda for several GPUs",
            )
        if self.capture.target != self.target:
            raise BlinkError(f"capture is for {self.capture.target}, the target is {self.target}")
        if self.engine not in ENGINES:
            raise BlinkError(f"--engine {self.engine} is unknown", hint=f"use {', '.join(ENGINES)}")
        if self.until not in STAGES:
            raise BlinkError(
                f"--until {self.until}: no such stage", hint=f"use {', '.join(STAGES)}"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise BlinkError(f"--dtype {self.dtype} is unknown", hint=f"use {', '.join(DTYPES)}")
        if self.target == "cpu" and self.dtype not in (None, "fp32"):
            raise BlinkError(
                f"--dtype {self.dtype}: the cpu target computes in fp32",
                hint="leave --dtype out, or compile for a GPU with --target sm_90",
            )
        if self.target == "cpu" and self.engine not in ("auto", "cpu"):
            raise BlinkError(
                f"--engine {self.engine} does not run on the cpu target", hint="use --engine cpu"
            )
        if self.target != "cpu" and self.engine == "cpu":
            raise BlinkError(
                f"--engine cpu does not run on {self.target}", hint="use --engine cuda"
            )
        self._check_quantization()
        parse_shapes(self.capture.shapes)

    def _check_quantization(self) -> None:
        if self.quantization is None:
            return
        if self.quantization not in QUANTIZATIONS:
            raise BlinkError(
                f"--quantization {self.quantization} is unknown",
                hint=f"use {', '.join(QUANTIZATIONS)}",
            )
        if self.engine not in PACKAGES:
            takers = ", ".join(engines_with_quantized(self.quantization))
            raise BlinkError(
                f"--quantization {self.quantization}: engine {self.resolved_engine} computes with "
                f"weights in {self.resolved_dtype}",
                hint=f"{self.quantization} works with --engine {takers}",
            )
        check_quantized_targets(self.quantization, self.targets)

    @property
    def on_gpu(self) -> bool:
        """Return whether the target is a GPU."""
        return self.target != "cpu"

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the targets one by one."""
        return tuple(self.target.split(","))

    @property
    def architecture(self) -> str:
        """Return the device architecture that is compiled for: sm_90 becomes sm_90a."""
        return ",".join(native_architecture(target) for target in self.targets)

    @property
    def resolved_dtype(self) -> str:
        """Return the type of weights and activations."""
        return self.dtype or ("bf16" if self.on_gpu else "fp32")

    @property
    def resolved_engine(self) -> str:
        """Return the engine that `auto` stands for where nothing can be measured."""
        if self.engine != "auto":
            return self.engine
        return "cuda" if self.on_gpu else "cpu"

    @property
    def rope_seqlen(self) -> int:
        """Return the request length for which length-dependent rope scaling is fixed."""
        shapes = parse_shapes(self.capture.shapes)
        written = shapes.largest("decode", "seqlen")
        return self.capture.max_seqlen or written or (8192 if self.on_gpu else 2048)


def native_architecture(target: str) -> str:
    """Return the architecture with its own instructions; "" for the CPU."""
    digits = target.removeprefix("sm_")
    if target == "cpu":
        return ""
    return f"sm_{digits}a" if digits in _NATIVE_VARIANTS else target


def bytes_from_text(text: str) -> int:
    """Read a memory size such as `80g`, `512M` or `1.5GiB`; units are powers of 1024.

    Raises:
        BlinkError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    power = " kmgt".index(match[2].lower() or " ") if match else 0
    size = int(float(match[1]) * 1024**power) if match else 0
    if size == 0:
        raise BlinkError(f"{text!r} is no memory size", hint="write 80g, 512m or bytes")
    return size
