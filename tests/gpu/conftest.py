"""One CUDA context and one compiled module a dtype for all kernel tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blinkc.engine.gpu_here import find_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blink_runtime.cuda_driver import Context, Stream
    from tests.gpu.harness import KernelHarness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU the marked tests are skipped, and counted as such."""
    if find_gpu() is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="CUDA shows no GPU"))


@pytest.fixture(scope="session")
def context() -> Iterator[Context]:
    from blink_runtime.cuda_driver import Context

    torch = pytest.importorskip("torch")
    torch.zeros(1, device="cuda")  # torch's context is the primary one, as ours
    with Context() as made:
        yield made


@pytest.fixture(scope="session")
def stream(context: Context) -> Iterator[Stream]:
    from blink_runtime.cuda_driver import Stream

    made = Stream()
    yield made
    made.close()


@pytest.fixture(scope="session", params=["bf16", "fp16"])
def kernels(request: pytest.FixtureRequest, context: Context, stream: Stream) -> KernelHarness:
    from tests.gpu.harness import KernelHarness

    return KernelHarness(request.param, context, stream)
