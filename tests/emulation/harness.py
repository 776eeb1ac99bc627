"""Kernels on the emulated device and the tensors they are run on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from blink_runtime.cuda_kernels import CudaKernels
from tests.gpu.harness import TORCH_DTYPES, Harness

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blink_runtime.cuda_graphs import Launch
    from tests.emulation.module import EmulatedModule

_GUARD_BYTES = 4096  # on both sides of a tensor; NaN in every type
_POISON = 0xFF


class EmulatedHarness(Harness):
    """The kernels of one module, run on the processor's tensors, each between guards."""

    device = "cpu"

    def __init__(
        self, module: EmulatedModule, dtype: str, *, num_multiprocessors: int, seed: int
    ) -> None:
        self.dtype = TORCH_DTYPES[dtype]
        self.module = module
        self.kernels = CudaKernels(module, SimpleNamespace(num_multiprocessors=num_multiprocessors))
        self.seed = seed
        self._memory: dict[int, tuple[torch.Tensor, int]] = {}  # by address: with guards, bytes
        self._of_previous: set[int] = set()
        torch.manual_seed(seed)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        room = -(-size // 256) * 256
        memory = torch.full((room + 2 * _GUARD_BYTES + 256,), _POISON, dtype=torch.uint8)
        begin = -(memory.data_ptr() + _GUARD_BYTES) % 256 + _GUARD_BYTES
        inside = memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        inside.copy_(tensor)
        self._memory[inside.data_ptr()] = (memory, size)
        return inside

    def of_previous(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.data_ptr() in self._memory
        self._of_previous.add(tensor.data_ptr())
        return tensor

    def run(self, launches: Sequence[Launch]) -> None:
        buffers = [
            (address, size, address in self._of_previous)
            for address, (_, size) in self._memory.items()
        ]
        for item in launches:
            self.seed += 1
            self.module.launch(item, buffers, self.seed)
        for address, (memory, size) in self._memory.items():
            begin = address - memory.data_ptr()
            untouched = (memory[:begin] == _POISON).all() and (
                memory[begin + size :] == _POISON
            ).all()
            assert untouched, f"a kernel wrote beside a buffer of {size} bytes"
