"""The differences between the TensorRTs that users have, in one table: name -> `TensorRtApi`.

| | 8.6 | 10.x | 11.x | RTX 1.4+ |
| --- | --- | --- | --- | --- |
| Python package | tensorrt | tensorrt | tensorrt | tensorrt_rtx_bindings |
| types | by precision constraints | strong | strong | strong |
| network flag EXPLICIT_BATCH | needed | gone | gone | gone |
| IProgressMonitor | no | yes | yes | yes |
| targets named without a GPU | no | no | no | compute capabilities |

Segments hold standard ONNX only, cut ops run outside of engines: no plugin is needed, and so
neither is the unversioned `libtensorrt_rtx.so` that RTX's parser looks for when it meets one.

Nothing is imported before `load_tensorrt` is called.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from blinkc.errors import BlinkError

PACKAGES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx_bindings"}
INSTALL = {
    "tensorrt": "pip install tensorrt",
    "tensorrt-rtx": "pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings",
}
OLDEST = {"tensorrt": (8, 6), "tensorrt-rtx": (1, 4)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRtApi:
    """One imported TensorRT and what it can do."""

    engine: str  # "tensorrt" or "tensorrt-rtx"
    module: ModuleType
    version: tuple[int, ...]  # with the build number, as far as the package names it

    @property
    def strongly_typed(self) -> bool:
        """Say whether the model's own types rule; False: precision constraints do (8.6)."""
        return self.engine == "tensorrt-rtx" or self.version[0] >= 10

    @property
    def named_targets(self) -> bool:
        """Say whether plans can be built for GPUs that are not in this machine."""
        return self.engine == "tensorrt-rtx"

    @property
    def has_progress_monitor(self) -> bool:
        """Say whether the builder reports progress."""
        return hasattr(self.module, "IProgressMonitor")

    @property
    def version_text(self) -> str:
        """Return the full version as the manifest records it."""
        return ".".join(map(str, self.version))

    def network_flags(self) -> int:
        """Return the flags for `Builder.create_network`."""
        flag = self.module.NetworkDefinitionCreationFlag
        if self.strongly_typed:
            return 1 << int(flag.STRONGLY_TYPED)
        return 1 << int(flag.EXPLICIT_BATCH)

    def set_targets(self, config: Any, targets: tuple[str, ...]) -> None:
        """Name the GPUs to build for, "sm_89" and the like.

        Raises:
            BlinkError: this TensorRT cannot build for one of them.
        """
        capabilities = self.module.ComputeCapability
        known = [name for name in dir(capabilities) if name.startswith("SM")]
        config.num_compute_capabilities = len(targets)
        for index, target in enumerate(targets):
            name = target.upper().replace("_", "").rstrip("AF")
            if name not in known:
                works = ", ".join(f"sm_{item[2:]}" for item in sorted(known))
                raise BlinkError(
                    f"TensorRT-RTX {self.version_text} builds no plans for {target}",
                    hint=f"it builds for {works}; for {target} take --engine tensorrt on a "
                    "machine with that GPU, or --engine cuda",
                )
            config.set_compute_capability(getattr(capabilities, name), index)


def load_tensorrt(engine: str) -> TensorRtApi:
    """Import the TensorRT behind an engine's name.

    Raises:
        BlinkError: it is not installed, or older than the oldest version that works.
    """
    package = PACKAGES[engine]
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise BlinkError(
            f"--engine {engine} needs the Python package {package}: {error}", hint=INSTALL[engine]
        ) from error
    version = tuple(int(part) for part in module.__version__.split(".") if part.isdigit())
    oldest = OLDEST[engine]
    if version < oldest:
        raise BlinkError(
            f"{package} {module.__version__} is older than {'.'.join(map(str, oldest))}",
            hint=INSTALL[engine] + " --upgrade",
        )
    return TensorRtApi(engine=engine, module=module, version=version)
