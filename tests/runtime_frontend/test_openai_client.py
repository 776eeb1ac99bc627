"""OpenAI's own client reads every response and chunk, with its models validated strictly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .fake_server import Server

openai = pytest.importorskip("openai")

from openai.types import Completion, Model  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402

MESSAGES: Any = [{"role": "user", "content": "Grüße 😀"}]


@pytest.fixture
def client(server: Server) -> Any:
    with openai.OpenAI(base_url=f"{server.front_end.url}/v1", api_key="none", max_retries=0) as c:
        yield c


def validate(kind: Any, value: Any) -> None:
    """Validate strictly: the client itself builds its models without looking."""
    kind.model_validate_json(value.model_dump_json(), strict=True)


def test_models(client: Any) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["fake"]
    validate(Model, models[0])
    validate(Model, client.models.retrieve("fake"))


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, temperature=0)
    validate(ChatCompletion, answer)
    assert answer.choices[0].message.content == "Grüße 😀"
    assert answer.choices[0].finish_reason == "stop"


def test_chat_stream(client: Any) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    for chunk in chunks:
        validate(ChatCompletionChunk, chunk)
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "Grüße 😀"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == len("Grüße 😀".encode()) + 1


def test_completion(client: Any) -> None:
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=10)
    validate(Completion, answer)
    assert answer.choices[0].text == "abc"


def test_completion_stream(client: Any) -> None:
    chunks = list(client.completions.create(model="fake", prompt="abc", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    # The client's type knows no null here; OpenAI's service and this one send it while it goes on.
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 3 + ["stop"]
    validate(Completion, chunks[-1])


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, n=9)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_async_client(server: Server) -> None:
    async def ask_many() -> list[str]:
        url = f"{server.front_end.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def ask(i: int) -> str:
                stream = await client.completions.create(
                    model="fake", prompt=f"request {i} says hello", max_tokens=64, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*(ask(i) for i in range(24))))

    assert asyncio.run(ask_many()) == [f"request {i} says hello" for i in range(24)]
