"""Rendered row kernels on the emulated device: every kind of statement against torch."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_uint64

import pytest

from blink_runtime.cuda_graphs import Launch
from blinkc.engine.cuda_rows import CudaRowKernel, render_cuda_row_kernel
from blinkc.engine.program import (
    Apply,
    Const,
    Index,
    Load,
    Map,
    Reduce,
    Scan,
    Statement,
    Store,
    Temporary,
    TopK,
    Var,
)
from tests.emulation.harness import EmulatedHarness
from tests.emulation.module import EmulatedModule
from tests.engine.test_cuda_engine import at, make_program

torch = pytest.importorskip("torch")

X = Load("x", at(0, 4096), "bf16")
ROWS = 5


def to_y(position: int, extent: int, coefficient: int = 1, const: int = 0) -> tuple[Store, ...]:
    return (Store("y", at(position, extent, coefficient, const), "bf16"),)


def fp32(name: str, position: int, extent: int) -> Load:
    return Load(name, at(position, extent), "fp32")


def rows_of(count: int, length: int) -> Load:
    """x[i0 * length + i1]."""
    terms = ((Var(0, count), length), (Var(1, length), 1))
    return Load("x", Index(terms=terms), "bf16")


def reduced(op: str) -> tuple[Statement, ...]:
    """Three reductions over the block, one behind the other, through one scratch."""
    sums = (Store("t", at(0, 3), "fp32"),)
    return (
        Reduce((3,), (1024,), op, rows_of(3, 1024), sums),
        Map((3,), fp32("t", 0, 3), to_y(0, 3)),
    )


def norm() -> tuple[Statement, ...]:
    total = (Store("t", Index(), "fp32"),)
    mean = Apply("div", (Load("t", Index(), "fp32"), Const(4096.0, "fp32")), "fp32")
    scale = Apply("rsqrt", (mean,), "fp32")
    weighted = Apply(
        "mul", (Apply("mul", (X, scale), "fp32"), Load("w", at(0, 4096), "bf16")), "fp32"
    )
    return (
        Reduce((), (4096,), "sum", Apply("mul", (X, X), "fp32"), total),
        Map((4096,), weighted, to_y(0, 4096)),
    )


def swapped() -> tuple[Statement, ...]:
    """Statements that share nothing: several blocks a row."""
    return tuple(
        Map(
            (2048,),
            Load("x", at(0, 2048, const=2048 * h), "bf16"),
            to_y(0, 2048, 1, 2048 * (1 - h)),
        )
        for h in (0, 1)
    )


def odd() -> tuple[Statement, ...]:
    """No vectors; a copy, then a patch over it."""
    return (
        Map((1001,), Load("x", at(0, 1001, 3), "bf16"), to_y(0, 1001, 3)),
        Map((37,), Const(2.5, "fp32"), to_y(0, 37, 6)),
    )


def ranked() -> tuple[Statement, ...]:
    return (TopK((), 300, 7, Load("x", at(0, 300), "bf16"), to_y(0, 7), to_y(0, 7, 1, 7)),)


def summed() -> tuple[Statement, ...]:
    """Running sums of both kinds, inclusive and reversed without the element itself."""
    return tuple(
        Scan((3,), 20, rows_of(3, 20), _scanned(const), exclusive=const > 0, reverse=const > 0)
        for const in (0, 60)
    )


def _scanned(const: int) -> tuple[Store, ...]:
    return (Store("y", Index(const, ((Var(0, 3), 20), (Var(1, 20), 1))), "bf16"),)


def want_reduced(op: str) -> Callable[..., torch.Tensor]:
    def want(x: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
        parts = x[:, :3072].view(ROWS, 3, 1024)
        return parts.sum(-1) if op == "sum" else parts.amax(-1) if op == "max" else parts.amin(-1)

    return want


def want_odd(x: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
    y = torch.full((ROWS, 3003), float("nan"), dtype=torch.float64)
    y[:, ::3] = x[:, :3003:3]
    y[:, : 37 * 6 : 6] = 2.5
    return y


def want_ranked(x: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
    # Largest first, of equals the first, a NaN before all.
    keys = torch.where(torch.isnan(x), torch.inf, x)[:, :300]
    order = keys.sort(stable=True, dim=-1, descending=True).indices[:, :7]
    return torch.cat([x.gather(1, order), order.double()], 1)


def want_summed(x: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
    parts = x[:, :60].view(ROWS, 3, 20)
    back = parts.flip(-1).cumsum(-1).flip(-1) - parts
    return torch.cat([parts.cumsum(-1).view(ROWS, 60), back.view(ROWS, 60)], 1)


CASES: dict[str, tuple[tuple[Statement, ...], Callable[..., torch.Tensor]]] = {
    "sum": (reduced("sum"), want_reduced("sum")),
    "max": (reduced("max"), want_reduced("max")),
    "min": (reduced("min"), want_reduced("min")),
    "norm": (norm(), lambda x, w: x * x.square().mean(-1, keepdim=True).rsqrt() * w),
    "swapped": (swapped(), lambda x, _w: x.roll(2048, 1)),
    "odd": (odd(), want_odd),
    "ranked": (ranked(), want_ranked),
    "summed": (summed(), want_summed),
}


@pytest.fixture(scope="module")
def rendered() -> tuple[dict[str, CudaRowKernel], EmulatedModule]:
    kernels = {}
    for name, (body, _) in CASES.items():
        temporaries = (Temporary(name="t", size=3, dtype="fp32"),)
        kernels[name] = render_cuda_row_kernel(*make_program(body, temporaries), f"rows_{name}")
    sources = "\n".join(kernel.source for kernel in kernels.values())
    head = '#include "blink/device/kernels/row.cuh"\nusing namespace blink::kernels;\n'
    return kernels, EmulatedModule(f'{head}extern "C" {{\n{sources}\n}}\n')


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_statements(
    rendered: tuple[dict[str, CudaRowKernel], EmulatedModule], name: str, seed: int
) -> None:
    kernels, module = rendered
    harness = EmulatedHarness(module, "bf16", num_multiprocessors=1, seed=seed)
    kernel = kernels[name]
    x, w = harness.random(ROWS, 4096), harness.random(4096)
    if name in ("max", "min", "ranked"):
        x[3, 17] = float("nan")  # survives
        x[2, 90:140] = x[2].float().max() + 1  # equals
    y = harness.poisoned(ROWS, 4096)
    buffers = {"x": harness.of_previous(x), "y": y, "w": w}
    item = Launch(
        module.function(kernel.name),  # type: ignore[arg-type]
        (ROWS, kernel.blocks_per_row, 1),
        kernel.threads,
        kernel.shared_bytes,
        tuple(c_uint64(buffers[argument].data_ptr()) for argument in kernel.arguments),
    )
    harness.run([item])
    want = CASES[name][1](x.double(), w.double())
    got = y[:, : want.shape[1]].double()
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    error = (got - want).nan_to_num(0.0).norm() / want.nan_to_num(0.0).norm()
    assert error < 4e-3
    assert torch.isnan(y[:, want.shape[1] :]).all()
