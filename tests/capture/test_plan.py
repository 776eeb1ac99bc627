"""The capture plan: an arena without overlaps, sums that are right, and early refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkc import abi
from blinkc.capture.arena import ALIGNMENT_BYTES, ArenaRequest, plan_arena
from blinkc.capture.host_memory import check_host_memory, host_memory_bytes
from blinkc.capture.plan import plan_from_json, plan_to_json
from blinkc.capture.plan_capture import (
    GIB,
    CaptureConfig,
    ScratchSpec,
    plan_capture,
    plan_from_spec,
)
from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import AttentionSpec, ModelSpec, WeightPart, WeightRef
from blinkc.resources import include_folder
from blinkc.surgery.segments import CutOpCall, SegmentCall, SegmentedModel, ValueSpec

LLAMA_8B = ModelSpec(
    name="llama-8b",
    architecture="LlamaForCausalLM",
    dtype="bf16",
    vocab_size=128256,
    hidden_size=4096,
    max_position_embeddings=8192,
    attention=tuple(
        AttentionSpec(layer=layer, num_q_heads=32, num_kv_heads=8, head_dim=128, scale=0.088)
        for layer in range(32)
    ),
)
LLAMA_8B_BYTES = 16_060_522_496


def two_layers() -> SegmentedModel:
    """Return segment, attention, segment, attention, segment, Sample over values of 4 floats."""
    spec = ModelSpec(
        name="two",
        architecture="x",
        dtype="fp32",
        vocab_size=10,
        hidden_size=4,
        max_position_embeddings=64,
        attention=tuple(
            AttentionSpec(layer=layer, num_q_heads=2, num_kv_heads=1, head_dim=2, scale=1.0)
            for layer in range(2)
        ),
    )
    values = {"input_ids": ValueSpec(name="input_ids", rows="tokens", shape=(), dtype="int64")}
    calls: list[SegmentCall | CutOpCall] = []
    previous: tuple[str, ...] = ("input_ids",)
    for layer in range(2):
        names = tuple(f"{name}{layer}" for name in ("h", "q", "k", "v", "o"))
        for name in names:
            values[name] = ValueSpec(name=name, rows="tokens", shape=(4,), dtype="fp32")
        calls.append(
            SegmentCall(segment=layer, activations=previous, weights=("w",), outputs=names[:4])
        )
        calls.append(
            CutOpCall(
                op="PagedAttention",
                attributes={},
                activations=names[1:4],
                weights=(),
                outputs=names[4:],
            )
        )
        previous = (names[0], names[4])
    values["logits"] = ValueSpec(name="logits", rows="samples", shape=(10,), dtype="fp32")
    calls.append(SegmentCall(segment=2, activations=previous, weights=(), outputs=("logits",)))
    calls.append(
        CutOpCall(op="Sample", attributes={}, activations=("logits",), weights=(), outputs=())
    )
    part = WeightPart(source="random", key="w", shape=(4, 4), dtype="fp32")
    weights = {"w": WeightRef(name="w", shape=(4, 4), dtype="fp32", parts=(part,))}
    return SegmentedModel(
        spec=spec, segments=(), calls=tuple(calls), values=values, weights=weights
    )


REQUESTS = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 10)), max_size=30
).map(
    lambda rows: [
        ArenaRequest(name=f"v{n}", num_bytes=size, first=first, last=first + more)
        for n, (size, first, more) in enumerate(rows)
    ]
)


@given(REQUESTS)
def test_values_that_live_together_never_overlap(requests: list[ArenaRequest]) -> None:
    plan = plan_arena(requests)
    assert plan == plan_arena(reversed(requests))
    for number, a in enumerate(requests):
        start = plan.offsets[a.name]
        assert start % ALIGNMENT_BYTES == 0
        assert start + a.num_bytes <= plan.total_bytes
        for b in requests[:number]:
            if a.first <= b.last and b.first <= a.last:
                other = plan.offsets[b.name]
                assert start + a.num_bytes <= other or other + b.num_bytes <= start
    peak = max(
        (sum(r.num_bytes for r in requests if r.first <= t <= r.last) for t in range(31)), default=0
    )
    assert plan.total_bytes >= peak


def test_layers_reuse_the_arena() -> None:
    config = CaptureConfig(max_batch=4, max_seqlen=64, max_prefill_tokens=64)
    plan = plan_capture(two_layers(), config)
    size = 64 * 4 * 4  # tokens, floats, bytes
    assert set(plan.arena_offsets) == {f"{n}{layer}" for n in "hqkvo" for layer in (0, 1)} | {
        "logits"
    }
    assert plan.arena_bytes < 10 * size  # ten values, of which at most six live together


def test_scratch_of_a_call_overlaps_nothing_that_lives_then() -> None:
    config = CaptureConfig(max_batch=4, max_seqlen=64, max_prefill_tokens=64)
    plan = plan_capture(two_layers(), config, scratch={2: [ScratchSpec("t", "tokens", 9, "fp32")]})
    start = plan.arena_offsets["call2.t"]
    size = 64 * 9 * 4
    for name in ("h0", "o0", "h1", "q1", "k1", "v1"):
        other = plan.arena_offsets[name]
        assert start + size <= other or other + 64 * 4 * 4 <= start


def test_sums_of_an_8b_model() -> None:
    plan = plan_from_spec(LLAMA_8B, CaptureConfig(target="sm_90"), num_weight_bytes=LLAMA_8B_BYTES)
    page_bytes = 32 * 2 * 8 * 16 * 128 * 2  # layers, k and v, heads, tokens, head size, bf16
    assert plan.memory.kv_bytes == (plan.num_kv_pages + 1) * page_bytes
    assert plan.memory.total_bytes <= plan.memory.budget_bytes
    assert plan.num_kv_pages * 16 >= plan.max_seqlen
    assert plan.max_pages_per_lane * 16 >= plan.max_seqlen
    layout = abi.ring_layout(
        num_slots=1024,
        num_front_ends=1,
        max_prompt_tokens=8192,
        max_output_tokens=8192,
        output_record_bytes=8,
        trace_capacity=4096,
    )
    assert plan.memory.ring_bytes == layout.ring_bytes


def test_plan_survives_json() -> None:
    plan = plan_capture(two_layers(), CaptureConfig(max_batch=3, max_seqlen=50))
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == plan


def test_model_too_large_is_said_with_the_sums() -> None:
    with pytest.raises(BlinkError) as caught:
        plan_from_spec(LLAMA_8B, CaptureConfig(target="sm_89"), num_weight_bytes=40 * GIB)
    message = caught.value.message
    assert "too large" in message and "40.000 GiB" in message and "21.600 GiB" in message
    for name in ("weights", "kv pages", "graphs", "scratch", "ring"):
        assert name in message


def test_shapes_too_many_for_the_budget_are_said_with_the_sums() -> None:
    config = CaptureConfig(
        target="sm_90",
        shapes="decode:1..32@128..8192+128",
        memory_budget_bytes=18 * GIB,
    )
    with pytest.raises(BlinkError) as caught:
        plan_from_spec(LLAMA_8B, config, num_weight_bytes=LLAMA_8B_BYTES)
    assert "graphs" in caught.value.message and "does not fit" in caught.value.message


def test_cpu_plan_larger_than_the_machine_is_said_with_the_sums() -> None:
    config = CaptureConfig(max_batch=8, max_seqlen=2048)
    plan = plan_from_spec(LLAMA_8B, config, num_weight_bytes=2 * LLAMA_8B_BYTES)
    check_host_memory(plan, available_bytes=64 * GIB)
    with pytest.raises(BlinkError, match="too large") as caught:
        check_host_memory(plan, available_bytes=24 * GIB)
    assert "29.915 GiB" in caught.value.message
    given = CaptureConfig(max_batch=8, max_seqlen=2048, memory_budget_bytes=64 * GIB)
    plan = plan_from_spec(LLAMA_8B, given, num_weight_bytes=2 * LLAMA_8B_BYTES)
    check_host_memory(plan, available_bytes=24 * GIB)  # it will run elsewhere


def test_container_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert host_memory_bytes(tmp_path) == 1 << 30
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory_bytes(tmp_path) > 1 << 30


@pytest.mark.parametrize(
    ("version", "name"), [("", "memory.max"), ("memory", "memory.limit_in_bytes")]
)
def test_limits_around_the_process_count(tmp_path: Path, version: str, name: str) -> None:
    """The bug: the root's file alone was read, so a service's MemoryMax= was none."""
    membership = tmp_path / "membership"
    membership.write_text("0::/blink.slice/a.service\n4:memory:/blink.slice/a.service\n")
    inner = tmp_path / version / "blink.slice" / "a.service"
    inner.mkdir(parents=True)
    (inner / name).write_text("2147483648\n")
    assert host_memory_bytes(tmp_path, membership) == 2 << 30
    (inner.parent / name).write_text("1073741824\n")
    assert host_memory_bytes(tmp_path, membership) == 1 << 30


def test_auto_makes_fewer_graphs_where_memory_is_short() -> None:
    few, many = (
        plan_from_spec(
            LLAMA_8B,
            CaptureConfig(target="sm_90", memory_budget_bytes=size * GIB, max_seqlen=2048),
            num_weight_bytes=LLAMA_8B_BYTES // 4,
        )
        for size in (6, 60)
    )
    assert len(few.keys) < len(many.keys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_pages": 3, "max_seqlen": 64}, "takes 4 pages"),
        ({"max_seqlen": 65}, "64 positions"),
        ({"max_seqlen": 1}, "at least 2"),
        ({"max_batch": 0}, "--max-batch"),
        ({"num_slots": 1 << 20}, "--num-slots"),
        ({"num_slots": 1, "num_front_ends": 2}, "front end"),
        ({"num_front_ends": 17}, "--num-front-ends"),
        ({"max_seqlen": 32, "shapes": "decode:1@33"}, "over --max-seqlen 32"),
    ],
)
def test_limit_out_of_range_names_the_option(changes: dict[str, int], words: str) -> None:
    with pytest.raises(BlinkError, match=words):
        plan_capture(two_layers(), CaptureConfig(**changes))  # type: ignore[arg-type]


def test_limits_follow_the_spec_when_not_given() -> None:
    config = CaptureConfig(shapes="decode:1..6@16..48+16/prefill:1..3@8..40+8")
    plan = plan_capture(two_layers(), config)
    limits = (plan.max_batch, plan.max_seqlen, plan.max_prefill_tokens, plan.max_prefill_batch)
    assert limits == (6, 48, 40, 3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("target", "logprobs", "lacks"),
    [
        ("cpu", None, ()),
        ("cpu", False, ("LOGPROBS",)),
        ("sm_90a", None, ("LOGPROBS",)),
        ("sm_90,sm_120", True, ()),
        ("sm_89", True, ("PENALTIES", "LOGIT_BIAS", "MIN_TOKENS")),
        ("sm_100,sm_80", None, ("PENALTIES", "LOGIT_BIAS", "MIN_TOKENS", "LOGPROBS")),
    ],
)
def test_features_are_those_of_every_target(
    target: str, logprobs: bool | None, lacks: tuple[str, ...]
) -> None:
    """The front end refuses by these bits what a sampler would ignore."""
    config = CaptureConfig(target=target, logprobs=logprobs)
    bits = {name: abi.constants()[name] for name in abi.constants() if "BLINK_SAMPLER_" in name}
    found = {name for name, bit in bits.items() if not config.sampler_features & bit}
    assert found == {f"BLINK_SAMPLER_{name}" for name in lacks}
    assert config.output_record_bytes == (8 if "LOGPROBS" in lacks else 64)


def test_ring_layout_equals_the_headers(tmp_path: Path) -> None:
    """Guards the one formula that stands in two languages."""
    fields = [
        "front_end_offset", "command_offset", "request_offset", "status_offset", "prompt_offset",
        "output_offset", "trace_offset", "ring_bytes",
    ]  # fmt: skip
    cases = [(1, 1, 1, 1, 8, 1), (7, 3, 100, 33, 64, 16), (4096, 16, 8192, 8192, 8, 4096)]
    prints = "".join(f'printf("%llu ", (unsigned long long)l.{name});' for name in fields)
    calls = "".join(
        f"s = {{{slots}, {fe}, {p}, {o}, {r}, 0, 0, 0, 16, 0, {t}, 0}}; show(s);"
        for slots, fe, p, o, r, t in cases
    )
    source = tmp_path / "layout.cc"
    source.write_text(
        "#include <cstdio>\n#include <blink/abi.hpp>\n"
        "static void show(const blink::RingSizes& s) {"
        f'auto l = blink::ring_layout_from_sizes(s); {prints} puts(""); }}\n'
        f"int main() {{ blink::RingSizes s; {calls} }}\n"
    )
    program = tmp_path / "layout"
    command = ["g++", "-std=c++20", f"-I{include_folder()}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=600)
    lines = subprocess.run(
        [program], capture_output=True, text=True, check=True, timeout=600
    ).stdout.splitlines()
    for line, (slots, fe, prompt, output, record, trace) in zip(lines, cases, strict=True):
        layout = abi.ring_layout(
            num_slots=slots,
            num_front_ends=fe,
            max_prompt_tokens=prompt,
            max_output_tokens=output,
            output_record_bytes=record,
            trace_capacity=trace,
        )
        assert [int(word) for word in line.split()] == [getattr(layout, name) for name in fields]


def test_structs_equal_cffis_reading_of_the_header() -> None:
    cffi = pytest.importorskip("cffi")
    text = (include_folder() / "blink" / "abi.h").read_text()
    builder = cffi.FFI()
    builder.cdef("\n".join(line for line in text.splitlines() if not line.startswith("#")))
    assert len(abi.structs()) == 8
    for name, struct in abi.structs().items():
        assert abi.size_of(name) == builder.sizeof(name)
        for field, _ in struct._fields_:  # type: ignore[misc]
            assert abi.offset_of(name, field) == builder.offsetof(name, field)
    assert abi.constants()["BLINK_MAGIC"].to_bytes(8, "little") == b"BNKRING1"
