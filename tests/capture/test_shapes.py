"""The grammar of --shapes: what it means, and errors that point at the character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkc.capture.grid import MAX_KEYS, GraphKey, Limits, build_grid, plan_keys
from blinkc.capture.shapes import ShapesError, parse_shapes
from blinkc.errors import BlinkError

LIMITS = Limits(max_batch=32, max_seqlen=8192, max_prefill_tokens=2048, max_prefill_batch=8)


def keys_of(text: str, kind: str, limits: Limits = LIMITS) -> set[tuple[int, int]]:
    keys = plan_keys(parse_shapes(text), limits, on_gpu=True)
    return {(key.batch, key.seqlen) for key in keys[kind]}  # type: ignore[index]


def test_range_holds_both_ends_and_every_step() -> None:
    found = keys_of("decode:1..10+4@64..1000x2", "decode")
    assert found == {(b, s) for b in (1, 5, 9, 10) for s in (64, 128, 256, 512, 1000)} | {
        (32, 8192)
    }  # the corner catches the rest


def test_clauses_of_one_kind_are_united_and_the_other_kind_is_auto() -> None:
    found = keys_of("decode:1@64/decode:2,4@128", "decode")
    assert found == {(1, 64), (2, 128), (4, 128), (32, 8192)}
    assert keys_of("decode:1@64", "prefill") == keys_of("auto", "prefill")


def test_max_kilo_and_spaces() -> None:
    assert keys_of(" prefill : 1..max x2 @ 1k , max ", "prefill") == {
        (b, s) for b in (1, 2, 4, 8) for s in (1024, 2048)
    }
    assert keys_of("decode:2@1k..4kx2", "decode") == {
        (2, 1024), (2, 2048), (2, 4096), (32, 8192),
    }  # fmt: skip


def test_prefill_drops_keys_with_fewer_tokens_than_prompts() -> None:
    assert keys_of("prefill:1..4@2", "prefill") == {(1, 2), (2, 2), (8, 2048)}


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("prefil:1@2", 0, 'found "prefil"'),
        ("decode1@2", 6, 'expected ":"'),
        ("decode:1..@2", 10, 'found "@"'),
        ("decode:1", 8, 'expected "@"'),
        ("decode:8..1@64", 10, "upwards"),
        ("decode:1..8x1@64", 12, "at least 2"),
        ("decode:1..8x@64", 12, "factor"),
        ("decode:1..8+@64", 12, "step"),
        ("auto/", 4, "end of the spec"),
        ("decode:1@64/", 12, "the end"),
        ("", 0, "the end"),
        ("decode:0@64", 7, "from 1"),
        ("decode:1@99999999999999999999", 9, "from 1"),
        ("decode:1@64;prefill:auto", 11, "unexpected ';'"),
        ("decode:1@64\u00e9", 11, "unexpected"),
        ("decode:max..4@64", 12, "upwards"),
        ("decode:1,,2@64", 9, 'found ","'),
    ],
)
def test_bad_spec_points_at_the_character(text: str, column: int, words: str) -> None:
    with pytest.raises(ShapesError) as caught:
        parse_shapes(text)
    error = caught.value
    assert error.column == column
    assert words in error.problem
    line, caret = error.message.splitlines()[1:3]
    assert caret.index("^") - 2 == column
    assert line.strip() == text.strip()


def test_caret_stays_under_the_place_in_a_long_spec() -> None:
    text = "decode:" + ",".join(str(n) for n in range(1, 200)) + "@64;"
    with pytest.raises(ShapesError) as caught:
        parse_shapes(text)
    line, caret = caught.value.message.splitlines()[1:3]
    assert line[caret.index("^")] == ";"
    assert len(line) < 100


@pytest.mark.parametrize(
    ("text", "column", "option"),
    [
        ("decode:1..64@64", 10, "--max-batch 32"),
        ("decode:1@64,9k", 12, "--max-seqlen 8192"),
        ("prefill:1@4k", 10, "--max-prefill-tokens 2048"),
    ],
)
def test_size_over_its_limit_points_at_it(text: str, column: int, option: str) -> None:
    with pytest.raises(ShapesError) as caught:
        plan_keys(parse_shapes(text), LIMITS, on_gpu=True)
    assert caught.value.column == column
    assert option in caught.value.problem


def test_too_many_keys_are_refused_with_their_number() -> None:
    with pytest.raises(BlinkError, match=str(MAX_KEYS)):
        plan_keys(parse_shapes("decode:1..32@1..1000"), LIMITS, on_gpu=True)
    with pytest.raises(ShapesError):  # and without making them first
        plan_keys(parse_shapes("decode:1..32@1..8192"), LIMITS, on_gpu=True)


@given(st.text(alphabet="decodprfilautmxk:@/,.+ 0123456789;", max_size=60))
def test_any_text_parses_or_points_inside_itself(text: str) -> None:
    try:
        parse_shapes(text)
    except ShapesError as error:
        assert 0 <= error.column <= len(text)


SIZES = st.integers(1, 300)
RANGES = st.builds(
    lambda first, more, step, mark: f"{first}..{first + more}{mark}{step}",
    SIZES, SIZES, st.integers(2, 40), st.sampled_from("+x"),
)  # fmt: skip
AXES = st.lists(SIZES.map(str) | RANGES, min_size=1, max_size=3).map(",".join)
CLAUSES = st.tuples(st.sampled_from(("prefill", "decode")), AXES, AXES).map(
    lambda c: f"{c[0]}:{c[1]}@{c[2]}"
)


@given(st.lists(CLAUSES, min_size=1, max_size=3).map("/".join), st.data())
def test_table_gives_the_smallest_key_that_fits(text: str, data: st.DataObject) -> None:
    limits = Limits(max_batch=700, max_seqlen=2000, max_prefill_tokens=1500, max_prefill_batch=700)
    try:
        keys = plan_keys(parse_shapes(text), limits, on_gpu=False)
    except BlinkError as error:
        assert "graphs" in error.message or "keys" in error.message
        return
    every = keys["prefill"] + keys["decode"]
    for kind, first in (("prefill", 0), ("decode", len(keys["prefill"]))):
        grid = build_grid(kind, keys[kind], first)  # type: ignore[arg-type, index]
        batch = data.draw(st.integers(1, limits.of_axis(kind, "batch")))  # type: ignore[arg-type]
        seqlen = data.draw(st.integers(1, limits.of_axis(kind, "seqlen")))  # type: ignore[arg-type]
        found = every[grid.look_up(batch, seqlen)]
        fitting = [k for k in every if k.kind == kind and k.batch >= batch and k.seqlen >= seqlen]

        def cost(key: GraphKey) -> tuple[int, int]:
            pair = (key.batch, key.seqlen)
            return pair if key.kind == "decode" else pair[::-1]

        assert found == min(fitting, key=cost)


def test_every_bucket_edge_is_exact() -> None:
    """n - 1, n and n + 1 around each bucket: the bucket itself, then the next one."""
    keys = plan_keys(parse_shapes("auto"), LIMITS, on_gpu=True)
    grid = build_grid("decode", keys["decode"], 0)
    edges = grid.seqlen_buckets
    for position, edge in enumerate(edges):
        assert keys["decode"][grid.look_up(3, edge)] == GraphKey("decode", 3, edge)
        assert keys["decode"][grid.look_up(3, edge - 1)].seqlen == edge
        if position + 1 < len(edges):
            assert keys["decode"][grid.look_up(3, edge + 1)].seqlen == edges[position + 1]
    assert keys["decode"][grid.look_up(33, 9000)] == GraphKey("decode", 32, 8192)


@given(st.integers(1, 512), st.integers(2, 1 << 17), st.integers(1, 16384), st.booleans())
def test_auto_stays_dense_and_bounded(
    max_batch: int, max_seqlen: int, max_prefill: int, on_gpu: bool
) -> None:
    limits = Limits(
        max_batch=max_batch,
        max_seqlen=max_seqlen,
        max_prefill_tokens=max_prefill,
        max_prefill_batch=min(16, max_batch, max_prefill),
    )
    keys = plan_keys(parse_shapes("auto"), limits, on_gpu=on_gpu)
    total = len(keys["prefill"]) + len(keys["decode"])
    assert 2 <= total <= (1600 if on_gpu else 200)
    assert keys["decode"][-1] == GraphKey("decode", max_batch, max_seqlen)
    assert keys["prefill"][-1].seqlen == max_prefill


@pytest.mark.parametrize("max_batch", [32, 64, 128, 256])
def test_auto_on_a_gpu_is_dense(max_batch: int) -> None:
    limits = Limits(
        max_batch=max_batch, max_seqlen=8192, max_prefill_tokens=2048, max_prefill_batch=16
    )
    keys = plan_keys(parse_shapes("auto"), limits, on_gpu=True)
    assert 650 <= len(keys["prefill"]) + len(keys["decode"]) <= 1000
