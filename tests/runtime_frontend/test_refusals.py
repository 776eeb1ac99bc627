"""What a refusal holds: the limit or name that is meant, little of the client's own text, and no
body after HEAD."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .fake_server import Server
from .test_http import exchange, post, split_response

MESSAGE = {"role": "user", "content": "hi"}
LONG = "\x85é" * 1_000_000  # escaped, the first is six bytes
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {LONG: 1}),
        (COMPLETIONS, {"model": LONG}),
        (COMPLETIONS, {"stream": True, "stream_options": {LONG: 1}}),
        (COMPLETIONS, {"logit_bias": {LONG: 1}}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        (CHAT, {"tools": [{"type": LONG}]}),
        (CHAT, {"tool_choice": LONG}),
        (CHAT, {"messages": [{"role": LONG, "content": "x"}]}),
    ],
    ids=["key", "model", "stream option", "logit", "part", "tool", "choice", "role"],
)  # fmt: skip
def test_little_is_quoted(
    make_server: Callable[..., Server], path: str, fields: dict[str, Any]
) -> None:
    """The bug: a body of 8 MiB came back as an answer of 50."""
    template = "{{ raise_exception('no role ' ~ messages[0].role) }}"
    server = make_server(chat_template=template)
    base = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [MESSAGE]}
    answer = server.http.post(path, json={**base, **fields})
    assert 400 <= answer.status_code < 500, answer.text[:1000]
    assert len(answer.content) < 16 * 1024
    assert answer.json()["error"]["message"]


def test_a_quoted_name_is_cut_between_code_points(server: Server) -> None:
    for before in ("", "x", "xy", "xyz"):
        body = {"prompt": "hi", before + "\N{GRINNING FACE}" * 100: 1}
        error = server.http.post(COMPLETIONS, json=body).json()["error"]
        name = error["param"]
        assert name == before + "\N{GRINNING FACE}" * ((128 - len(before)) // 4) + "..."
        assert error["message"] == f"Unknown parameter: '{name}'."


@pytest.mark.parametrize(
    ("first_line", "status"),
    [
        (b"HEAD / HTTP/2.0", 505),
        (b"HEAD /" + b"y" * 20_000 + b" HTTP/1.1", 414),
        (b"HEAD x HTTP/1.1", 400),
        (b"HEAD /x HTTP/1.1", 404),
        (b"HEAD /v1/completions HTTP/1.1", 405),
    ],
)
def test_head_gets_no_body(server: Server, first_line: bytes, status: int) -> None:
    data = exchange(server, first_line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
    seen, headers, body = split_response(data)
    assert (seen, body) == (status, b"")
    assert int(headers["content-length"]) > 0


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limits_are_named_as_they_were_sent(
    server: Server, make_server: Callable[..., Server], name: str
) -> None:
    small = make_server(sizes={"num_kv_pages": 4, "max_output_tokens": 100})
    for asked, amount in ((server, 5000), (small, 101), (small, 90)):
        body = {"prompt": "hi", name: amount}
        error = asked.http.post(COMPLETIONS, json=body).json()["error"]
        assert error["param"] == name
        other = "max_completion_tokens" if name == "max_tokens" else "'max_tokens'"
        assert other not in error["message"]


def test_completions_are_not_told_to_offer_tools(make_server: Callable[..., Server]) -> None:
    server = make_server(chat_template="{{ tools }}{{ messages }}", tool_format="hermes")
    body = {"prompt": "x", "response_format": {"type": "json_object"}}
    refused = server.http.post(COMPLETIONS, json=body)
    assert refused.status_code == 400
    assert "tools" not in refused.text
    tool = {"type": "function", "function": {"name": "f"}}
    for name, value in (("tools", [tool]), ("functions", [tool]), ("tool_choice", "required")):
        error = server.http.post(COMPLETIONS, json={"prompt": "x", name: value}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert "/v1/chat/completions" in error["message"]


def test_an_answer_after_a_long_refusal(server: Server) -> None:
    """The connection goes on, and its memory is not the refusal's."""
    body = json.dumps({"prompt": "hi", "x" * 100_000: 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    data = exchange(server, head + body + post())
    assert data.count(b"HTTP/1.1 400") == 1
    assert data.count(b"HTTP/1.1 200") == 1
