"""One step of the model for any graph key: launch list + addresses -> kernels put into a stream.

Reads the launch list that blinkc.engine.cuda wrote. What differs between keys is only how many rows
there are; products of few rows stream weights through our kernels, others go to cuBLASLt.
"""

from __future__ import annotations

from ctypes import c_uint64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blink_runtime.cublaslt import ProductShape
from blink_runtime.cuda_driver import DeviceBuffer
from blink_runtime.cuda_experts import ExpertsShape, expert_launches, experts_scratch
from blink_runtime.cuda_graphs import Launch, launch
from blink_runtime.cuda_kernels import (
    AttentionShape,
    CudaKernels,
)
from blinkc.capture.plan import DTYPE_BYTES
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blink_runtime.cublaslt import CublasLt
    from blink_runtime.cuda_driver import Stream
    from blink_runtime.cuda_kernels import StepAddresses
    from blink_runtime.tensorrt_engines import TensorRtEngines
    from blinkc.capture.grid import GraphKey

LAUNCH_LIST_FORMAT = 4  # grows when a kernel's name, grid or arguments change
MAX_STREAM_ROWS = 16  # what gemv.cuh takes
MAX_NARROW_ROWS = 64  # what narrow.cuh takes
MIN_NARROW_ROWS = 9  # fewer rows stream faster through gemv.cuh
_ALIGNMENT_BYTES = 256
_ENOUGH_BLOCKS = 1056  # of a row kernel: 8 on each of 132 multiprocessors
_THREADS_OF_MANY_ROWS = 256  # of a row kernel: small blocks hide each other's barriers


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAddresses:
    """Where the model lies in device memory."""

    arena: int
    weights: tuple[int, ...]
    kv_layers: tuple[int, ...]


class CudaSteps:
    """Enqueues whole steps; owns the scratch memory of the cut ops.

    Args:
        launches: the launch list, as JSON gives it.
        products: of the launch list's products; None where it has none.
        keys: every key that will be asked for; scratch is sized for the largest.
        engines: runs what the launch list gives to TensorRT.
    """

    def __init__(
        self,
        launches: dict[str, Any],
        kernels: CudaKernels,
        products: CublasLt | None,
        addresses: ModelAddresses,
        step: StepAddresses,
        keys: Sequence[GraphKey],
        engines: TensorRtEngines | None = None,
    ) -> None:
        if launches.get("format") != LAUNCH_LIST_FORMAT:
            raise BlinkError(
                f"the bundle's launch list has format {launches.get('format')}, this runtime reads "
                f"{LAUNCH_LIST_FORMAT}",
                hint="rebuild the bundle with this version",
            )
        self._launches = launches
        self._kernels = kernels
        self._products = products
        self._addresses = addresses
        self._step = step
        self._engines = engines
        self._key_index = {key: number for number, key in enumerate(keys)}
        self._weights_of_shape = self._group_weights()
        self._scratch: dict[str, DeviceBuffer] = {}
        self._reserve_scratch(keys)

    def _group_weights(self) -> dict[tuple[int, int], list[int]]:
        groups: dict[tuple[int, int], list[int]] = {}
        for entry in self._launches["steps"]:
            if entry["op"] == "gemm":
                group = groups.setdefault((entry["n"], entry["k"]), [])
                group.append(self._address(entry["weight"]))
        return groups

    def _reserve_scratch(self, keys: Sequence[GraphKey]) -> None:
        sizes: dict[str, int] = {}

        def want(name: str, num_bytes: int) -> None:
            sizes[name] = max(sizes.get(name, 0), num_bytes)

        for entry in self._launches["steps"]:
            if entry["op"] == "attention":
                shape = _attention_shape(entry)
                for key in keys:
                    if key.kind == "decode":
                        want(
                            "partial",
                            self._kernels.decode_partial_bytes(shape, key.batch, key.seqlen),
                        )
                        want("arrivals", key.batch * shape.num_kv_heads * 4)
            elif entry["op"] == "experts":
                most = max(_num_tokens(key) for key in keys)
                for name, size in experts_scratch(_experts_shape(entry), most).items():
                    want(f"experts.{name}", size)
            elif entry["op"] == "sample":
                rows = max(key.batch for key in keys)
                want("token counts", rows * self._launches["vocab_size"] * 4)
        for name, size in sizes.items():
            self._scratch[name] = DeviceBuffer(size, f"scratch ({name})")
            self._scratch[name].fill(0)

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of scratch memory."""
        return sum(buffer.num_bytes for buffer in self._scratch.values())

    def _address(self, place: list[Any] | None) -> int:
        if place is None:
            return 0
        kind, which = place
        if kind == "arena":
            return int(self._addresses.arena + int(which))
        if kind == "weight":
            return self._addresses.weights[int(which)]
        return int(getattr(self._step, which))

    def _steps_of(self, key: GraphKey) -> Iterator[dict[str, Any]]:
        """Yield a key's entries: of a segment its plan or this project's kernels, as was chosen."""
        for entry in self._launches["steps"]:
            number = entry.get("engine", entry.get("instead_of"))
            if number is not None:
                assert self._engines is not None, "launch lists with plans come with engines"
                is_plan = self._engines.choice(number, self._key_index[key]) >= 0
                if is_plan != (entry["op"] == "engine"):
                    continue
            yield entry

    def prepare(self, key: GraphKey, stream: Stream) -> None:
        """Do what the engines of a key cannot do inside a capture."""
        for entry in self._steps_of(key):
            if entry["op"] == "engine":
                self._run_engine(entry, key, stream, prepare=True)

    def _run_engine(
        self, entry: dict[str, Any], key: GraphKey, stream: Stream, *, prepare: bool = False
    ) -> None:
        assert self._engines is not None
        number = entry["engine"]
        profile = self._engines.choice(number, self._key_index[key])
        addresses = {name: self._address(place) for name, place in entry["tensors"].items()}
        run = self._engines.prepare if prepare else self._engines.enqueue
        run(number, profile, key, addresses, stream)

    def tune(self, key: GraphKey, stream: Stream) -> None:
        """Choose cuBLASLt's algorithms for the products of a key; outside any capture."""
        for entry in self._steps_of(key):
            if entry["op"] == "gemm":
                m = _rows(entry, key)
                if not self._streams(entry, m) and not self._is_narrow(entry, m):
                    weights = self._weights_of_shape[entry["n"], entry["k"]]
                    assert self._products is not None
                    self._products.choose(
                        _product_shape(entry, m),
                        self._address(entry["x"]),
                        weights,
                        self._address(entry["bias"]),
                        self._address(entry["out"]),
                        stream,
                    )

    def _streams(self, entry: dict[str, Any], m: int) -> bool:
        return bool(
            m <= MAX_STREAM_ROWS
            and entry["layout"] == "nk"
            and entry["k"] % 32 == 0
            and entry["dtype"] == entry["out_dtype"] == self._launches["dtype"]
        )

    def _is_narrow(self, entry: dict[str, Any], m: int) -> bool:
        return bool(
            MIN_NARROW_ROWS <= m <= MAX_NARROW_ROWS
            and entry["layout"] == "nk"
            and entry["k"] % 64 == 0
            and entry["dtype"] == entry["out_dtype"] == self._launches["dtype"]
            and self._kernels.constant("has_warpgroup_products")
        )

    def enqueue(self, key: GraphKey, stream: Stream) -> None:
        """Put the whole step of a key into a stream, completion word included."""
        for entry in self._steps_of(key):
            if entry["op"] == "gemm":
                self._product(entry, _rows(entry, key), stream)
            elif entry["op"] == "engine":
                self._run_engine(entry, key, stream)
            else:
                for item in self._expand(entry, key):
                    launch(item, stream)
        launch(self._kernels.finish(self._step), stream)

    def _product(self, entry: dict[str, Any], m: int, stream: Stream) -> None:
        x, weight, bias, out = (
            self._address(entry[name]) for name in ("x", "weight", "bias", "out")
        )
        n, k = entry["n"], entry["k"]
        if self._is_narrow(entry, m):
            launch(self._kernels.narrow(x, weight, bias, out, m, n, k), stream)
        elif self._streams(entry, m):
            launch(self._kernels.gemv(x, weight, bias, out, m, n, k), stream)
        else:
            assert self._products is not None
            self._products.product(_product_shape(entry, m), x, weight, bias, out, stream)

    def _expand(self, entry: dict[str, Any], key: GraphKey) -> list[Launch]:
        kernels, step, address = self._kernels, self._step, self._address
        if entry["op"] == "rows":
            rows = _rows(entry, key)
            blocks = min(entry["blocks_per_row"], max(1, -(-_ENOUGH_BLOCKS // rows)))
            grid = (rows, blocks, 1)
            args = tuple(c_uint64(address(place)) for place in entry["args"])
            function = kernels.function(entry["kernel"])
            threads = entry["threads"]
            if rows >= _ENOUGH_BLOCKS and threads > 2 * _THREADS_OF_MANY_ROWS:
                threads = _THREADS_OF_MANY_ROWS
            return [Launch(function, grid, threads, entry["shared_bytes"], args)]
        if entry["op"] == "attention":
            shape = _attention_shape(entry)
            q, k, v, out = (address(entry[name]) for name in ("q", "k", "v", "out"))
            kv, sinks = self._addresses.kv_layers[entry["layer"]], address(entry["sinks"])
            if key.kind == "prefill":
                return kernels.prefill_attention(
                    step, shape, q, k, v, out, kv, sinks, key.batch, key.seqlen
                )
            partial, arrivals = (self._scratch[name].address for name in ("partial", "arrivals"))
            return kernels.decode_attention(
                step, shape, q, k, v, out, kv, sinks, partial, arrivals, key.batch, key.seqlen
            )
        if entry["op"] == "experts":
            places = {
                name.removeprefix("experts."): buffer.address
                for name, buffer in self._scratch.items()
                if name.startswith("experts.")
            }
            x, ids, weights, gate_up, down, out = (
                address(entry[name]) for name in ("x", "ids", "weights", "gate_up", "down", "out")
            )
            return expert_launches(
                kernels,
                step,
                _experts_shape(entry),
                x,
                ids,
                weights,
                gate_up,
                down,
                out,
                places,
                _num_tokens(key),
            )
        if entry["op"] == "sample":
            vocab_size = self._launches["vocab_size"]
            counts = self._scratch["token counts"].address
            return kernels.sample(step, address(entry["logits"]), counts, key.batch, vocab_size)
        raise BlinkError(f"the launch list has an unknown operation {entry['op']!r}")

    def close(self) -> None:
        """Free the scratch memory."""
        for buffer in self._scratch.values():
            buffer.close()
        self._scratch.clear()


def _num_tokens(key: GraphKey) -> int:
    return key.seqlen if key.kind == "prefill" else key.batch


def _rows(entry: dict[str, Any], key: GraphKey) -> int:
    return _num_tokens(key) if entry["rows"] == "tokens" else key.batch


def _attention_shape(entry: dict[str, Any]) -> AttentionShape:
    names = ("num_q_heads", "num_kv_heads", "head_dim", "scale", "window", "softcap")
    return AttentionShape(**{name: entry[name] for name in names})


def _experts_shape(entry: dict[str, Any]) -> ExpertsShape:
    names = ("num_experts", "num_choices", "hidden_size", "intermediate_size")
    return ExpertsShape(**{name: entry[name] for name in names})


def _product_shape(entry: dict[str, Any], m: int) -> ProductShape:
    return ProductShape(
        m=m,
        n=entry["n"],
        k=entry["k"],
        dtype=entry["dtype"],
        out_dtype=entry["out_dtype"],
        bias=entry["bias"] is not None,
        transposed=entry["layout"] == "kn",
    )


def pack_weights(launches: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the offset of every weight in one allocation, and the bytes of the whole."""
    offsets, total = [], 0
    for weight in launches["weights"]:
        offsets.append(total)
        size = DTYPE_BYTES[weight["dtype"]]
        for axis in weight["shape"]:
            size *= axis
        total += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tuple(offsets), total
