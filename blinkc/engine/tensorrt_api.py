"""The differences between the TensorRTs that users have, in one table: name -> `TensorRtApi`.

| | 8.6 | 10.x | 11.x | RTX 1.4+ |
| --- | --- | --- | --- | --- |
| Python package | tensorrt | tensorrt | tensorrt | tensorrt_rtx_bindings |
| types | precision constraints | of the model | of the model | of the model |
| network flag | EXPLICIT_BATCH | STRONGLY_TYPED | none needed | STRONGLY_TYPED |
| newest ONNX opset | 17 | 18 and later | 18 and later | 18 and later |
| bf16 | no | yes | yes | yes |
| quantized weights as inputs | none | fp8, int4 | fp8, int4 | fp8, int4 |
| products of cuBLAS, cuDNN | turned off | off | off | have none |
| IProgressMonitor | no | yes | yes | yes |
| plans for GPUs that are not here | no | no | no | compute capabilities |
| scratch given by us | context.device_memory | set_device_memory | same | same |
| level unless asked for | 0: others took minutes | 2 | 2 | 3 |

Segments hold standard ONNX only, cut ops run outside of engines: no plugin is needed, and so
neither is the unversioned `libtensorrt_rtx.so` that RTX's parser looks for when it meets one.

Nothing is imported before `load_tensorrt` is called.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from blinkc.capture.compute_capability import compute_capability
from blinkc.errors import BlinkError

PACKAGES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx_bindings"}
INSTALL = {
    "tensorrt": "pip install tensorrt",
    "tensorrt-rtx": "pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings",
}
OLDEST_QUANTIZED_TARGET = {"fp8": 89, "int4": 80}  # RTX 1.7.1 refuses older ones
OLDEST = {"tensorrt": (8, 6), "tensorrt-rtx": (1, 4)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRtTraits:
    """One column of the table."""

    network_flags: tuple[str, ...]
    strongly_typed: bool
    max_opset: int
    dtypes: tuple[str, ...]  # of weights and activations
    default_level: int
    quantized: tuple[str, ...] = ()  # of weights that stay inputs
    named_targets: bool = False


_MODERN = TensorRtTraits(
    network_flags=("STRONGLY_TYPED",),
    strongly_typed=True,
    max_opset=18,
    dtypes=("fp32", "fp16", "bf16"),
    default_level=2,
    quantized=("fp8", "int4"),
)
TABLE: dict[tuple[str, int], TensorRtTraits] = {
    ("tensorrt", 8): TensorRtTraits(
        network_flags=("EXPLICIT_BATCH",),
        strongly_typed=False,
        max_opset=17,
        dtypes=("fp32", "fp16"),
        default_level=0,
    ),
    ("tensorrt", 10): _MODERN,
    ("tensorrt", 11): _MODERN,
    ("tensorrt-rtx", 1): TensorRtTraits(
        network_flags=("STRONGLY_TYPED",),
        strongly_typed=True,
        max_opset=18,
        dtypes=("fp32", "fp16", "bf16"),
        default_level=3,
        quantized=("fp8", "int4"),
        named_targets=True,
    ),
}
# What somebody ran: engine -> version -> what was done with it. README.md of this folder has the
# dates and GPUs. Everything else works with a notice, and the golden prompt is its test.
SEEN: dict[str, dict[str, str]] = {
    "tensorrt": {"8.6.0": "built, served"},
    "tensorrt-rtx": {"1.7.1.116": "built"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRtApi:
    """One imported TensorRT and what it can do."""

    engine: str  # "tensorrt" or "tensorrt-rtx"
    module: ModuleType
    version: tuple[int, ...]  # with the build number, as far as the library names it
    traits: TensorRtTraits

    @property
    def strongly_typed(self) -> bool:
        """Say whether the model's own types rule; False: precision constraints do (8.6)."""
        return self.traits.strongly_typed

    @property
    def named_targets(self) -> bool:
        """Say whether plans can be built for GPUs that are not in this machine."""
        return self.traits.named_targets

    @property
    def has_progress_monitor(self) -> bool:
        """Say whether the builder reports progress."""
        return hasattr(self.module, "IProgressMonitor")

    @property
    def version_text(self) -> str:
        """Return the full version as the manifest records it."""
        return ".".join(map(str, self.version))

    @property
    def title(self) -> str:
        """Return engine and version for messages."""
        return f"{'TensorRT-RTX' if self.engine == 'tensorrt-rtx' else 'TensorRT'} " + (
            self.version_text
        )

    def notice(self, doing: str) -> str:
        """Return a sentence for a version that nobody ran; empty for the others.

        Args:
            doing: "built" or "served".
        """
        seen = SEEN[self.engine]
        if doing in seen.get(self.version_text, ""):
            return ""
        known = ", ".join(sorted(v for v, what in seen.items() if doing in what)) or "none"
        return (
            f"{self.title} is outside of what was {doing} so far ({known}); "
            "the golden prompt is its test"
        )

    def network_flags(self) -> int:
        """Return the flags for `Builder.create_network`; one that a version dropped is its rule."""
        flags = self.module.NetworkDefinitionCreationFlag
        names = self.traits.network_flags
        return sum(1 << int(getattr(flags, name)) for name in names if hasattr(flags, name))

    def check_dtype(self, dtype: str) -> None:
        """Refuse a type of weights and activations that this version does not have.

        Raises:
            BlinkError: names the types that it has.
        """
        if dtype not in self.traits.dtypes:
            raise BlinkError(
                f"{self.title} has no {dtype}",
                hint=f"compile with --dtype {self.traits.dtypes[-1]}, or with --engine cuda",
            )

    def check_quantized(self, kind: str) -> None:
        """Refuse quantized weights that this version does not take as inputs.

        Raises:
            BlinkError: names what works.
        """
        if kind in self.traits.quantized:
            return
        works = ", ".join(self.traits.quantized) or "none"
        raise BlinkError(
            f"{self.title} does not take {kind} weights as inputs; it takes: {works}",
            hint=f"{kind} works with --engine {', '.join(engines_with_quantized(kind))}",
        )

    def set_targets(self, config: Any, targets: tuple[str, ...]) -> None:
        """Name the GPUs to build for, "sm_89" and the like; none named: the one in this machine.

        Raises:
            BlinkError: this TensorRT cannot build for one of them.
        """
        if not targets:
            return
        if not self.named_targets:
            raise BlinkError(
                f"{self.title} builds only for the GPU in this machine",
                hint=f"build on a machine with {', '.join(targets)}, or take --engine tensorrt-rtx",
            )
        capabilities = self.module.ComputeCapability
        known = [name for name in dir(capabilities) if name.startswith("SM")]
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            name = target.upper().replace("_", "").rstrip("AF")
            if name not in known:
                works = ", ".join(f"sm_{digits}" for digits in sorted(int(k[2:]) for k in known))
                raise BlinkError(
                    f"{self.title} builds no plans for {target}",
                    hint=f"it builds for {works}; for {target} take --engine tensorrt on a "
                    "machine with that GPU, or --engine cuda",
                )
            config.set_compute_capability(getattr(capabilities, name), index)

    def turn_off_libraries(self, config: Any) -> None:
        """Leave out tactics that call cuBLAS or cuDNN.

        They would allocate memory of their own beside the block that all contexts share, and the
        server would need those libraries.
        """
        sources = self.module.TacticSource
        names = [name for name in dir(sources) if name.isupper()]
        ours = [n for n in names if n not in ("CUBLAS", "CUBLAS_LT", "CUDNN")]
        if self.version[0] == 8 and self.engine == "tensorrt":
            ours = []  # its convolutions are of no use to segments
        config.set_tactic_sources(sum(1 << int(getattr(sources, name)) for name in ours))

    def create_context(self, engine: Any) -> Any:
        """Make an execution context that takes its scratch memory from us."""
        if hasattr(engine, "create_execution_context_without_device_memory"):
            return engine.create_execution_context_without_device_memory()
        strategy = self.module.ExecutionContextAllocationStrategy.USER_MANAGED
        return engine.create_execution_context(strategy)

    def scratch_bytes(self, engine: Any) -> int:
        """Return the scratch memory of an engine's largest profile."""
        name = "device_memory_size_v2"  # 10.1 on; before it a size of at most 2 GiB
        return int(getattr(engine, name if hasattr(engine, name) else "device_memory_size"))

    def give_scratch(self, context: Any, address: int, num_bytes: int) -> None:
        """Hand a context its scratch memory."""
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(address, num_bytes)
        else:
            context.device_memory = address


def engines_with_quantized(kind: str) -> list[str]:
    """Return the engines, with their major versions, that take such weights as inputs."""
    return sorted(
        f"{engine} {major}" for (engine, major), t in TABLE.items() if kind in t.quantized
    )


def check_quantized_targets(kind: str, targets: tuple[str, ...]) -> None:
    """Refuse GPUs that have no instructions for quantized weights of a kind.

    Raises:
        BlinkError: names what works.
    """
    for target in targets:
        if compute_capability(target) < OLDEST_QUANTIZED_TARGET[kind]:
            works = ", ".join(f"{k} from sm_{n} on" for k, n in OLDEST_QUANTIZED_TARGET.items())
            raise BlinkError(f"{target} does not take {kind} weights", hint=f"use {works}")


def load_tensorrt(engine: str) -> TensorRtApi:
    """Import the TensorRT behind an engine's name.

    Raises:
        BlinkError: it is not installed, or older than the oldest version that works.
    """
    package = PACKAGES[engine]
    try:
        module = importlib.import_module(package)
    except (ImportError, OSError) as error:  # OSError: a library that it loads itself
        raise BlinkError(
            f"--engine {engine} needs the Python package {package}: {error}", hint=INSTALL[engine]
        ) from error
    return api_of_module(engine, module)


def api_of_module(engine: str, module: ModuleType) -> TensorRtApi:
    """Find the column of an imported module.

    Raises:
        BlinkError: it is older than the oldest version that works.
    """
    version = _full_version(module)
    oldest = OLDEST[engine]
    traits = TABLE.get((engine, version[0]))
    newest = max(major for name, major in TABLE if name == engine)
    if traits is None and version[0] > newest:
        traits = TABLE[engine, newest]
    if version < oldest or traits is None:
        raise BlinkError(
            f"{PACKAGES[engine]} {module.__version__} does not work here; "
            f"{'.'.join(map(str, oldest))} is the oldest that does",
            hint=INSTALL[engine] + " --upgrade",
        )
    return TensorRtApi(engine=engine, module=module, version=version, traits=traits)


def _full_version(module: ModuleType) -> tuple[int, ...]:
    """Return the version with its build number, which some packages leave to the library."""
    version = tuple(int(part) for part in module.__version__.split(".") if part.isdigit())
    if len(version) == 3:
        build = _library_build(version)
        version += (build,) if build is not None else ()
    return version


def _library_build(version: tuple[int, ...]) -> int | None:
    """Ask the loaded library for its build number, where it has one (10 on)."""
    for name in (f"libnvinfer.so.{version[0]}", f"libtensorrt_rtx.so.{version[0]}"):
        try:
            # Only a library that the package has loaded already: no other one is of interest.
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL | 4)  # RTLD_NOLOAD
            return int(library.getInferLibBuildVersion())
        except (OSError, AttributeError):
            continue
    return None
