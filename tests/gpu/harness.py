"""Kernels on torch tensors: one compiled module, paged step state, float64 references."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from blink_runtime.cuda_driver import Module
from blink_runtime.cuda_graphs import Launch, launch
from blink_runtime.cuda_kernels import CudaKernels, StepAddresses
from blinkc.engine.cuda_source import CudaNeeds, compile_kernels, render_cuda_source
from blinkc.resources import include_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blink_runtime.cuda_driver import Context, Stream

CUBIN_CACHE = Path(__file__).parents[2] / ".cache" / "cubins"
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = tuple((dim, group) for dim in (64, 80, 96, 128, 256) for group in (1, 16))


def kernel_needs(dtype: str) -> CudaNeeds:
    """Everything the kernel tests use, of one dtype."""
    return CudaNeeds(
        dtype=dtype,
        heads=HEADS,
        logits_dtype=dtype,
        activation="silu",
        ids_dtype="int32",
        expert_weights_dtype=dtype,
    )


def cached_cubin(source: str) -> bytes:
    """Compile, or take what an earlier run compiled of the same source and headers."""
    digest = hashlib.sha256(source.encode())
    folder = include_folder()
    shared = [folder / "blink" / name for name in ("abi.h", "step.h")]
    for header in (*shared, *sorted(folder.rglob("kernels/*.cuh"))):
        digest.update(header.read_bytes())
    path = CUBIN_CACHE / f"{digest.hexdigest()[:32]}.cubin"
    if not path.exists():
        image = compile_kernels(source, "sm_90a")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    return path.read_bytes()


class Harness(ABC):
    """Kernels of one dtype and the tensors they are run on: a GPU's, or the emulated device's."""

    dtype: torch.dtype
    device: str
    kernels: CudaKernels

    @abstractmethod
    def run(self, launches: Sequence[Launch]) -> None:
        """Run to the end."""

    @abstractmethod
    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring a tensor to where kernels can reach it."""

    def of_previous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that an earlier kernel of the step writes this; return it."""
        return tensor

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Fresh values of the harness' dtype."""
        values = torch.randn(*shape, device=self.device)
        return self.place((values * scale).to(self.dtype))

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An output full of NaN (or -77 for integers), so that a missed element shows."""
        dtype = dtype or self.dtype
        value = float("nan") if dtype.is_floating_point else -77
        return self.place(torch.full(shape, value, device=self.device, dtype=dtype))


class KernelHarness(Harness):
    """The kernels of one dtype, run on a GPU's tensors."""

    device = "cuda"

    def __init__(self, dtype: str, context: Context, stream: Stream) -> None:
        self.dtype = TORCH_DTYPES[dtype]
        source = render_cuda_source(kernel_needs(dtype))
        self.module = Module(cached_cubin(source), f"kernels of {dtype}")
        self.kernels = CudaKernels(self.module, context.spec)
        self.stream = stream

    def run(self, launches: Sequence[Launch]) -> None:
        """Run to the end; torch's own work is finished first."""
        torch.cuda.synchronize()
        for item in launches:
            launch(item, self.stream)
        self.stream.synchronize()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda()


class PagedStep:
    """Step buffers for rows of given new and total lengths, with KV pages in random places.

    Whatever no row may read is NaN: the sink page, free pages, places past a row's end.
    """

    def __init__(
        self,
        harness: Harness,
        new: Sequence[int],
        total: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        page_size: int = 16,
        padding_rows: int = 0,
        padding_tokens: int = 0,
    ) -> None:
        self.new, self.total, self.page_size = list(new), list(total), page_size
        num_rows = len(self.new)
        self.num_rows, self.num_tokens = num_rows, sum(self.new)
        self.batch = num_rows + padding_rows
        self.max_pages = max(-(-length // page_size) for length in self.total) + 2
        num_pages = 1 + sum(-(-length // page_size) for length in self.total) + 5
        free = (torch.randperm(num_pages - 1) + 1).tolist()
        table = torch.zeros(self.batch + 1, self.max_pages, dtype=torch.int32)
        self.lanes = torch.randperm(self.batch)[:num_rows].tolist()
        for row, length in enumerate(self.total):
            for page in range(-(-length // page_size)):
                table[self.lanes[row], page] = free.pop()
        self.table = table
        starts, rows, positions = [0], [], []
        for row, (count, length) in enumerate(zip(self.new, self.total, strict=True)):
            starts.append(starts[-1] + count)
            rows += [row] * count
            positions += list(range(length - count, length))
        starts += [self.num_tokens] * padding_rows
        rows += [-1] * padding_tokens
        positions += [0] * padding_tokens
        lanes = self.lanes + [self.batch] * padding_rows

        def ints(values: Sequence[int]) -> torch.Tensor:
            return harness.place(torch.tensor(values, dtype=torch.int32))

        self._buffers = {
            "positions": ints(positions),
            "token_row": ints(rows),
            "row_query_start": ints(starts),
            "row_kv_len": ints(self.total + [0] * padding_rows),
            "row_lane": ints(lanes),
            "page_table": harness.place(table),
        }
        self.kv = harness.poisoned(num_pages, 2, num_kv_heads, page_size, head_dim)
        self.k = [harness.random(length, num_kv_heads, head_dim) for length in self.total]
        self.v = [harness.random(length, num_kv_heads, head_dim) for length in self.total]
        for row, length in enumerate(self.total):
            for token in range(length - self.new[row]):
                page, at = divmod(token, page_size)
                place = self.kv[table[self.lanes[row], page], :, :, at]
                place[0], place[1] = self.k[row][token], self.v[row][token]
        pad = harness.poisoned(padding_tokens, num_kv_heads, head_dim)

        def packed(parts: list[torch.Tensor]) -> torch.Tensor:
            new = [x[x.shape[0] - n :] for x, n in zip(parts, self.new, strict=True)]
            return harness.of_previous(harness.place(torch.cat([*new, pad])))

        self.new_k, self.new_v = packed(self.k), packed(self.v)

    def addresses(self, sampling: int = 0, sampled_ids: int = 0) -> StepAddresses:
        """Return the addresses, as the loader would."""
        named = {name: tensor.data_ptr() for name, tensor in self._buffers.items()}
        return StepAddresses(
            state=0,
            input_ids=0,
            sample_token=0,
            sampling=sampling,
            sampled_ids=sampled_ids,
            sampled_logprobs=0,
            max_step_tokens=self.num_tokens,
            max_batch=self.batch,
            max_pages_per_lane=self.max_pages,
            page_size_tokens=self.page_size,
            **named,
        )

    def check_pages(self) -> None:
        """The new tokens are in their pages, and nothing else was written."""
        touched = torch.zeros(self.kv.shape[0], self.page_size, dtype=torch.bool)
        for row, length in enumerate(self.total):
            for token in range(length):
                page, at = divmod(token, self.page_size)
                physical = int(self.table[self.lanes[row], page])
                touched[physical, at] = True
                place = self.kv[physical, :, :, at]
                assert torch.equal(place[0], self.k[row][token])
                assert torch.equal(place[1], self.v[row][token])
        rest = self.kv.permute(0, 3, 1, 2, 4)[~touched.to(self.kv.device)]
        assert torch.isnan(rest).all()


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [n, Hq, d] are the last n of the L tokens of k, v [L, Hkv, d]; float64."""
    n, heads, _ = q.shape
    length = k.shape[0]
    q, k, v = q.double(), k.double(), v.double()
    k = k.repeat_interleave(heads // k.shape[1], dim=1)
    v = v.repeat_interleave(heads // v.shape[1], dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(length - n, length, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    mask = key <= at
    if window:
        mask &= key > at - window
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, n, 1)
        weights = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.einsum("hnl,lhd->nhd", weights, v)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; NaN when anything is NaN."""
    return float((got.double() - want).norm() / want.norm())
