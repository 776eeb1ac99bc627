"""The cuda engine without a GPU: what row kernels look like, what is refused, what the loader
chooses."""

from __future__ import annotations

import pytest

from blink_runtime.cuda_kernels import AttentionShape, choose_gemv, share_decode
from blink_runtime.ring_memory import payload_checksum
from blink_runtime.step_buffers import buffer_fields
from blinkc.bundle.golden import payload_checksum as slow_checksum
from blinkc.engine.cuda_row_indices import is_contiguous, mentions, places
from blinkc.engine.cuda_rows import render_cuda_row_kernel
from blinkc.engine.cuda_source import CudaNeeds, render_cuda_source
from blinkc.engine.program import (
    Apply,
    Const,
    FloorDiv,
    Index,
    Load,
    Map,
    Mod,
    Program,
    Reduce,
    RowKernel,
    Store,
    Temporary,
    TopK,
    Value,
    Var,
    Weight,
)
from blinkc.errors import BlinkError


def at(position: int, extent: int, coefficient: int = 1, const: int = 0) -> Index:
    """Index `coefficient * i<position> + const`."""
    return Index(const, ((Var(position, extent), coefficient),))


def make_program(body: tuple, temporaries: tuple[Temporary, ...] = ()) -> tuple[Program, RowKernel]:
    """One row kernel from x to y, both bf16 of 4096, with a weight w."""
    kernel = RowKernel(
        name="rows", rows="tokens", inputs=("x",), outputs=("y",), params=("w",), body=body,
        temporaries=temporaries,
    )  # fmt: skip
    program = Program(
        name="segment", inputs=(Value(name="x", rows="tokens", size=4096, dtype="bf16"),),
        weights=(Weight(name="w", shape=(4096,), dtype="bf16"),),
        outputs=(Value(name="y", rows="tokens", size=4096, dtype="bf16"),), intermediates=(),
        constants=(), kernels=(kernel,),
    )  # fmt: skip
    return program, kernel


X = Load("x", at(0, 4096), "bf16")


def test_norm_is_one_block_with_two_barriers() -> None:
    """A barrier too few is a race, one too many is latency in every layer."""
    square = Apply("mul", (X, X), "fp32")
    scale = Apply("mul", (X, Load("t", Index(), "fp32")), "fp32")
    body = (
        Reduce((), (4096,), "sum", square, (Store("s", Index(), "fp32"),)),
        Map((), Apply("rsqrt", (Load("s", Index(), "fp32"),), "fp32"),
            (Store("t", Index(), "fp32"),)),
        Map((4096,), Apply("mul", (scale, Load("w", at(0, 4096), "bf16")), "fp32"),
            (Store("y", at(0, 4096), "bf16"),)),
    )  # fmt: skip
    temporaries = tuple(Temporary(name=n, size=1, dtype="fp32") for n in ("s", "t"))
    kernel = render_cuda_row_kernel(*make_program(body, temporaries), "norm")
    assert (kernel.threads, kernel.blocks_per_row) == (512, 1)
    assert kernel.source.count("__syncthreads();") == 2
    assert kernel.source.index("let_next_start") < kernel.source.index("prefetch_weight")
    assert kernel.source.index("prefetch_weight") < kernel.source.index("wait_for_previous")
    assert "load_vector<8>" in kernel.source
    assert "store_vector" in kernel.source
    assert kernel.arguments == ("x", "y", "w")


def test_independent_statements_are_spread_over_blocks() -> None:
    halves = tuple(
        Map((2048,), Load("x", at(0, 2048, const=2048 * h), "bf16"),
            (Store("y", at(0, 2048, const=2048 * (1 - h)), "bf16"),))
        for h in (0, 1)
    )  # fmt: skip
    kernel = render_cuda_row_kernel(*make_program(halves), "swap")
    assert kernel.blocks_per_row > 1
    assert "__syncthreads" not in kernel.source


def test_overlapping_writes_keep_their_order() -> None:
    """A scatter over a copy: blocks that share the row out would race."""
    copy = Map((4096,), X, (Store("y", at(0, 4096), "bf16"),))
    patch = Map((8,), Const(0.0, "fp32"), (Store("y", at(0, 8), "bf16"),))
    kernel = render_cuda_row_kernel(*make_program((copy, patch)), "patch")
    assert kernel.blocks_per_row == 1
    assert kernel.source.count("__syncthreads();") == 1


def test_odd_strides_are_not_vectors() -> None:
    every_third = Map(
        (1000,), Load("x", at(0, 1000, 3), "bf16"), (Store("y", at(0, 1000, 3), "bf16"),)
    )
    kernel = render_cuda_row_kernel(*make_program((every_third,)), "third")
    assert "load_vector" not in kernel.source


def test_too_many_candidates_are_refused() -> None:
    top = TopK((), 4096, 8, X, (Store("y", at(0, 8), "bf16"),), ())
    with pytest.raises(BlinkError, match="TopK over 4096"):
        render_cuda_row_kernel(*make_program((top,)), "top")


def test_too_much_shared_memory_is_refused() -> None:
    body = (
        Map((70000,), Const(1.0, "fp32"), (Store("t", at(0, 70000), "fp32"),)),
        Map((4096,), Load("t", at(0, 4096), "fp32"), (Store("y", at(0, 4096), "bf16"),)),
    )
    temporaries = (Temporary(name="t", size=70000, dtype="fp32"),)
    with pytest.raises(BlinkError, match="bytes of shared memory"):
        render_cuda_row_kernel(*make_program(body, temporaries), "large")


def test_indices() -> None:
    i = Var(0, 64)
    halves = Index(
        5, ((FloorDiv(Index(terms=((i, 1),)), 8), 16), (Mod(Index(terms=((i, 1),)), 8), 1))
    )
    assert mentions(halves, 0)
    assert not mentions(halves, 1)
    assert not is_contiguous(halves, 0, 8)
    assert is_contiguous(at(0, 64, 1, 16), 0, 8)
    assert not is_contiguous(at(0, 64, 1, 4), 0, 8)
    assert not is_contiguous(at(0, 64, 2), 0, 8)
    found = places(halves, (64,))
    assert found is not None
    assert found.tolist() == [5 + i // 8 * 16 + i % 8 for i in range(64)]


@pytest.mark.parametrize("heads", [(72, 4), (128, 17)])
def test_unknown_heads_are_refused(heads: tuple[int, int]) -> None:
    needs = CudaNeeds(dtype="bf16", heads=(heads,), logits_dtype="bf16")
    with pytest.raises(BlinkError, match="head size"):
        render_cuda_source(needs)


@pytest.mark.parametrize("batch", [1, 2, 5, 16, 33, 64, 128])
@pytest.mark.parametrize("seqlen", [16, 512, 513, 4096, 131072])
@pytest.mark.parametrize("window", [0, 100, 5000])
def test_splits_reach_every_token(batch: int, seqlen: int, window: int) -> None:
    shape = AttentionShape(num_q_heads=32, num_kv_heads=8, head_dim=128, scale=1.0, window=window)
    share = share_decode(shape, batch, seqlen, 132)
    assert 1 <= share.num_splits <= 64
    assert share.min_split_tokens % 16 == 0
    # The kernel's own arithmetic, for every length of the key.
    for length in {1, 15, seqlen // 2 or 1, seqlen}:
        reach = min(length, window + 15) if window else length
        even = -(-reach // share.num_splits)
        each = max(share.min_split_tokens, (even + 15) // 16 * 16)
        assert share.num_splits * each >= reach


@pytest.mark.parametrize("m", range(1, 17))
@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (6144, 4096), (128, 2048), (128256, 4096)])
def test_streaming_products_take_their_rows(m: int, n: int, k: int) -> None:
    instance = choose_gemv(m, n, k, 132)
    assert instance.max_rows >= m
    # Bytes of shared memory: the ring, two buffers of sums, the activations where they stay there.
    pieces = instance.tiles + (0 if instance.input_shared else instance.row_tiles)
    ring = instance.depth * instance.warps * 512 * pieces
    sums = 2 * instance.warps * instance.tiles * instance.row_tiles * 256
    assert ring + sums + (m * (k + 32) * 2 if instance.input_shared else 0) <= 227 * 1024


def test_step_buffers_follow_the_header() -> None:
    fields = buffer_fields()
    assert next(name for name, pointer in fields if pointer) == "state"
    assert [name for name, pointer in fields if not pointer] == [
        "max_step_tokens", "max_batch", "max_pages_per_lane", "page_size_tokens"
    ]  # fmt: skip
    assert len(fields) == 16


def test_checksums_agree() -> None:
    words = [0, 1, 0xFFFFFFFF, 12345, 7] * 40
    assert payload_checksum(words) == slow_checksum(words)
