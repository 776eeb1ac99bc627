"""TensorRT plans on the GPU: plans + launch list -> contexts that run segments in a stream.

All contexts share one block of device memory: a step's engines run one after the other. A context
belongs to one profile of one plan; the layers that share the plan differ in addresses alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from blink_runtime.cuda_driver import DeviceBuffer
from blinkc.engine.segment_engines import SegmentEngine, segment_engine_from_json
from blinkc.engine.tensorrt_api import TensorRtApi, load_tensorrt
from blinkc.engine.tensorrt_build import BuildLog
from blinkc.engine.tensorrt_profiles import key_rows
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blink_runtime.cuda_driver import Stream
    from blinkc.capture.grid import GraphKey


class TensorRtEngines:
    """The plans of a model, ready to run.

    Args:
        api: the TensorRT that the plans were checked against.
        engines: the launch list's entries.
        plans: contents of the plan files, by name.

    Raises:
        BlinkError: a plan cannot be loaded, or memory runs out; TensorRT's log is attached.
    """

    def __init__(
        self,
        api: TensorRtApi,
        engines: Sequence[Mapping[str, Any]],
        plans: Mapping[str, bytes],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._api = api
        self._log = BuildLog(api)
        self.engines: list[SegmentEngine] = [segment_engine_from_json(dict(e)) for e in engines]
        if notice := api.notice("served"):
            say(f"notice: {notice}")
        self._runtime = api.module.Runtime(self._log.logger)
        self._loaded = [self._load(engine, plans[engine.plan]) for engine in self.engines]
        self.scratch_bytes = max((api.scratch_bytes(e) for e in self._loaded), default=0)
        self._scratch = DeviceBuffer(self.scratch_bytes, "scratch (TensorRT)")
        self._forced: dict[int, int] = {}
        self._contexts: dict[tuple[int, int], Any] = {}
        self._rows: dict[tuple[int, int], tuple[int, int]] = {}

    def _load(self, engine: SegmentEngine, plan: bytes) -> Any:
        loaded = self._runtime.deserialize_cuda_engine(plan)
        if loaded is None:
            raise BlinkError(
                f"{self._api.title} does not load the plan of segment {engine.segment}",
                hint="blinkc rebuild BUNDLE builds the plans again",
                log=self._log.text(),
            )
        return loaded

    def choice(self, engine: int, key_index: int) -> int:
        """Return the profile that a key runs, or -1 for kernels."""
        return self._forced.get(engine, self.engines[engine].choices[key_index])

    @contextmanager
    def forced(self, engine: int, choice: int) -> Iterator[None]:
        """Let every key run one choice of an engine inside the `with` block, to measure it."""
        self._forced[engine] = choice
        try:
            yield
        finally:
            del self._forced[engine]

    def prepare(
        self,
        engine: int,
        profile: int,
        key: GraphKey,
        addresses: Mapping[str, int],
        stream: Stream,
    ) -> None:
        """Bring a profile to a key's shapes and run it once, outside of any capture.

        The first run after a change of shapes does work that cannot be captured.
        """
        place, rows = (engine, profile), key_rows(key)
        if self._rows.get(place) == rows:
            return
        context = self._contexts.get(place) or self._make_context(engine, profile, stream)
        item = self.engines[engine]
        counts = {"tokens": rows[0], "samples": rows[1]}
        for tensor in item.activations:
            shape = (counts[tensor.rows], *tensor.shape)
            if not context.set_input_shape(tensor.name, shape):
                raise BlinkError(
                    f"{self._api.title}: profile {profile} of segment {item.segment} refuses "
                    f"{tensor.name} {shape}",
                    log=self._log.text(),
                )
        self._contexts[place] = context
        self._rows[place] = rows
        self._execute(context, item, addresses, stream)
        stream.synchronize()

    def _make_context(self, engine: int, profile: int, stream: Stream) -> Any:
        item, loaded = self.engines[engine], self._loaded[engine]
        context = self._api.create_context(loaded)
        if context is None:
            raise BlinkError(
                f"{self._api.title} makes no context for segment {item.segment}",
                log=self._log.text(),
            )
        self._api.give_scratch(context, self._scratch.address, self._scratch.num_bytes)
        if not context.set_optimization_profile_async(profile, int(stream.handle)):
            raise BlinkError(
                f"{self._api.title}: segment {item.segment} has no profile {profile}",
                log=self._log.text(),
            )
        stream.synchronize()
        for tensor in item.weights:  # one shape each; static ones refuse to be told
            if any(axis < 0 for axis in loaded.get_tensor_shape(tensor.name)):
                context.set_input_shape(tensor.name, tensor.shape)
        return context

    def enqueue(
        self,
        engine: int,
        profile: int,
        key: GraphKey,
        addresses: Mapping[str, int],
        stream: Stream,
    ) -> None:
        """Put one call of a segment into a stream, or the graph being captured from it.

        Raises:
            BlinkError: TensorRT says no, or the profile was not prepared for the key.
        """
        place = (engine, profile)
        if self._rows.get(place) != key_rows(key):
            raise BlinkError(
                f"segment {self.engines[engine].segment} is not prepared for {tuple(key)}"
            )
        self._execute(self._contexts[place], self.engines[engine], addresses, stream)

    def _execute(
        self, context: Any, item: SegmentEngine, addresses: Mapping[str, int], stream: Stream
    ) -> None:
        for name, address in addresses.items():
            context.set_tensor_address(name, address)
        if not context.execute_async_v3(int(stream.handle)):
            raise BlinkError(
                f"{self._api.title} could not enqueue segment {item.segment}", log=self._log.text()
            )

    def close(self) -> None:
        """Free contexts, plans and the shared block, in this order."""
        self._contexts.clear()
        self._loaded.clear()
        self._runtime = None
        self._scratch.close()


def found_builds(wanted: Mapping[str, str], compute_capability: tuple[int, int]) -> dict[str, str]:
    """Return what this machine has of the things that plans are bound to.

    Args:
        wanted: the manifest's `target.builds`; nothing is imported that it does not name.
    """
    from blink_runtime.cuda_driver import driver
    from blinkc.engine.gpu_here import driver_version

    found = {
        "compute capability": ".".join(map(str, compute_capability)),
        "driver": driver_version(int(driver().cuDriverGetVersion()[1])),
    }
    for engine in ("tensorrt", "tensorrt-rtx"):
        if engine in wanted:
            try:
                found[engine] = load_tensorrt(engine).version_text
            except BlinkError:
                continue
    return found
