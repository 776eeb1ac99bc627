"""What reaches the ring: every field of every request, whatever clients send.

The fake owner takes anything, so what is read here is what the front end alone let through.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkc import abi

from .fake_server import EOS, VOCAB_SIZE, Server, _native

SIZES = {
    "num_slots": 16,
    "max_prompt_tokens": 64,
    "max_output_tokens": 48,
    "max_seqlen": 96,
    "num_kv_pages": 5,  # 80 tokens
    "output_record_bytes": 64,
}
CONSTANTS = abi.constants()
CHECKSUM_BYTES = ctypes.sizeof(ctypes.c_uint64)


@pytest.fixture(scope="module")
def target(make_server: Callable[..., Server]) -> Server:
    features = [value for name, value in vars(_native).items() if name.startswith("SAMPLER_")]
    return make_server(sizes={**SIZES, "sampler_features": sum(features)})


class RequestReader:
    """Reads the requests that were written into the ring since the last look."""

    def __init__(self, server: Server) -> None:
        layout = abi.ring_layout(
            num_slots=SIZES["num_slots"],
            num_front_ends=1,
            max_prompt_tokens=SIZES["max_prompt_tokens"],
            max_output_tokens=SIZES["max_output_tokens"],
            output_record_bytes=SIZES["output_record_bytes"],
            trace_capacity=0,
        )
        kind = abi.structs()["blink_slot_request"]
        address = server.ring.address
        self.requests = (kind * SIZES["num_slots"]).from_address(address + layout.request_offset)
        ids = ctypes.c_uint32 * SIZES["max_prompt_tokens"]
        self.prompts = (ids * SIZES["num_slots"]).from_address(address + layout.prompt_offset)
        self.last_number = max(request.submit_number for request in self.requests)

    def new(self) -> list[tuple[Any, list[int]]]:
        found = [
            (request, list(self.prompts[slot][: min(request.num_prompt_tokens, 64)]))
            for slot, request in enumerate(self.requests)
            if request.submit_number > self.last_number
        ]
        self.last_number = max(request.submit_number for request in self.requests)
        return found


def mixed(x: int) -> int:
    """The mix of the ring's checksum; see abi.h."""
    mask = (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def check(request: Any, prompt: list[int]) -> None:
    words = list(ctypes.cast(ctypes.pointer(request), ctypes.POINTER(ctypes.c_uint32))[0:128])
    words = words[CHECKSUM_BYTES // 4 :] + prompt
    assert request.checksum == sum(mixed(i << 32 | w) for i, w in enumerate(words)) % 2**64
    assert 1 <= request.num_prompt_tokens <= SIZES["max_prompt_tokens"]
    assert 1 <= request.max_output_tokens <= SIZES["max_output_tokens"]
    total = request.num_prompt_tokens + request.max_output_tokens
    assert total <= SIZES["max_seqlen"]
    assert math.ceil(total / 16) <= SIZES["num_kv_pages"]
    assert all(token < VOCAB_SIZE for token in prompt)
    assert request.flags in (0, CONSTANTS["BLINK_REQUEST_IGNORE_EOS"])
    assert 0 <= request.temperature <= 2
    assert 0 < request.top_p <= 1
    assert 0 <= request.min_p <= 1
    assert request.top_k < VOCAB_SIZE
    assert -2 <= request.presence_penalty <= 2
    assert -2 <= request.frequency_penalty <= 2
    assert 0.0099 <= request.repetition_penalty <= 10
    assert request.num_logprobs <= CONSTANTS["BLINK_MAX_TOP_LOGPROBS"] + 1
    assert request.min_output_tokens <= request.max_output_tokens
    stops = request.stop_token_ids[: request.num_stop_token_ids]
    assert request.num_stop_token_ids <= CONSTANTS["BLINK_MAX_STOP_TOKEN_IDS"]
    assert all(token < VOCAB_SIZE for token in stops)
    assert request.flags or EOS in stops
    assert request.num_logit_bias <= CONSTANTS["BLINK_MAX_LOGIT_BIAS"]
    biased = request.logit_bias_ids[: request.num_logit_bias]
    assert all(token < VOCAB_SIZE for token in biased)
    assert len(set(biased)) == len(biased)
    assert all(-100 <= bias <= 100 for bias in request.logit_bias_values)
    # What is not in use is zero.
    assert not any(request.stop_token_ids[request.num_stop_token_ids :])
    assert not any(request.logit_bias_ids[request.num_logit_bias :])
    assert not any(request.reserved) and request.reserved0 == 0


NUMBERS = st.one_of(
    st.integers(-3, 120),
    st.integers(-(2**70), 2**70),
    st.floats(-3, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, 1e308, 2.0000001, 4294967296, 4294967297, 2**63, 2**64 - 1]),
)
JUNK = st.one_of(st.none(), st.booleans(), st.text(max_size=4), st.lists(NUMBERS, max_size=3))
IDS = st.one_of(st.integers(0, VOCAB_SIZE - 1), st.integers(-1, VOCAB_SIZE + 1), NUMBERS)
# Mostly good, so that requests get through with one bad field among good ones.
FIELDS: dict[str, Any] = {
    "max_tokens": st.one_of(st.integers(1, 60), NUMBERS, JUNK),
    "min_tokens": st.one_of(st.integers(0, 20), NUMBERS, JUNK),
    "temperature": st.one_of(st.floats(0, 2), NUMBERS, JUNK),
    "top_p": st.one_of(st.floats(0, 1), NUMBERS, JUNK),
    "min_p": st.one_of(st.floats(0, 1), NUMBERS, JUNK),
    "top_k": st.one_of(st.integers(-1, 400), NUMBERS, JUNK),
    "presence_penalty": st.one_of(st.floats(-2, 2), NUMBERS, JUNK),
    "frequency_penalty": st.one_of(st.floats(-2, 2), NUMBERS, JUNK),
    "repetition_penalty": st.one_of(st.floats(0.01, 10), NUMBERS, JUNK),
    "seed": st.one_of(NUMBERS, JUNK),
    "n": st.one_of(st.integers(1, 3), NUMBERS, JUNK),
    "logprobs": st.one_of(st.integers(0, 5), NUMBERS, JUNK),
    "logit_bias": st.dictionaries(
        IDS.map(str), st.one_of(st.floats(-100, 100), NUMBERS), max_size=40
    ),
    "stop_token_ids": st.lists(IDS, max_size=18),
    "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=18)),
    "ignore_eos": st.one_of(st.booleans(), JUNK),
    "stream": st.booleans(),
}
PROMPTS = st.one_of(
    st.text(alphabet="ab é😀", min_size=1, max_size=40),
    st.lists(st.integers(0, 255), min_size=1, max_size=70),
    st.lists(IDS, max_size=70),
)


@settings(max_examples=400)
@given(prompt=PROMPTS, fields=st.fixed_dictionaries({}, optional=FIELDS))
def test_nothing_unchecked_reaches_the_ring(target: Server, prompt: Any, fields: Any) -> None:
    reader = RequestReader(target)
    body = json.dumps({"prompt": prompt, **fields})
    response = target.http.post("/v1/completions", content=body)
    written = reader.new()
    for request, ids in written:
        check(request, ids)
    if response.status_code == 200 and written:
        request, ids = written[0]
        assert len(written) == fields.get("n", 1) or fields.get("n") is None
        if isinstance(prompt, list):
            assert ids == [int(token) for token in prompt]
        for name in ("temperature", "presence_penalty", "frequency_penalty", "min_p"):
            if fields.get(name) is not None and abs(fields[name]) >= 1e-5:
                assert math.isclose(getattr(request, name), fields[name], rel_tol=1e-6)
    elif response.status_code == 400:
        assert not written
    else:
        # The fake owner's own mischief: NaN tokens fail, and the ring may be full for a moment.
        assert response.status_code in (200, 429, 500), response.text


def test_the_check_sees_bad_requests(target: Server) -> None:
    """The bug: a check that holds for anything."""
    reader = RequestReader(target)
    assert target.complete("abc", max_tokens=5).status_code == 200
    [(request, ids)] = reader.new()
    check(request, ids)
    copy = type(request).from_buffer_copy(request)
    for name, value in (("temperature", math.nan), ("top_k", 300), ("max_output_tokens", 49),
                        ("checksum", 1), ("num_logit_bias", 33), ("flags", 2)):  # fmt: skip
        bad = type(copy).from_buffer_copy(copy)
        setattr(bad, name, value)
        with pytest.raises(AssertionError):
            check(bad, ids)
