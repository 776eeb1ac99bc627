"""The launches of whole steps without a GPU: every kernel gets all the arguments it wants."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from blink_runtime import cuda_steps
from blink_runtime.cuda_graphs import Launch
from blink_runtime.cuda_kernels import CudaKernels, StepAddresses, choose_narrow
from blink_runtime.cuda_steps import CudaSteps, ModelAddresses, pack_weights
from blinkc.capture.grid import GraphKey
from blinkc.engine.cuda_source import CudaNeeds, render_cuda_source

HIDDEN, EXPERTS, INNER = 256, 16, 64
KEYS = (
    GraphKey("prefill", 1, 64),
    GraphKey("prefill", 4, 2048),
    GraphKey("decode", 1, 512),
    GraphKey("decode", 3, 4096),
    GraphKey("decode", 16, 512),
    GraphKey("decode", 64, 1024),
)
NORM = "__global__ void norm(const bf16* x, bf16* y, const bf16* w) {}"


def place(number: int) -> list[Any]:
    return ["arena", number * 1024]


def launch_list() -> dict[str, Any]:
    """One of each operation."""
    attention = {
        "op": "attention", "layer": 0, "q": place(1), "k": place(2), "v": place(3), "out": place(4),
        "sinks": None, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "scale": 0.125,
        "window": 0, "softcap": 0.0,
    }  # fmt: skip
    gemm = {
        "op": "gemm", "rows": "tokens", "x": place(4), "weight": ["weight", 1], "bias": None,
        "out": place(5), "n": HIDDEN, "k": HIDDEN, "layout": "nk", "dtype": "bf16",
        "out_dtype": "bf16",
    }  # fmt: skip
    experts = {
        "op": "experts", "x": place(5), "ids": place(6), "weights": place(7),
        "gate_up": ["weight", 2], "down": ["weight", 3], "out": place(8), "num_experts": EXPERTS,
        "num_choices": 2, "hidden_size": HIDDEN, "intermediate_size": INNER,
    }  # fmt: skip
    rows = {
        "op": "rows", "rows": "tokens", "kernel": "norm", "threads": 64, "blocks_per_row": 3,
        "shared_bytes": 512, "args": [["step", "positions"], place(0), ["weight", 0]],
    }  # fmt: skip
    shapes = ([HIDDEN], [HIDDEN, HIDDEN], [EXPERTS, 2 * INNER, HIDDEN], [EXPERTS, HIDDEN, INNER])
    return {
        "format": cuda_steps.LAUNCH_LIST_FORMAT, "dtype": "bf16", "arena_bytes": 1 << 20,
        "vocab_size": 1000,
        "weights": [{"name": str(i), "shape": s, "dtype": "bf16"} for i, s in enumerate(shapes)],
        "steps": [
            rows, attention, gemm, experts, {"op": "sample", "logits": place(9), "dtype": "bf16"}
        ],
    }  # fmt: skip


class FakeBuffer:
    """Device memory that is none."""

    def __init__(self, num_bytes: int, what: str) -> None:
        self.num_bytes, self.address = num_bytes, 0x1000
        assert num_bytes > 0 or what == "scratch (partial)"

    def fill(self, byte: int = 0) -> None:
        """Do nothing."""


def parameters() -> dict[str, int]:
    """Count the parameters of every kernel of a rendered source."""
    needs = CudaNeeds(
        dtype="bf16", heads=((64, 4),), logits_dtype="bf16", activation="silu", row_kernels=(NORM,)
    )
    found = re.findall(
        r"__global__[^{;]*?void (\w+)\(([^{]*?)\) \{", render_cuda_source(needs), flags=re.DOTALL
    )
    return {name: text.count(",") + 1 for name, text in found}


@pytest.fixture(params=[True, False], ids=["logprobs", "none"])
def has_logprobs(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, has_logprobs: bool) -> tuple[CudaSteps, list[Any]]:
    """Steps over fakes, and the list that collects what they put into the stream."""
    done: list[Any] = []
    monkeypatch.setattr(cuda_steps, "DeviceBuffer", FakeBuffer)
    monkeypatch.setattr(cuda_steps, "launch", lambda item, stream: done.append(item))
    module = SimpleNamespace(
        function=lambda name: SimpleNamespace(name=name), read_uint32=lambda name: 128
    )
    kernels = CudaKernels(module, SimpleNamespace(num_multiprocessors=132))  # type: ignore[arg-type]
    products = SimpleNamespace(product=lambda *a: done.append(a[0]), choose=lambda *a: None)
    names = StepAddresses.__dataclass_fields__
    step = StepAddresses(**{**dict.fromkeys(names, 16), "page_size_tokens": 16})
    if not has_logprobs:
        step = replace(step, sampled_logprobs=0)
    addresses = ModelAddresses(arena=0x100000, weights=(256, 512, 768, 1024), kv_layers=(4096,))
    steps = CudaSteps(launch_list(), kernels, products, addresses, step, KEYS)  # type: ignore[arg-type]
    return steps, done


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_argument_is_there(
    made: tuple[CudaSteps, list[Any]], key: GraphKey, has_logprobs: bool
) -> None:
    steps, done = made
    steps.tune(key, None)  # type: ignore[arg-type]
    steps.enqueue(key, None)  # type: ignore[arg-type]
    wanted = parameters()
    launches = [item for item in done if isinstance(item, Launch)]
    for item in launches:
        assert len(item.args) == wanted[item.function.name], item.function.name
        assert all(0 < size < 65536 for size in item.grid[1:])
        assert 1 <= item.block <= 1024
    names = [item.function.name for item in launches]
    assert names[0] == "norm"
    sampling = ["sample_counts", "sample_rows", *["sample_logprobs"] * has_logprobs]
    assert names[-len(sampling) - 1 :] == [*sampling, "finish_step"]
    rows = key.seqlen if key.kind == "prefill" else key.batch
    assert launches[0].grid[0] == rows
    assert ("append_kv" in names) == (key.kind == "prefill")
    assert ("experts_down_single" in names) == (rows == 1)
    assert any(not isinstance(item, Launch) for item in done) == (rows > 64)  # cuBLASLt


def test_weights_lie_apart() -> None:
    offsets, total = pack_weights(launch_list())
    assert offsets == (0, 512, 512 + HIDDEN * HIDDEN * 2, 512 + HIDDEN * HIDDEN * 2 + 1048576)
    assert total == offsets[-1] + EXPERTS * HIDDEN * INNER * 2


def test_quantized_weights_take_their_bytes() -> None:
    entries = [("fp8", (64, 128)), ("bf16", (64,)), ("uint8", (64, 64)), ("bf16", (64, 2))]
    weights = [{"name": str(n), "dtype": d, "shape": s} for n, (d, s) in enumerate(entries)]
    offsets, total = pack_weights({"weights": weights})
    assert offsets == (0, 8192, 8192 + 256, 8192 + 256 + 4096)
    assert total == offsets[-1] + 256


@pytest.mark.parametrize("m", [1, 9, 16, 17, 33, 64])
def test_products_of_few_rows_share_out_what_there_is(m: int) -> None:
    # Guards: shares of k without a step, clusters that cannot all be placed, rows left out.
    for n, k in ((128, 64), (128, 2048), (4096, 14336), (28672, 4096), (151936, 2048)):
        chosen = choose_narrow(m, n, k, 132)
        blocks = -(-n // chosen.tile) * chosen.splits
        assert chosen.columns >= m
        assert chosen.splits == 1 or k // 64 // chosen.splits >= 4
        assert chosen.splits < 8 or blocks <= 132
        assert chosen.groups == 1 or blocks >= 99
