"""One layer's experts over a step of tokens: harness, shape, tokens -> buffers and launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blink_runtime.cuda_experts import ExpertsShape, expert_launches, experts_scratch
from tests.gpu.harness import Harness, PagedStep

if TYPE_CHECKING:
    from blink_runtime.cuda_graphs import Launch
    from blink_runtime.cuda_kernels import CudaKernels


class ExpertsStep:
    """Tokens that chose experts at random; the last `padding_tokens` belong to no row."""

    def __init__(
        self, harness: Harness, shape: ExpertsShape, num_tokens: int, padding_tokens: int = 0
    ) -> None:
        self.shape, self.num_tokens = shape, num_tokens
        experts, choices = shape.num_experts, shape.num_choices
        self.x = harness.of_previous(harness.random(num_tokens, shape.hidden_size))
        ids = torch.stack([torch.randperm(experts)[:choices] for _ in range(num_tokens)])
        self.ids = harness.place(ids.to(torch.int32))
        scores = harness.random(num_tokens, choices).float()
        self.weights = harness.place(torch.softmax(scores, -1).to(harness.dtype))
        self.out = harness.poisoned(num_tokens, shape.hidden_size)
        self._scratch = {
            name: harness.poisoned(size // 4 + 4, dtype=torch.int32)
            for name, size in experts_scratch(shape, num_tokens).items()
        }
        count = num_tokens - padding_tokens
        self._paged = PagedStep(harness, [count], [count], 1, 64, padding_tokens=padding_tokens)
        self._addresses = self._paged.addresses()  # the buffers belong to the paged step

    def launches(
        self, kernels: CudaKernels, gate_up: torch.Tensor, down: torch.Tensor
    ) -> list[Launch]:
        """Return the launches that leave the tokens' results in `out`.

        Args:
            kernels: a module with experts.
            gate_up: `[experts, 2 * intermediate, hidden]`.
            down: `[experts, hidden, intermediate]`.
        """
        return expert_launches(
            kernels,
            self._addresses,
            self.shape,
            self.x.data_ptr(),
            self.ids.data_ptr(),
            self.weights.data_ptr(),
            gate_up.data_ptr(),
            down.data_ptr(),
            self.out.data_ptr(),
            {name: tensor.data_ptr() for name, tensor in self._scratch.items()},
            self.num_tokens,
        )
