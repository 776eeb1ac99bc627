"""Unmodified clients: what load generators send is accepted, and libraries on top of OpenAI's work.

The libraries are in the extra `clients`; where one is missing its test is skipped and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from .fake_server import Server
from .test_choices import SIZES, stream_of
from .test_tools import CITY, TEMPLATE, TOOLS, wrap

USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def chatty(make_server: Callable[..., Server]) -> Server:
    return make_server(sizes=SIZES, chat_template=TEMPLATE, tool_format="hermes")


def url_of(server: Server) -> str:
    return f"{server.front_end.url}/v1"


# Bodies in the shape that load generators post, at their defaults and with usual options.
LOADS: list[tuple[str, dict[str, Any]]] = [
    # vllm bench serve, --backend openai and openai-chat, --ignore-eos, sampling options
    ("completions", {"model": "fake", "prompt": "hello", "repetition_penalty": 1.0,
                     "max_tokens": 4, "logprobs": None, "stream": True, "stream_options": USAGE}),
    ("completions", {"model": "fake", "prompt": [104, 105], "repetition_penalty": 1.0,
                     "max_tokens": 4, "logprobs": 1, "stream": True, "stream_options": USAGE,
                     "ignore_eos": True, "temperature": 0.0, "top_p": 0.9, "top_k": 20,
                     "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.5}),
    ("chat/completions", {"model": "fake", "max_completion_tokens": 4, "stream": True,
                          "messages": [{"role": "user",
                                        "content": [{"type": "text", "text": "hello"}]}],
                          "stream_options": USAGE, "ignore_eos": True}),
    # guidellm: usage in every chunk, the output's length by ignore_eos and a stop of null
    ("completions", {"model": "fake", "prompt": "hello", "stream": True, "max_tokens": 4,
                     "stop": None, "ignore_eos": True,
                     "stream_options": {**USAGE, "continuous_usage_stats": True}}),
    ("chat/completions", {"model": "fake", "stream": True, "max_completion_tokens": 4,
                          "stop": None, "ignore_eos": True,
                          "messages": [{"role": "user",
                                        "content": [{"type": "text", "text": "hello"}]}],
                          "stream_options": {**USAGE, "continuous_usage_stats": True}}),
    # others: a floor under the output's length
    ("completions", {"model": "fake", "prompt": "hello", "max_tokens": 4, "min_tokens": 4,
                     "stream": True, "stream_options": USAGE, "best_of": 1, "n": 1,
                     "use_beam_search": False}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), LOADS)
def test_what_load_generators_send(chatty: Server, path: str, body: dict[str, Any]) -> None:
    chunks = stream_of(chatty.http.post(f"/v1/{path}", json=body))
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert len([chunk for chunk in chunks if chunk["choices"]]) == 5  # a token each, then the end


def test_openai_sync_and_async(chatty: Server) -> None:
    openai = pytest.importorskip("openai")
    messages: Any = [{"role": "user", "content": "hi there"}]
    fields: Any = {"model": "fake", "messages": messages, "n": 2, "logprobs": True,
                   "top_logprobs": 2, "presence_penalty": 0.5}  # fmt: skip
    with openai.OpenAI(base_url=url_of(chatty), api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**fields)
        type(answer).model_validate_json(answer.model_dump_json(), strict=True)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert [t.token for t in answer.choices[1].logprobs.content] == [*"hi there"]
        old = client.completions.create(model="fake", prompt="abc", logprobs=2, echo=False)
        type(old).model_validate_json(old.model_dump_json(), strict=True)
        assert old.choices[0].logprobs.text_offset == [0, 1, 2]

    async def stream() -> list[str]:
        texts = ["", ""]
        async with openai.AsyncOpenAI(base_url=url_of(chatty), api_key="none") as client:
            async for chunk in await client.chat.completions.create(**fields, stream=True):
                type(chunk).model_validate_json(chunk.model_dump_json(), strict=True)
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        return texts

    assert asyncio.run(stream()) == ["hi there"] * 2


@pytest.mark.slow
def test_langchain(chatty: Server) -> None:
    langchain = pytest.importorskip("langchain_openai")
    common: Any = {"base_url": url_of(chatty), "api_key": "none", "max_retries": 0}
    model = langchain.ChatOpenAI(model="fake", temperature=0, **common)
    answer = model.invoke("Grüße")
    assert answer.content == "Grüße" and answer.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.content for chunk in model.stream("Grüße")) == "Grüße"
    assert asyncio.run(model.ainvoke("hi")).content == "hi"
    assert [a.content for a in model.batch(["a", "b", "c"])] == ["a", "b", "c"]
    with_tools = model.bind_tools(TOOLS)
    calls = with_tools.invoke(wrap(CITY)).tool_calls
    assert [(c["name"], c["args"]) for c in calls] == [("get_weather", {"city": "Köln"})]
    whole = None
    for chunk in with_tools.stream(wrap(CITY, CITY)):
        whole = chunk if whole is None else whole + chunk
    assert [c["args"] for c in whole.tool_calls] == [{"city": "Köln"}] * 2
    wanted = langchain.ChatOpenAI(model="fake", logprobs=True, top_logprobs=2, **common)
    content = wanted.invoke("ab").response_metadata["logprobs"]["content"]
    assert [token["token"] for token in content] == ["a", "b"]
    llm = langchain.OpenAI(model="fake", max_tokens=9, **common)
    assert llm.invoke("plain text") == "plain tex"


@pytest.mark.slow
def test_litellm(chatty: Server) -> None:
    litellm = pytest.importorskip("litellm")
    common: Any = {"model": "openai/fake", "api_base": url_of(chatty), "api_key": "none"}
    messages = [{"role": "user", "content": "Grüße"}]
    answer = litellm.completion(messages=messages, temperature=0, n=2, **common)
    assert [choice.message.content for choice in answer.choices] == ["Grüße"] * 2
    chunks = litellm.completion(messages=messages, stream=True, **common)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Grüße"
    messages = [{"role": "user", "content": wrap(CITY)}]
    (choice,) = litellm.completion(messages=messages, tools=TOOLS, **common).choices
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Köln"}'
    assert choice.finish_reason == "tool_calls"

    async def ask() -> str:
        answer = await litellm.acompletion(messages=[{"role": "user", "content": "x"}], **common)
        return str(answer.choices[0].message.content)

    assert asyncio.run(ask()) == "x"
    common["model"] = "text-completion-openai/fake"
    found = litellm.text_completion(prompt="abc", logprobs=1, max_tokens=3, **common).choices[0]
    assert found.text == "abc"
