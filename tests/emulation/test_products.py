"""Products of few rows on the emulated device, against float64."""

from __future__ import annotations

import pytest

from blinkc.engine.cuda_instances import (
    GEMV_INSTANCES,
    NARROW_INSTANCES,
    GemvInstance,
    NarrowInstance,
)
from tests.emulation.conftest import MakeHarness
from tests.gpu import kernel_checks

DTYPES = ("bf16", "fp16")


GEMV = [
    pytest.param(instance, m, n, k, id=f"{instance.name}-{m}-{n}-{k}")
    for instance in GEMV_INSTANCES
    for m, n, k in (
        (1, 1000, 1024),
        (3, 137, 2080),
        (8, 137, 96),
        (5, 8, 32),
        (16, 264, 1056),
        (11, 72, 5472),
    )
    if kernel_checks.takes(instance, m, k)
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("instance", "m", "n", "k"), GEMV)
def test_gemv(
    emulated: MakeHarness, dtype: str, instance: GemvInstance, m: int, n: int, k: int
) -> None:
    kernel_checks.check_gemv(emulated(dtype), instance, m, n, k)


def test_gemv_rows_do_not_depend_on_each_other(emulated: MakeHarness) -> None:
    kernel_checks.check_gemv_rows_do_not_depend_on_each_other(emulated("bf16"), 128, 1024)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instance", NARROW_INSTANCES, ids=lambda i: i.name)
@pytest.mark.parametrize(("n", "k"), [(1000, 64), (137, 1984), (8, 576), (300, 832)])
def test_narrow(
    emulated: MakeHarness, dtype: str, instance: NarrowInstance, n: int, k: int
) -> None:
    """Every instance at its full and at an odd number of rows."""
    for m in (instance.columns, instance.columns // 2 + 3):
        kernel_checks.check_narrow(emulated(dtype), instance, m, n, k)


@pytest.mark.parametrize("m", [1, 9, 17, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(520, 256), (128, 2048)])
def test_narrow_as_chosen(emulated: MakeHarness, m: int, n: int, k: int) -> None:
    kernel_checks.check_narrow(emulated("bf16"), None, m, n, k)


def test_narrow_rows_do_not_depend_on_each_other(emulated: MakeHarness) -> None:
    kernel_checks.check_narrow_rows_do_not_depend_on_each_other(emulated("bf16"), 256, 1024)
