"""TensorRTs that are not installed: recorded names of a package -> a module that has no others.

The names in tensorrt_surfaces/ were read off the packages with `dir()`: 8.6.0 whole, 10.0.1,
10.16.1.11 and 11.4.0.106 of the bindings alone (their libraries are not on PyPI), RTX 1.7.1.116
whole. A call that a version does not have is an AttributeError here as there.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

SURFACES = {
    path.stem: path for path in sorted((Path(__file__).parent / "tensorrt_surfaces").glob("*.json"))
}
_ENUMS = (
    "NetworkDefinitionCreationFlag", "BuilderFlag", "MemoryPoolType", "DataType", "TacticSource",
    "ExecutionContextAllocationStrategy", "ComputeCapability", "LayerType",
)  # fmt: skip


class FakeTensorRt(ModuleType):
    """A module with the classes of a recording; `calls` is what was done with them."""

    def __init__(self, name: str) -> None:
        data = json.loads(SURFACES[name].read_text(encoding="utf-8"))
        super().__init__(data["package"])
        self.__version__ = data["version"]
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.layers: list[Any] = []
        self.inputs: list[Any] = []
        self.refuses: set[str] = set()  # methods that return False or None
        self.float32, self.float16 = "fp32", "fp16"
        for class_name, names in data["classes"].items():
            kind = _enum(names) if class_name in _ENUMS else self._class(class_name, names)
            setattr(self, class_name, kind)

    def _class(self, class_name: str, names: list[str]) -> type:
        module = self

        class Recorded:
            def __init__(self, *arguments: Any) -> None:
                module.calls.append((class_name, "__init__", arguments))

            def __getattr__(self, name: str) -> Any:
                if name.startswith("_") or name not in names:
                    raise AttributeError(f"{class_name} of {module.__version__} has no {name}")
                value = _VALUES.get((class_name, name))
                if value is not None:
                    return value(module)

                def method(*arguments: Any, **named: Any) -> Any:
                    module.calls.append((class_name, name, (*arguments, *named.values())))
                    if name in module.refuses:
                        return None if name.startswith(("create", "build", "deser")) else False
                    return _RESULTS.get((class_name, name), lambda *_: True)(
                        module, self, *arguments
                    )

                return method

            def __setattr__(self, name: str, value: Any) -> None:
                if not name.startswith("_") and name not in names:
                    raise AttributeError(f"{class_name} of {module.__version__} has no {name}")
                module.calls.append((class_name, f"{name}=", (value,)))
                object.__setattr__(self, name, value)

        Recorded.__name__ = class_name
        if class_name == "ILogger":
            Recorded.WARNING = 2  # type: ignore[attr-defined]
            Recorded.__setattr__ = object.__setattr__  # type: ignore[assignment]
        if class_name == "IProgressMonitor":
            Recorded.__setattr__ = object.__setattr__  # type: ignore[assignment]
        return Recorded

    def did(self, class_name: str, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of every such call."""
        return [
            arguments
            for kind, method, arguments in self.calls
            if (kind, method) == (class_name, name)
        ]

    def layer(self, name: str, kind: str, dtypes: list[str]) -> Any:
        """Add a layer to the network that the parser will make."""
        layer = self.ILayer()
        object.__setattr__(layer, "name", name)
        object.__setattr__(layer, "type", type("T", (), {"name": kind}))
        object.__setattr__(layer, "num_outputs", len(dtypes))
        outputs = [type("O", (), {"dtype": dtype}) for dtype in dtypes]
        object.__setattr__(layer, "get_output", lambda number: outputs[number])
        self.layers.append(layer)
        return layer

    def input(self, name: str, shape: tuple[int, ...]) -> None:
        """Add a network input."""
        self.inputs.append(type("I", (), {"name": name, "shape": shape}))


def _enum(names: list[str]) -> type:
    return type("Enum", (), {name: number for number, name in enumerate(names)})


def _build(module: FakeTensorRt, _builder: Any, _network: Any, config: Any) -> bytes | None:
    """Report two steps to a monitor, as builds do, and end when it says so."""
    monitor = config.__dict__.get("progress_monitor")
    if monitor is not None:
        monitor.phase_start("Building engine", None, 2)
        for step in range(2):
            if not monitor.step_complete("Building engine", step):
                return None
        monitor.phase_finish("Building engine")
    return b"a plan"


_VALUES: dict[tuple[str, str], Any] = {
    ("INetworkDefinition", "num_layers"): lambda m: len(m.layers),
    ("INetworkDefinition", "num_inputs"): lambda m: len(m.inputs),
    ("OnnxParser", "num_errors"): lambda m: 0,
    ("ICudaEngine", "device_memory_size"): lambda m: 4096,
    ("ICudaEngine", "device_memory_size_v2"): lambda m: 4096,
}
_RESULTS: dict[tuple[str, str], Any] = {
    ("Builder", "create_network"): lambda m, *_: m.INetworkDefinition(),
    ("Builder", "create_builder_config"): lambda m, *_: m.IBuilderConfig(),
    ("Builder", "create_optimization_profile"): lambda m, *_: m.IOptimizationProfile(),
    ("Builder", "build_serialized_network"): _build,
    ("IBuilderConfig", "add_optimization_profile"): lambda *_: 0,
    ("IBuilderConfig", "create_timing_cache"): lambda *_: "cache",
    ("IBuilderConfig", "get_timing_cache"): lambda *_: None,
    ("INetworkDefinition", "get_layer"): lambda m, _, number: m.layers[number],
    ("INetworkDefinition", "get_input"): lambda m, _, number: m.inputs[number],
    ("Runtime", "deserialize_cuda_engine"): lambda m, *_: m.ICudaEngine(),
    ("ICudaEngine", "create_execution_context"): lambda m, *_: m.IExecutionContext(),
    ("ICudaEngine", "create_execution_context_without_device_memory"): lambda m, *_: (
        m.IExecutionContext()
    ),
    ("ICudaEngine", "get_tensor_shape"): lambda *_: (4, 4),
}
