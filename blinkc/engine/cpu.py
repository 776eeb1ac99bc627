"""Engine `cpu`: renders and compiles the CPU model, and drives it directly, without a scheduler.

Serving goes through the scheduler of the bundle; `CpuModel` is for checks and tests: fill the step
buffers, launch, read the sampled ids.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkc.closing import Closing
from blinkc.codegen.compile_cpu import compile_cpu
from blinkc.engine.render_cpu import render_cpu_model
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from blinkc.capture.plan import CapturePlan
    from blinkc.surgery.segments import SegmentedModel

SAMPLING = np.dtype(
    [
        ("seed", "<u8"),
        ("token_index", "<u4"),
        ("flags", "<u4"),
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("top_k", "<u4"),
        ("slot", "<u4"),
        ("num_logprobs", "<u4"),
        ("reserved", "<u4", 6),
    ]
)  # blink_sampling_params
STATE = np.dtype(
    [
        ("completion", "<u8"),
        ("launch", "<u8"),
        ("num_tokens", "<u4"),
        ("num_rows", "<u4"),
        ("kind", "<u4"),
        ("key_index", "<u4"),
        ("reserved", "<u4", 8),
    ]
)  # blink_step_state
SAMPLE_ENABLED = 1  # BLINK_SAMPLE_ENABLED

_POINTERS = (
    "state",
    "input_ids",
    "positions",
    "token_row",
    "row_query_start",
    "row_kv_len",
    "row_lane",
    "sample_token",
    "page_table",
    "sampling",
    "sampled_ids",
    "sampled_logprobs",
)
_COUNTS = ("max_step_tokens", "max_batch", "max_pages_per_lane", "page_size_tokens")
_ERROR_BYTES = 1024


class _StepBuffers(ctypes.Structure):
    """blink_step_buffers."""

    _fields_ = [(name, ctypes.c_void_p) for name in _POINTERS] + [
        (name, ctypes.c_uint32) for name in _COUNTS
    ]


class CpuModel(Closing):
    """A compiled CPU model and its step buffers, as numpy arrays that share their memory.

    Args:
        library: shared object that exports blink_cpu_model_* (runtime/include/blink/cpu/model.h).
        weights: fp32 arrays in the order of `SegmentedModel.weights`.
        num_kv_pages: the sink page included.
        num_threads: 0: as many as the process may use.

    Raises:
        BlinkError: the library cannot be loaded or refuses its inputs.
    """

    def __init__(
        self,
        library: Path,
        weights: Sequence[np.ndarray],
        *,
        num_kv_pages: int,
        num_threads: int = 0,
    ) -> None:
        self._model = ctypes.c_void_p()
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise BlinkError(
                f"{library} cannot be loaded: {error}", hint="compile it again on this machine"
            ) from error
        self._library.blink_cpu_model_logits.restype = ctypes.c_void_p
        self._library.blink_cpu_model_buffers.restype = ctypes.POINTER(_StepBuffers)
        self._weights = [np.ascontiguousarray(w, dtype=np.float32) for w in weights]
        addresses = (ctypes.c_void_p * len(weights))(*(w.ctypes.data for w in self._weights))
        error_text = ctypes.create_string_buffer(_ERROR_BYTES)
        failed = self._library.blink_cpu_model_create(
            addresses,
            ctypes.c_uint32(len(weights)),
            ctypes.c_uint32(num_kv_pages),
            ctypes.c_uint32(num_threads),
            ctypes.byref(self._model),
            error_text,
            ctypes.c_uint32(_ERROR_BYTES),
        )
        if failed:
            raise BlinkError(f"the CPU model does not start: {error_text.value.decode()}")
        self._map_buffers(self._library.blink_cpu_model_buffers(self._model).contents)

    def _map_buffers(self, buffers: _StepBuffers) -> None:
        tokens, batch = int(buffers.max_step_tokens), int(buffers.max_batch)
        pages = int(buffers.max_pages_per_lane)
        self.max_step_tokens, self.max_batch = tokens, batch
        self.max_pages_per_lane = pages
        self.page_size_tokens = int(buffers.page_size_tokens)

        def view(name: str, dtype: Any, *shape: int) -> np.ndarray:
            dtype = np.dtype(dtype)
            count = int(np.prod(shape))
            raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(getattr(buffers, name))
            return np.frombuffer(raw, dtype=dtype).reshape(shape)

        self.state = view("state", STATE, 1)
        self.input_ids = view("input_ids", np.int32, tokens)
        self.positions = view("positions", np.int32, tokens)
        self.token_row = view("token_row", np.int32, tokens)
        self.row_query_start = view("row_query_start", np.int32, batch + 1)
        self.row_kv_len = view("row_kv_len", np.int32, batch)
        self.row_lane = view("row_lane", np.int32, batch)
        self.sample_token = view("sample_token", np.int32, batch)
        self.page_table = view("page_table", np.int32, batch + 1, pages)
        self.sampling = view("sampling", SAMPLING, batch)
        self.sampled_ids = view("sampled_ids", np.int32, batch)

    def launch(self, key_index: int) -> None:
        """Run the step that the buffers describe, to its end."""
        if self._library.blink_cpu_model_launch(self._model, ctypes.c_uint32(key_index)):
            raise BlinkError(f"graph key {key_index}: the step does not fit")

    def logits(self, num_rows: int, vocab_size: int) -> np.ndarray:
        """Return a copy of the last step's logits, `[num_rows, vocab_size]`."""
        address = self._library.blink_cpu_model_logits(self._model)
        raw = (ctypes.c_float * (num_rows * vocab_size)).from_address(int(address))
        flat: np.ndarray = np.ctypeslib.as_array(raw).copy()
        return flat.reshape(num_rows, vocab_size)

    def close(self) -> None:
        """Free the model; the arrays must not be used any more."""
        if self._model:
            self._library.blink_cpu_model_destroy(self._model)
            self._model = ctypes.c_void_p()


def build_cpu_model(segmented: SegmentedModel, plan: CapturePlan, out: Path) -> str:
    """Render the model and compile it alone into the shared object `out`; return the source."""
    source = render_cpu_model(segmented, plan)
    compile_cpu({"segments.cpp": source}, out=out)
    return source


__all__ = ["SAMPLE_ENABLED", "CpuModel", "build_cpu_model", "render_cpu_model"]
