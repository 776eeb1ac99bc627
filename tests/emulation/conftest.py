"""A module a dtype and target, compiled once, and a harness a test."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator

import pytest

from tests.emulation.harness import EmulatedHarness
from tests.emulation.module import EmulatedModule

MakeHarness = Callable[..., EmulatedHarness]


@functools.cache
def module_of(dtype: str, target: str) -> EmulatedModule:
    from blinkc.engine.cuda_source import render_cuda_source
    from tests.gpu.harness import kernel_needs

    return EmulatedModule(render_cuda_source(kernel_needs(dtype)), target)


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> Iterator[MakeHarness]:
    """Makes a harness whose inputs and order of threads follow from the test's name."""
    torch = pytest.importorskip("torch")

    def make(dtype: str, target: str = "sm_90a", num_multiprocessors: int = 6) -> EmulatedHarness:
        return EmulatedHarness(
            module_of(dtype, target),
            dtype,
            num_multiprocessors=num_multiprocessors,
            seed=zlib.crc32(request.node.name.encode()),
        )

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small
    yield make
    torch.set_num_threads(before)
