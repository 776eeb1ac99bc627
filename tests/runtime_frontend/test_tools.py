"""Calls of tools through HTTP and OpenAI's client; the fake owner repeats the last message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from .fake_server import Server
from .test_choices import chat, stream_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CITY = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
# Only the last message is shown, so that it alone is answered with; `tools` is mentioned.
TEMPLATE = "{{ messages[-1].content }}{% if tools %}{% endif %}"


@pytest.fixture(scope="module")
def hermes(make_server: Callable[..., Server]) -> Server:
    return make_server(chat_template=TEMPLATE, tool_format="hermes")


@pytest.fixture(scope="module")
def llama3(make_server: Callable[..., Server]) -> Server:
    return make_server(chat_template=TEMPLATE, tool_format="llama3")


def wrap(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def gather(chunks: list[dict[str, Any]]) -> tuple[str, dict[int, dict[str, str]], str]:
    """Put a stream's deltas together as clients do: content, calls by index, finish reason."""
    content, calls, reason = "", {}, ""
    for chunk in chunks:
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(delta["index"], {"arguments": ""})
            call["arguments"] += delta["function"].get("arguments", "")
            for name in ("id", "type"):
                if name in delta:
                    assert name not in call, f"{name} comes once"
                    call[name] = delta[name]
            if "name" in delta["function"]:
                call["name"] = delta["function"]["name"]
        reason = choice["finish_reason"] or reason
    return content, calls, reason


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (wrap(CITY), None, [("get_weather", '{"city": "Köln"}')]),
        ("Let me see.\n" + wrap(CITY), "Let me see.", [("get_weather", '{"city": "Köln"}')]),
        (
            wrap(CITY, '{"name": "now", "arguments": {}}'),
            None,
            [("get_weather", '{"city": "Köln"}'), ("now", "{}")],
        ),
        ("no call <tool_call", "no call <tool_call", []),
        (wrap('{"name": "unknown", "arguments": {}}'),) * 2 + ([],),
        (wrap('{"name": "now", "arguments": {}'),) * 2 + ([],),
    ],
)
def test_calls_streamed_and_not(
    hermes: Server, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    answer = chat(hermes, text, tools=TOOLS).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert message["content"] == content
    found = message.get("tool_calls", [])
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == calls
    assert {c["type"] for c in found} <= {"function"}
    assert len({c["id"] for c in found}) == len(found)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")

    shown, by_index, reason = gather(stream_of(chat(hermes, text, tools=TOOLS, stream=True)))
    if not calls and '"now"' in text:  # it had begun when its end was missing
        assert (shown, reason) == ("</tool_call>", "stop")
        return
    assert shown == (content or "")
    assert list(by_index) == list(range(len(calls)))
    assert [(c["name"], c["arguments"]) for c in by_index.values()] == calls
    assert reason == choice["finish_reason"]


def test_llama3_calls(llama3: Server) -> None:
    call = '{"name": "get_weather", "parameters": {"city": "Köln"}}'
    for text in (call, f"{call}; {call}"):
        (choice,) = chat(llama3, text, tools=TOOLS).json()["choices"]
        found = choice["message"]["tool_calls"]
        assert [c["function"]["arguments"] for c in found] == ['{"city": "Köln"}'] * len(found)
        assert choice["finish_reason"] == "tool_calls"
    (choice,) = chat(llama3, '{"answer": 42}', tools=TOOLS).json()["choices"]
    assert choice["message"]["content"] == '{"answer": 42}'
    assert "tool_calls" not in choice["message"]


def test_without_tools_nothing_is_parsed(hermes: Server) -> None:
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = chat(hermes, wrap(CITY), **fields).json()["choices"]
        assert choice["message"]["content"] == wrap(CITY)
        assert choice["finish_reason"] == "stop"


def test_one_call_where_parallel_ones_are_not_wanted(hermes: Server) -> None:
    """The first call ends the answer, and the request: its slot comes back."""
    text = wrap(CITY, CITY) + "x" * 1000
    for stream in (False, True):
        fields = {"tools": TOOLS, "parallel_tool_calls": False, "stream": stream}
        if stream:
            _, calls, reason = gather(stream_of(chat(hermes, text, **fields)))
            assert (len(calls), reason) == (1, "tool_calls")
        else:
            (choice,) = chat(hermes, text, **fields).json()["choices"]
            assert len(choice["message"]["tool_calls"]) == 1
            assert choice["finish_reason"] == "tool_calls"
        hermes.wait_until_empty()


def test_cut_off_at_the_limit(hermes: Server) -> None:
    (choice,) = chat(hermes, wrap(CITY, CITY), tools=TOOLS, max_tokens=100).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("<tool_call>")


def test_each_choice_has_calls_of_its_own(hermes: Server) -> None:
    answer = chat(hermes, wrap(CITY), tools=TOOLS, n=3).json()
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[1], {"type": "function", "function": {"name": ""}}]},
         "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
         "tools[0].function.strict"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "logprobs": True}, "logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be(hermes: Server, fields: dict[str, Any], param: str) -> None:
    response = chat(hermes, "x", **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_models_that_have_no_tools(make_server: Callable[..., Server]) -> None:
    """A template that does not mention them would ignore them in silence."""
    for server in (
        make_server(chat_template="{{ messages[-1].content }}", tool_format="hermes"),
        make_server(chat_template=TEMPLATE),
    ):
        response = chat(server, "x", tools=TOOLS)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert chat(server, "x", tools=TOOLS, tool_choice="none").status_code == 200


def test_tools_are_advised_where_there_are_some(
    hermes: Server, make_server: Callable[..., Server]
) -> None:
    for server, has_tools in ((hermes, True), (make_server(chat_template=TEMPLATE), False)):
        refused = chat(server, "x", response_format={"type": "json_object"})
        assert refused.status_code == 400
        assert ("offer 'tools'" in refused.text) == has_tools


def test_what_the_template_sees(make_server: Callable[..., Server]) -> None:
    """Tools as they were sent, earlier calls with their arguments as objects, answers of tools."""
    server = make_server(
        chat_template="{{ tools | tojson }}|{% for m in messages %}{{ m.role }}:{{ m.content }}:"
        "{% for c in m.tool_calls %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}:{{ m.tool_call_id }}|"
        "{% endfor %}",
        tool_format="llama3",
    )
    call = {"id": "c1", "type": "function"}
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {**call, "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}},
                {**call, "function": {"name": "g", "arguments": "no JSON"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": "ok", "tool_calls": []},
    ]
    body = {"messages": messages, "tools": TOOLS[1:]}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    seen = answer["choices"][0]["message"]["content"].split("|")
    assert json.loads(seen[0]) == TOOLS[1:]
    assert seen[1:] == [
        "user:hi::", 'assistant::f{"a": [1, "é"]}c1g"no JSON"c1:', "tool:42::c1", "assistant:ok::",
        "",
    ]  # fmt: skip
    for at, (calls, param) in enumerate(
        [
            (5, "messages[0].tool_calls"),
            ([{"id": "x"}], "messages[0].tool_calls[0].function"),
            ([{"function": {"arguments": "{}"}}], "messages[0].tool_calls[0].function.name"),
            (
                [{"function": {"name": "f", "arguments": 5}}],
                "messages[0].tool_calls[0].function.arguments",
            ),
        ]
    ):
        message = {"role": "assistant", "tool_calls": calls}
        response = server.http.post("/v1/chat/completions", json={"messages": [message]})
        assert response.status_code == 400, at
        assert response.json()["error"]["param"] == param


def test_openai_client_reads_calls(hermes: Server) -> None:
    openai = pytest.importorskip("openai")
    url = f"{hermes.front_end.url}/v1"
    messages: Any = [{"role": "user", "content": "Well: " + wrap(CITY, CITY)}]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
        type(answer).model_validate_json(answer.model_dump_json(), strict=True)
        calls = answer.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["get_weather"] * 2
        # The client's own accumulation of a stream.
        with client.chat.completions.stream(model="fake", messages=messages, tools=TOOLS) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0]
        assert final.message.content == "Well:"
        assert [call.function.arguments for call in final.message.tool_calls] == [
            '{"city": "Köln"}'
        ] * 2
        assert final.finish_reason == "tool_calls"
