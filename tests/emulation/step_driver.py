"""Whole steps of a model on the emulated device, one key at a time, driven by hand."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from blink_runtime import cuda_steps
from blink_runtime.cuda_kernels import StepAddresses
from blink_runtime.cuda_steps import CudaSteps, ModelAddresses
from blinkc.frontend.weights import read_weight
from tests.gpu.kernel_checks import SamplingParams

if TYPE_CHECKING:
    import pytest

    from blinkc.capture.grid import GraphKey
    from blinkc.engine.cuda import CudaModel
    from blinkc.surgery.segments import SegmentedModel
    from tests.emulation.harness import EmulatedHarness

_INPUTS = ("input_ids", "positions", "token_row", "row_query_start", "row_kv_len", "row_lane",
           "sample_token", "sampled_ids")  # fmt: skip


@dataclass
class Request:
    """One sequence: its tokens so far, and how many are in the KV cache."""

    tokens: list[int]
    lane: int
    done: int = 0


class _Products:
    """cuBLASLt's products, by torch on the same addresses."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def _at(self, address: int, rows: int, columns: int) -> torch.Tensor:
        size = rows * columns * 2
        memory = (ctypes.c_char * size).from_address(address)
        return torch.frombuffer(memory, dtype=self.dtype).view(rows, columns)

    def product(self, shape: Any, x: int, weight: int, bias: int, out: int, stream: Any) -> None:
        del stream
        assert shape.dtype == shape.out_dtype
        rows = (shape.k, shape.n) if shape.transposed else (shape.n, shape.k)
        w = self._at(weight, *rows).float()
        result = self._at(x, shape.m, shape.k).float() @ (w if shape.transposed else w.T)
        if bias:
            result += self._at(bias, 1, shape.n).float()
        self._at(out, shape.m, shape.n).copy_(result)


@dataclass
class StepDriver:
    """Runs requests through a model's launch list; pages of a lane lie in a scattered order."""

    kernels: EmulatedHarness
    model: CudaModel
    segmented: SegmentedModel
    plan: Any
    monkeypatch: pytest.MonkeyPatch
    launch: int = 0
    names: set[str] = field(default_factory=set)  # kernels that ran

    def __post_init__(self) -> None:
        kernels, plan, launches = self.kernels, self.plan, self.model.launches
        rows = plan.max_batch + 1
        sizes = dict.fromkeys(_INPUTS, rows) | dict.fromkeys(_INPUTS[:3], plan.max_step_tokens)

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return kernels.place(torch.zeros(count, dtype=dtype))

        self.step = {name: zeros(size) for name, size in sizes.items()}
        table = torch.zeros(rows, plan.max_pages_per_lane, dtype=torch.int32)
        for lane in range(plan.max_batch):
            for page in range(plan.max_pages_per_lane):
                table[lane, page] = 1 + page * plan.max_batch + lane
        self.step["page_table"] = kernels.place(table)
        self.step["sampling"] = zeros(rows * 64, torch.uint8)
        self.step["state"] = zeros(8, torch.int64)
        addresses = StepAddresses(
            **{name: tensor.data_ptr() for name, tensor in self.step.items()},
            sampled_logprobs=0,
            max_step_tokens=plan.max_step_tokens,
            max_batch=plan.max_batch,
            max_pages_per_lane=plan.max_pages_per_lane,
            page_size_tokens=plan.page_size_tokens,
        )
        self.weights = [
            kernels.place(torch.from_numpy(read_weight(w).view("int16")).view(kernels.dtype))
            for w in self.segmented.weights.values()
        ]
        num_pages = 1 + plan.max_batch * plan.max_pages_per_lane
        self.kv = [
            kernels.poisoned(num_pages, 2, heads, plan.page_size_tokens, dim)
            for heads, dim in launches["kv_layers"]
        ]
        self.arena = kernels.poisoned(launches["arena_bytes"] // 2)
        self.monkeypatch.setattr(cuda_steps, "launch", self._launch)
        self.monkeypatch.setattr(cuda_steps, "DeviceBuffer", self._buffer)
        self.steps = CudaSteps(
            launches,
            kernels.kernels,
            _Products(kernels.dtype),  # type: ignore[arg-type]
            ModelAddresses(
                arena=self.arena.data_ptr(),
                weights=tuple(w.data_ptr() for w in self.weights),
                kv_layers=tuple(kv.data_ptr() for kv in self.kv),
            ),
            addresses,
            plan.keys,
        )

    def _launch(self, item: Any, stream: Any) -> None:
        del stream
        self.names.add(item.function.name)
        self.kernels.run([item])

    def _buffer(self, num_bytes: int, what: str) -> Any:
        del what
        tensor = self.kernels.place(torch.zeros(max(num_bytes, 1), dtype=torch.uint8))

        class Scratch:
            address = tensor.data_ptr()

            def fill(self, byte: int) -> None:
                tensor.fill_(byte)

        return Scratch()

    def logits(self, num_rows: int) -> torch.Tensor:
        """Return the logits of the rows of the last step."""
        entry = next(e for e in self.model.launches["steps"] if e["op"] == "sample")
        vocab_size, half = self.model.launches["vocab_size"], entry["dtype"] != "fp32"
        kind = self.kernels.dtype if half else torch.float32
        begin = entry["logits"][1]
        size = num_rows * vocab_size * (2 if half else 4)
        inside = self.arena.view(torch.uint8)[begin : begin + size]
        return inside.view(kind).view(num_rows, vocab_size).float()

    def run(self, key: GraphKey, requests: list[Request]) -> list[int]:
        """Feed every request's unseen tokens; return what its row samples."""
        step, token = self.step, 0
        for name in _INPUTS:
            step[name].zero_()
        step["token_row"].fill_(-1)
        step["row_lane"].fill_(self.plan.max_batch)
        step["sampling"].zero_()
        for row, request in enumerate(requests):
            step["row_query_start"][row] = token
            for position in range(request.done, len(request.tokens)):
                step["input_ids"][token] = request.tokens[position]
                step["positions"][token] = position
                step["token_row"][token] = row
                token += 1
            request.done = len(request.tokens)
            step["row_kv_len"][row] = request.done
            step["row_lane"][row] = request.lane
            step["sample_token"][row] = token - 1
            raw = bytes(SamplingParams(flags=1, top_p=1.0))
            step["sampling"][row * 64 : row * 64 + 64] = torch.tensor(list(raw), dtype=torch.uint8)
        step["row_query_start"][len(requests) :] = token
        self.launch += 1
        step["state"][1] = self.launch
        self.arena.fill_(float("nan"))
        self.steps.enqueue(key, None)  # type: ignore[arg-type]
        assert int(step["state"][0]) == self.launch
        return [int(x) for x in step["sampled_ids"][: len(requests)]]
