"""Runs single segments on their plans, for `--check`: segment + arrays -> arrays, on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkc.capture.grid import GraphKey
from blinkc.closing import Closing
from blinkc.engine.gpu_here import find_gpu
from blinkc.engine.segment_engines import segment_engine_from_json
from blinkc.engine.tensorrt_api import load_tensorrt
from blinkc.engine.tensorrt_profiles import RowRange, narrowest
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    import numpy.typing as npt

    from blinkc.surgery.segments import Segment

    Array = npt.NDArray[Any]


class TensorRtSegments(Closing):
    """The plans of a build on this machine's GPU.

    Args:
        targets: GPUs that the plans are for.
        built: what the engine stage says of them.
        folder: where it put them.

    Raises:
        BlinkError: none of those GPUs is here.
    """

    def __init__(self, targets: Sequence[str], built: Mapping[str, Any], folder: Path) -> None:
        gpu = find_gpu()
        names = [target.rstrip("af") for target in targets]
        if gpu is None or gpu.target not in names:
            found = f"it has {gpu.name}, {gpu.target}" if gpu else "it has none"
            raise BlinkError(
                f"--check runs the plans on a GPU they are for, {', '.join(names)}, and this "
                f"machine does not have one: {found}",
                hint="leave --check out, or check on a machine with that GPU",
            )
        from blink_runtime.cuda_driver import Context, Stream
        from blink_runtime.tensorrt_engines import TensorRtEngines

        self._context = Context()
        self._stream = Stream()
        self._ranges = tuple(RowRange(**item) for item in built["ranges"])
        self._plans = {entry["segment"]: number for number, entry in enumerate(built["plans"])}
        kinds = ("activations", "weights", "outputs")
        entries: list[dict[str, Any]] = [
            {
                "segment": entry["segment"],
                "plan": entry["plan"],
                **{kind: entry[kind] for kind in kinds},
                "ranges": built["ranges"],
                "choices": [],
                "has_kernels": False,
            }
            for entry in built["plans"]
        ]
        self._tensors = [segment_engine_from_json(entry) for entry in entries]
        plans = {entry["plan"]: (folder / entry["plan"]).read_bytes() for entry in entries}
        self._engines = TensorRtEngines(load_tensorrt(built["engine"]), entries, plans)

    def __call__(self, segment: Segment, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run a segment; floating values go in and come out as fp32 arrays, quantized weights go in
        as they are."""
        import numpy as np

        from blink_runtime.cuda_driver import DeviceBuffer
        from blinkc.engine.check_segments import QUANTIZED
        from blinkc.frontend.weights import NUMPY_DTYPES

        number = self._plans[segment.name]
        item = self._tensors[number]
        counts = {
            tensor.rows: len(arrays[tensor.name])
            for tensor in item.activations
            if tensor.rows and tensor.name in arrays
        }
        tokens = counts.get("tokens", 1)
        key = GraphKey("prefill", counts.get("samples", 1), tokens)
        buffers: dict[str, DeviceBuffer] = {}
        try:
            for tensor in (*item.activations, *item.weights):
                given = arrays[tensor.name]
                if tensor.dtype not in QUANTIZED:
                    given = given.astype(NUMPY_DTYPES[tensor.dtype])
                data = np.ascontiguousarray(given)
                buffers[tensor.name] = DeviceBuffer(data.nbytes, tensor.name)
                buffers[tensor.name].write(data.view(np.uint8).reshape(-1).data)
            for tensor in item.outputs:
                count = counts.get(tensor.rows, 1) * int(np.prod(tensor.shape, dtype=np.int64))
                size = count * NUMPY_DTYPES[tensor.dtype].itemsize
                buffers[tensor.name] = DeviceBuffer(size, tensor.name)
                buffers[tensor.name].fill(0xFF)  # NaN where nothing is written
            addresses = {name: buffer.address for name, buffer in buffers.items()}
            profile = narrowest(self._ranges, key)
            self._engines.prepare(number, profile, key, addresses, self._stream)
            self._engines.enqueue(number, profile, key, addresses, self._stream)
            self._stream.synchronize()
            outputs = {}
            for tensor in item.outputs:
                shape = (counts.get(tensor.rows, 1), *tensor.shape)
                data = np.frombuffer(buffers[tensor.name].read(), NUMPY_DTYPES[tensor.dtype])
                wide = data if data.dtype.kind in "iub" else data.astype(np.float32)
                outputs[tensor.name] = wide[: int(np.prod(shape))].reshape(shape)
            return outputs
        finally:
            for buffer in buffers.values():
                buffer.close()

    def close(self) -> None:
        """Free the GPU."""
        self._engines.close()
        self._stream.close()
        self._context.close()
