"""The served demo bundle through the OpenAI client, which checks every field of what it reads."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.e2e.server import DEMO_BUNDLE, Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The demo bundle behind an API key."""
    with Server(DEMO_BUNDLE, "--api-key", "secret") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    """A client with the right key."""
    return server.client("secret")


@pytest.fixture(scope="module")
def stream_client(server: Server) -> openai.OpenAI:
    """A client for streams of text completions; see `Server.client`."""
    return server.client("secret", strict=False)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    """The served model's id."""
    return client.models.list().data[0].id


def test_chat_answers(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=32
    )
    choice = answer.choices[0]
    assert choice.message.content is not None and "Paris" in choice.message.content
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_answer(client: openai.OpenAI, model: str) -> None:
    """Guards the stream's shape: role first, finish_reason only at the end, then usage."""
    whole = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=32
    )
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    with_choice = [chunk.choices[0] for chunk in chunks[:-1]]
    text = "".join(choice.delta.content or "" for choice in with_choice)
    assert text == whole.choices[0].message.content
    assert with_choice[0].delta.role == "assistant"
    assert [choice.finish_reason for choice in with_choice[:-1]] == [None] * (len(with_choice) - 1)
    assert with_choice[-1].finish_reason == "stop"


def test_seed_repeats(client: openai.OpenAI, stream_client: openai.OpenAI, model: str) -> None:
    """The same seed gives the same text, also beside a busy neighbour; another seed another."""

    def complete(seed: int) -> str:
        return (
            client.completions.create(
                model=model, prompt="The weather", max_tokens=24, temperature=1.0, seed=seed
            )
            .choices[0]
            .text
        )

    first = complete(7)
    neighbour = stream_client.completions.create(
        model=model, prompt="Once", max_tokens=100, temperature=1.0, stream=True
    )
    next(iter(neighbour))
    assert complete(7) == first
    neighbour.close()
    assert len({complete(seed) for seed in (7, 8, 9)}) > 1


def test_stop_string_is_cut(
    client: openai.OpenAI, stream_client: openai.OpenAI, model: str
) -> None:
    """What the client sees ends before the stop string, streamed or not."""
    arguments = {"model": model, "prompt": "Count: one, two, three,", "temperature": 0}
    whole = client.completions.create(**arguments, max_tokens=24).choices[0].text
    stop = whole[5:11]
    cut = client.completions.create(**arguments, max_tokens=24, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    stream = stream_client.completions.create(**arguments, max_tokens=24, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == cut.choices[0].text


def test_wrong_key_is_refused(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()


def test_unsupported_parameter_is_named(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model=model, prompt="x", suffix="end")


def test_page_and_health(server: Server) -> None:
    assert "<html" in httpx.get(server.url + "/", timeout=300).text.lower()
    assert httpx.get(server.url + "/health", timeout=300).status_code == 200
