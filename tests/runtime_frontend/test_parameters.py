"""Every parameter is honoured, neutral, or refused by name; never ignored in silence."""

from __future__ import annotations

from typing import Any

import pytest

from .fake_server import VOCAB_SIZE, Server

MESSAGES = [{"role": "user", "content": "hi"}]

NEUTRAL: list[tuple[str, Any]] = [
    ("n", 1),
    ("best_of", 1),
    ("echo", False),
    ("suffix", ""),
    ("logprobs", False),
    ("logprobs", None),
    ("top_logprobs", 0),
    ("n", 3),
    ("n", 8.0),
    ("presence_penalty", 0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("logit_bias", {}),
    ("tools", []),
    ("tool_choice", "none"),
    ("tool_choice", "auto"),
    ("parallel_tool_calls", False),
    ("parallel_tool_calls", True),
    ("functions", []),
    ("response_format", {"type": "text"}),
    ("modalities", ["text"]),
    ("service_tier", "auto"),
    ("store", False),
    ("metadata", {"a": "b"}),
    ("user", "someone"),
    ("min_tokens", 0),
    ("anything_at_all", None),
    ("temperature", None),
    ("min_p", 0),
    ("top_k", -1),
    ("top_k", 0),
    ("top_k", 40),
    ("top_p", 0.9),
    ("top_p", 0),
    ("temperature", 0),
    ("temperature", 1e-45),
    ("temperature", 2),
    ("seed", 2**64 - 1),
    ("seed", -5),
    ("stop", []),
    ("stop", None),
    ("max_completion_tokens", 5),
    ("skip_special_tokens", True),
]

REFUSED: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 9),
    ("n", 1.5),
    ("n", True),
    ("best_of", 3),
    ("suffix", "end"),
    ("logprobs", "yes"),
    ("top_logprobs", 2),  # without logprobs
    ("presence_penalty", 0.5),  # this ring's sampler lacks it, and the next ones
    ("frequency_penalty", -1),
    ("repetition_penalty", 1.1),
    ("logit_bias", {"5": 1}),
    ("min_tokens", 2),
    ("presence_penalty", 2.5),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", [5]),
    ("min_tokens", -1),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tool_choice", 1),
    ("tools", 5),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
    ("guided_regex", "a+"),
    ("structured_outputs", {"json": {}}),
    ("reasoning_effort", "high"),
    ("web_search_options", {}),  # a search with the defaults
    ("audio", {}),
    ("modalities", ["text", "audio"]),
    ("no_such_parameter", 1),
    ("Temperature", 1),
    ("guided_json", {}),
    ("min_p", 0.1),  # this ring's sampler lacks it
    ("temperature", "NaN"),
    ("temperature", "0.5"),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", True),
    ("temperature", [1]),
    ("top_p", 1.5),
    ("top_p", -0.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "10"),
    ("max_tokens", 2**40),
    ("max_tokens", 2**64),
    ("model", ""),
    ("model", 5),
    ("seed", "x"),
    ("seed", 2**64),  # more than the ring's field holds
    ("seed", 0.5),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),  # without stream
    ("stop", ""),
    ("stop", ["ok", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", ["x"] * 17),
    ("stop", ["x" * 2000]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", 5),
    ("stop_token_ids", list(range(17))),
    ("stop_token_ids", list(range(16))),  # one too many with the model's own
    ("ignore_eos", "yes"),
]


@pytest.mark.parametrize(("name", "value"), NEUTRAL)
def test_neutral_values_pass(server: Server, name: str, value: Any) -> None:
    body = {"prompt": "hi", "max_tokens": 5, name: value}
    if name == "max_completion_tokens":
        del body["max_tokens"]
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    body = {"messages": MESSAGES, name: value}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("name", "value"), REFUSED)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_other_values_are_refused_by_name(server: Server, path: str, name: str, value: Any) -> None:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": MESSAGES}
    response = server.http.post(path, json={**prompt, name: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == name
    assert name in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e-400x"])
def test_numbers_that_json_does_not_have(server: Server, number: str) -> None:
    body = '{"prompt": "hi", "temperature": %s}' % number  # noqa: UP031
    response = server.http.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400, response.text


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], ["a", "b"], [[1], [2]], 5, {"a": 1}, [1, "a"], ["a", 1], [1.5], [VOCAB_SIZE],
     [-1], [True], [[["a"]]], [None], [{}]],
)  # fmt: skip
def test_prompts_that_cannot_be(server: Server, prompt: Any) -> None:
    response = server.http.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([*MESSAGES, {"role": "user", "content": [5]}], "messages[1].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            "messages[0].content[0].text",
        ),
        ([*MESSAGES, {"role": "assistant", "content": "The", "prefix": True}], "messages"),
    ],
)
def test_messages_that_cannot_be(server: Server, messages: Any, param: str) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_missing_prompt(server: Server, path: str) -> None:
    response = server.http.post(path, json={})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "missing_required_parameter"
    # The other endpoint's prompt is an unknown parameter here.
    other = {"messages": MESSAGES} if path == "/v1/completions" else {"prompt": "x"}
    assert server.http.post(path, json=other).status_code == 400


def test_both_limits_must_agree(server: Server) -> None:
    fields = {"max_tokens": 5, "max_completion_tokens": 6}
    response = server.http.post("/v1/completions", json={"prompt": "x", **fields})
    assert response.status_code == 400
    assert server.complete("x", max_completion_tokens=100).status_code == 200


def test_stream_options(server: Server) -> None:
    for options in ({"include_usage": 1}, {"no_such": True}, 5):
        response = server.complete("x", stream=True, stream_options=options)
        assert response.status_code == 400, response.text
    response = server.complete("x", stream=True, stream_options={"include_usage": False})
    assert response.status_code == 200
    assert "usage" not in response.text


def test_context_length_error_says_the_sums(server: Server) -> None:
    response = server.complete("x" * 2000, max_tokens=100)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    for number in ("2048", "2100", "2000", "100"):
        assert number in error["message"]
    for asked in (2**32, 2**40, 2**63 - 1):
        response = server.complete("x", max_tokens=asked)
        assert response.status_code == 400 and f"{asked} of" in response.json()["error"]["message"]
    assert server.complete("x" * 1948, max_tokens=100).status_code == 200
    assert server.complete("x" * 2048, max_tokens=1).status_code == 400
    assert server.complete("x" * 5000, max_tokens=1).json()["error"]["param"] == "prompt"


def test_request_that_can_never_fit_the_pages(make_server: Any) -> None:
    server = make_server(sizes={"num_kv_pages": 4})  # 64 tokens
    assert server.complete("x" * 32, max_tokens=32).status_code == 200
    response = server.complete("x" * 32, max_tokens=33)
    assert response.status_code == 400
    assert "pages" in response.json()["error"]["message"]
    # Without a limit the answer is cut to what fits, instead of an error.
    body = {"messages": [{"role": "user", "content": "x" * 40}]}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["finish_reason"] == "length"


def test_output_area_limit(make_server: Any) -> None:
    server = make_server(sizes={"max_output_tokens": 10})
    assert server.complete("x" * 50, max_tokens=10).status_code == 200
    response = server.complete("x" * 50, max_tokens=11)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"


def test_model_name(server: Server) -> None:
    assert server.complete("x", model="fake").status_code == 200
    response = server.complete("x", model="other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert server.http.get("/v1/models/fake").json()["id"] == "fake"
    missing = server.http.get("/v1/models/other")
    assert missing.status_code == 404
    assert "'other'" in missing.text and "'fake'" in missing.text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"nul", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"\x00",
     b'{"prompt": "a"} x', b'{"prompt" "a"}', b"[" * 100_000, b'{"a":' * 1000],
)  # fmt: skip
def test_bodies_that_are_not_json(server: Server, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_json"
