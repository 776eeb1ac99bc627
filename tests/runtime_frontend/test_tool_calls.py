"""The parser of tool calls against its slow model, over random texts cut at random places."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.reference.tool_calls import READERS

from .native_build import build_program

NAMES = ["get_weather", "f"]
WEATHER = (
    '{"name": "get_weather", "arguments": {"city": "Köln \\"x\\" {", "days": [1, {"a": null}]}}'
)
Ask = Callable[..., list[list[str]]]

# Words that texts are made of: whole calls, parts of them, and what only looks like one.
WORDS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<", "<tool", "</", ";", "\n", " ", "text",
    '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"x": "}\\n"}}', WEATHER,
    '{"type": "function", "name": "f", "parameters": {"a": -1.5e2}}', '{"name": "f"}',
    '{"arguments": {"late": true}, "name": "f"}', '{"name": "unknown", "arguments": {}}',
    '{"name": "f", "arguments": "{}"}', '{"name": "f", "arguments": {"a": 1,}}', '{"answer": 42}',
    '{"name": "f", "arguments": {}, "arguments": {}}', '{"name": 5}', '{"name": ["f"]}',
    '{"name": "f", "arguments": null}', '{"name": "f", "other": 1}', "{", "}", '"', "é😀", "[]",
    '{"id": 1, "name": "f", "arguments": {"q": "<tool_call>"}}', '{"name": "f", "arguments": {"a"',
]  # fmt: skip


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Return a function that runs the parser over pieces of text."""
    with subprocess.Popen(
        [str(build_program("frontend_tool_calls"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def run(form: str, pieces: list[str], *, parallel: bool = True) -> list[list[str]]:
            assert process.stdin is not None and process.stdout is not None
            request = {"format": form, "names": NAMES, "parallel": parallel, "pieces": pieces}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())  # type: ignore[no-any-return]

        yield run
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0


def put_together(pieces: list[list[str]]) -> tuple[str, list[Any]]:
    """What a client that is no stream gets: content and calls."""
    content, calls = "", []
    for kind, text in pieces:
        if kind == "content":
            content += text
        elif kind == "call_begin":
            calls.append([text, ""])
        elif kind == "arguments":
            calls[-1][1] += text
        elif kind == "call_lost":
            calls.pop()
            content += text
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=1500)
@given(
    form=st.sampled_from(["hermes", "llama3"]),
    words=st.lists(st.sampled_from(WORDS), max_size=10),
    places=st.lists(st.integers(0, 10_000), max_size=12),
    parallel=st.booleans(),
)
@example("llama3", ["<|python_tag|>", "\n", "<|python_tag|>", WORDS[10]], [], False)
def test_equals_the_slow_model(
    ask: Ask, form: str, words: list[str], places: list[int], parallel: bool
) -> None:
    """Guards hold-back, fallback to content and calls in parallel, however the text is cut."""
    text = "".join(words)
    got = put_together(ask(form, cut(text, places), parallel=parallel))
    assert got == READERS[form](text, NAMES, parallel)


@settings(max_examples=300)
@given(
    mutation=st.tuples(st.integers(0, 10_000), st.sampled_from(list('{}[]",:\\ <a0'))),
    places=st.lists(st.integers(0, 10_000), max_size=5),
)
def test_damaged_calls(ask: Ask, mutation: tuple[int, str], places: list[int]) -> None:
    """One character of a call replaced: either still a call, or all of it is content."""
    text = f"<tool_call>\n{WEATHER}\n</tool_call>"
    at = mutation[0] % len(text)
    text = text[:at] + mutation[1] + text[at + 1 :]
    assert put_together(ask("hermes", cut(text, places))) == READERS["hermes"](text, NAMES, True)


def test_arguments_are_streamed(ask: Ask) -> None:
    """Guards against holding a whole call back: each piece of text brings its arguments."""
    text = '<tool_call>{"name": "f", "arguments": {"text": "0123456789"}}</tool_call>'
    pieces = ask("hermes", [*text])
    arguments = [text for kind, text in pieces if kind == "arguments"]
    assert "".join(arguments) == '{"text": "0123456789"}'
    assert len(arguments) == len('{"text": "0123456789"}')
    kinds = [kind for kind, _ in pieces]
    assert kinds[0] == "call_begin" and kinds[-1] == "call_end"


def test_content_is_held_no_longer_than_needed(ask: Ask) -> None:
    pieces = ask("hermes", ["so ", "1 < 2", " <tool", " is none"])
    assert [text for _, text in pieces] == ["so", " 1 < 2 <tool is none"] or "".join(
        text for _, text in pieces
    ) == "so 1 < 2 <tool is none"
    assert ask("llama3", ["It is {"]) == [["content", "It is {"]]


def test_a_call_lost_after_it_began(ask: Ask) -> None:
    """A stream has sent the call by then; others get all of it as content."""
    text = '<tool_call>{"name": "f", "arguments": {"a": 1'
    assert ask("hermes", [text])[-1] == ["call_lost", text]
    assert put_together(ask("hermes", [text, "}, oops"])) == (text + "}, oops", [])


def test_hostile_text_is_linear(ask: Ask) -> None:
    """A million bytes of white space, tags or nesting; a quadratic parser would take minutes."""
    for piece in (" ", "<", "<tool_call", "</tool_call>", "{", '{"name": "f", "arguments": {"a": '):
        text = piece * (500_000 // len(piece))
        assert put_together(ask("hermes", [text])) == (text, [])
        assert put_together(ask("llama3", [text]))[1] == []
