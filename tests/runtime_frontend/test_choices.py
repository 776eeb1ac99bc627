"""n, logprobs, echo, min_tokens and usage in every chunk: through HTTP, against the fake owner.

Its logprobs are a function of the token (fake_owner.cc); its answer is the prompt.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import pytest

from blinkc import abi

from .fake_server import Server, _native, wait_for

FEATURES = (
    _native.SAMPLER_TOP_K | _native.SAMPLER_TOP_P | _native.SAMPLER_MIN_P
    | _native.SAMPLER_PENALTIES | _native.SAMPLER_LOGIT_BIAS | _native.SAMPLER_LOGPROBS
    | _native.SAMPLER_MIN_TOKENS
)  # fmt: skip
SIZES = {"output_record_bytes": 64, "sampler_features": FEATURES, "num_slots": 16}


@pytest.fixture(scope="module")
def full(make_server: Callable[..., Server]) -> Server:
    """A server whose sampler has everything."""
    return make_server(sizes=SIZES)


def stream_of(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def chat(server: Server, text: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return server.http.post("/v1/chat/completions", json=body)


def own_logprob(token: int) -> float:
    return -0.5 - token / 64


# ---- what reaches the ring


def requests_in_ring(server: Server, prompt: str) -> list[Any]:
    """Return the requests with this prompt that the ring's areas still hold, by slot."""
    header = abi.structs()["blink_ring_header"].from_address(server.ring.address)
    found = []
    for slot in range(header.num_slots):
        at = header.request_offset + slot * abi.size_of("blink_slot_request")
        request = abi.structs()["blink_slot_request"].from_address(server.ring.address + at)
        at = server.ring.address + header.prompt_offset + slot * header.max_prompt_tokens * 4
        ids = (ctypes.c_uint32 * request.num_prompt_tokens).from_address(at)
        if list(ids) == list(prompt.encode()):
            found.append(request)
    return found


def test_every_field_reaches_the_ring(full: Server) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.125, "seed": 77,
        "presence_penalty": 0.5, "frequency_penalty": -1.5, "repetition_penalty": 1.25,
        "logit_bias": {"5": 2.5, "7": 0, "9": -100}, "min_tokens": 3, "logprobs": 4,
        "max_tokens": 9,
    }  # fmt: skip
    assert full.complete("fields", **fields).status_code == 200
    (request,) = requests_in_ring(full, "fields")
    assert request.seed == 77 and request.top_k == 20 and request.max_output_tokens == 9
    floats = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    for name in (*floats, "repetition_penalty"):
        assert getattr(request, name) == fields[name], name
    assert request.num_logprobs == 5 and request.min_output_tokens == 3
    assert request.num_logit_bias == 2
    assert list(request.logit_bias_ids[:2]) == [5, 9]
    assert list(request.logit_bias_values[:2]) == [2.5, -100]
    assert full.complete("plain").status_code == 200
    (request,) = requests_in_ring(full, "plain")
    assert request.num_logprobs == request.num_logit_bias == request.min_output_tokens == 0
    assert (request.presence_penalty, request.repetition_penalty) == (0, 1)


def test_too_many_biases(full: Server) -> None:
    bias = {str(i): 1 for i in range(33)}
    response = full.complete("x", logit_bias=bias)
    assert response.status_code == 400 and response.json()["error"]["param"] == "logit_bias"


def test_what_the_target_lacks_is_named(make_server: Callable[..., Server]) -> None:
    server = make_server(target_name="sm_90a")
    cases: list[tuple[str, Any]] = [
        ("min_p", 0.1), ("presence_penalty", 1), ("frequency_penalty", 1), ("logprobs", 1),
        ("repetition_penalty", 2), ("logit_bias", {"1": 1}), ("min_tokens", 1),
    ]  # fmt: skip
    for name, value in cases:
        response = server.complete("x", **{name: value})
        assert response.status_code == 400, name
        error = response.json()["error"]
        assert error["param"] == name and "sm_90a" in error["message"]
        assert error["code"] == "unsupported_parameter"
    # Without stop tokens any sampler honours it.
    assert server.complete("x", min_tokens=3, max_tokens=5, ignore_eos=True).status_code == 200


# ---- n


@pytest.mark.parametrize("num_choices", [2, 8])
def test_choices_are_requests_with_seeds_in_a_row(full: Server, num_choices: int) -> None:
    prompt = f"choices {num_choices}"
    answer = full.complete(prompt, n=num_choices, seed=2**64 - 1).json()
    assert [c["index"] for c in answer["choices"]] == list(range(num_choices))
    assert {c["text"] for c in answer["choices"]} == {prompt}
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == num_choices * (len(prompt) + 1)
    seeds = {request.seed for request in requests_in_ring(full, prompt)}
    assert seeds == {(2**64 - 1 + i) % 2**64 for i in range(num_choices)}
    full.wait_until_empty()


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_streamed_choices_carry_their_index(full: Server, path: str) -> None:
    fields = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    if path == "chat":
        chunks = stream_of(chat(full, "héllo", **fields))
    else:
        chunks = stream_of(full.complete("héllo", **fields))
    texts, reasons, roles = [""] * 3, [[], [], []], [[], [], []]  # type: ignore[var-annotated]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        delta = choice.get("delta", {})
        texts[choice["index"]] += delta.get("content", "") if path == "chat" else choice["text"]
        reasons[choice["index"]].append(choice["finish_reason"])
        roles[choice["index"]].append(delta.get("role"))
        assert chunk["usage"] is None
    assert texts == ["héllo"] * 3
    for of_choice in reasons:
        assert of_choice[-1] == "stop" and set(of_choice[:-1]) == {None}
    if path == "chat":
        assert all(r[0] == "assistant" and set(r[1:]) == {None} for r in roles)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3 * (len("héllo".encode()) + 1)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_all_slots_or_none(make_server: Callable[..., Server]) -> None:
    """Guards against a request that keeps some slots while it waits for others: 429 instead."""
    server = make_server(sizes={**SIZES, "num_slots": 4}, owner={"token_interval_us": 200_000})
    body = {"prompt": "x", "max_tokens": 1900, "n": 2, "stream": True, "ignore_eos": True}  # 380 s
    with server.http.stream("POST", "/v1/completions", json=body) as running:
        assert running.status_code == 200
        next(running.iter_lines())
        response = server.complete("y", n=3)
        assert response.status_code == 429 and response.headers["retry-after"]
        assert server.complete("y", n=2).status_code == 200
        response = server.complete("y", n=5)  # never
        assert response.status_code == 400 and response.json()["error"]["param"] == "n"
    server.wait_until_empty()  # the client went away: both choices end
    assert server.complete("y", n=4).status_code == 200


def test_one_choice_fails_them_all(full: Server) -> None:
    response = full.complete("ab<nan>", n=3)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "nan_logits"
    full.wait_until_empty()
    text = full.complete("ab<nan>", n=3, stream=True).text
    assert text.count('"error"') == 1 and text.count("[DONE]") == 1
    full.wait_until_empty()
    wait_for(lambda: full.front_end.stats()["requests_running"] == 0, "all choices to end")


def test_stop_strings_end_each_choice(full: Server) -> None:
    answer = full.complete("one two three", n=2, stop=" t").json()
    assert [c["text"] for c in answer["choices"]] == ["one"] * 2
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop"] * 2
    full.wait_until_empty()


# ---- logprobs


def test_completion_logprobs(full: Server) -> None:
    found = full.complete("az!", logprobs=2).json()["choices"][0]
    logprobs = found["logprobs"]
    assert logprobs["tokens"] == ["a", "z", "!"]
    assert logprobs["token_logprobs"] == [own_logprob(ord(c)) for c in "az!"]
    assert logprobs["text_offset"] == [0, 1, 2]
    first, second, third = logprobs["top_logprobs"]
    assert first == {"a": own_logprob(97), "b": own_logprob(97) - 0.25}
    # The chosen one is there even if it is not among the likeliest.
    assert second == {"{": own_logprob(122), "|": own_logprob(122) - 0.25, "z": own_logprob(122)}
    assert list(third) == ["!", '"']
    none = full.complete("a", logprobs=0).json()["choices"][0]["logprobs"]
    assert none["top_logprobs"] == [{"a": own_logprob(97)}]
    assert full.complete("a").json()["choices"][0]["logprobs"] is None


def test_chat_logprobs(full: Server) -> None:
    (choice,) = chat(full, 'a"', logprobs=True, top_logprobs=1).json()["choices"]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": c,
                "logprob": own_logprob(ord(c)),
                "bytes": [ord(c)],
                "top_logprobs": [{"token": c, "logprob": own_logprob(ord(c)), "bytes": [ord(c)]}],
            }
            for c in 'a"'
        ],
        "refusal": None,
    }
    (choice,) = chat(full, "a", logprobs=True).json()["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_tokens_that_are_parts_of_a_code_point(full: Server) -> None:
    """An offset counts code points of the text; a part of one begins where the whole will."""
    text = "é😀x"
    logprobs = full.complete(text, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 1, 2]
    assert logprobs["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    content = chat(full, text, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for token in content for b in token["bytes"]).decode() == text
    assert content[0]["token"] == "\\xc3" and content[-1]["token"] == "x"


@pytest.mark.parametrize("stop", [None, "lo w"])
def test_streamed_logprobs_equal_the_whole_answers(full: Server, stop: str | None) -> None:
    """Also where a stop string is held back: its tokens are not told, the others all are."""
    text = "hello 😀 world, lo lo we"
    fields: dict[str, Any] = {"logprobs": 2, "stop": stop}
    whole = full.complete(text, **fields).json()["choices"][0]
    chunks = stream_of(full.complete(text, stream=True, **fields))
    streamed: dict[str, list[Any]] = {}
    shown = ""
    for chunk in chunks:
        choice = chunk["choices"][0]
        shown += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            streamed.setdefault(name, []).extend(values)
    assert shown == whole["text"] == (text if stop is None else "hello 😀 world, lo ")
    assert streamed == whole["logprobs"]
    offsets = whole["logprobs"]["text_offset"]
    for token, offset in zip(whole["logprobs"]["tokens"], offsets, strict=True):
        assert token.startswith("bytes:") or whole["text"][offset:].startswith(token)
    assert len(offsets) == len(shown.encode())

    whole = chat(full, text, stop=stop, logprobs=True, top_logprobs=3).json()["choices"][0]
    chunks = stream_of(chat(full, text, stop=stop, logprobs=True, top_logprobs=3, stream=True))
    content = [
        token
        for chunk in chunks
        for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert content == whole["logprobs"]["content"]


def test_logprobs_of_each_choice(full: Server) -> None:
    answer = full.complete("abc", n=2, logprobs=1).json()
    first, second = (choice["logprobs"] for choice in answer["choices"])
    assert first == second and first["tokens"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"logprobs": 6}, "logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/v1/completions", {"logprobs": 1, "echo": True}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 3}, "logprobs"),
    ],
)
def test_logprobs_that_cannot_be(
    full: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    message = {"role": "user", "content": "x"}
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": [message]}
    response = full.http.post(path, json={**prompt, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


# ---- echo, min_tokens, usage


@pytest.mark.parametrize("prompt", ["Grüße", list("Grüße".encode())])
def test_echo(full: Server, prompt: Any) -> None:
    answer = full.complete(prompt, echo=True, max_tokens=2, n=2).json()
    assert [c["text"] for c in answer["choices"]] == ["GrüßeGr"] * 2
    assert answer["usage"]["completion_tokens"] == 4
    chunks = stream_of(full.complete(prompt, echo=True, max_tokens=2, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "GrüßeGr"
    # Stop strings are looked for in the answer only.
    assert full.complete(prompt, echo=True, stop="üß").json()["choices"][0]["text"] == "GrüßeGr"


def test_min_tokens_puts_stop_strings_off(full: Server) -> None:
    text = "a.b.c.d."
    answer = full.complete(text, stop=".", min_tokens=5).json()["choices"][0]
    assert answer["text"] == "a.b.c" and answer["finish_reason"] == "stop"
    response = full.complete(text, min_tokens=9, max_tokens=8)
    assert response.status_code == 400 and response.json()["error"]["param"] == "min_tokens"
    response = full.complete(text, min_tokens=17, max_tokens=None)  # 16 where none is given
    assert response.status_code == 400 and response.json()["error"]["param"] == "min_tokens"


def test_usage_in_every_chunk(full: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for n in (1, 2):
        response = full.complete("abcd", stream=True, stream_options=options, n=n)
        counts = [chunk["usage"]["completion_tokens"] for chunk in stream_of(response)]
        assert counts[-1] == 5 * n and counts == sorted(counts) and counts[0] >= 1
