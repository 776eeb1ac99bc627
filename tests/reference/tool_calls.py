"""The slow, obvious reading of tool calls: a whole answer -> its content and its calls."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

SPACES = " \t\r\n"
OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
ARGUMENT_KEYS = ("arguments", "parameters")


def read_call(text: str, start: int, names: Collection[str]) -> tuple[str, Any, int] | None:
    """Return name, arguments and end of the call whose object starts at `start`, or None."""

    def refuse(_: str) -> Any:
        raise ValueError

    if not text.startswith("{", start):
        return None
    try:
        decoder = json.JSONDecoder(object_pairs_hook=lambda pairs: pairs, parse_constant=refuse)
        pairs, end = decoder.raw_decode(text, start)
        plain, _ = json.JSONDecoder(parse_constant=refuse).raw_decode(text, start)
    except ValueError:
        return None
    keys = [key for key, _ in pairs]
    given = [key for key in keys if key in ARGUMENT_KEYS]
    if keys.count("name") != 1 or len(given) > 1 or plain["name"] not in [*names]:
        return None
    if not isinstance(plain["name"], str) or {*keys} - {"name", "type", "id", *ARGUMENT_KEYS}:
        return None
    arguments = plain[given[0]] if given else {}
    if not isinstance(arguments, dict):
        return None
    return plain["name"], arguments, end


def read_hermes(text: str, names: Collection[str], parallel: bool) -> tuple[str, list[Any]]:
    content, calls = "", []
    at, after_call = 0, False
    while True:
        tag = text.find(OPEN, at)
        before = text[at:] if tag < 0 else text[at:tag]
        if after_call:
            before = before.lstrip(SPACES)
            if before.startswith(CLOSE):
                before = before[len(CLOSE) :].lstrip(SPACES)
        if tag < 0:
            return content + before, calls
        start = tag + len(OPEN)
        start += len(text[start:]) - len(text[start:].lstrip(SPACES))
        call = read_call(text, start, names)
        if call is None:
            return content + before + text[tag:], calls
        content += before.rstrip(SPACES)
        calls.append(call[:2])
        at, after_call = call[2], True
        if not parallel:
            return content, calls


def read_llama3(text: str, names: Collection[str], parallel: bool) -> tuple[str, list[Any]]:
    calls: list[Any] = []
    rest = text.lstrip(SPACES).removeprefix(PYTHON_TAG).lstrip(SPACES)
    while True:
        call = read_call(rest, 0, names)
        if call is None:
            return (rest if calls else text), calls
        calls.append(call[:2])
        if not parallel:
            return "", calls
        rest = rest[call[2] :].lstrip(SPACES)
        rest = rest.removeprefix(";").lstrip(SPACES)
        if not rest:
            return "", calls


READERS = {"hermes": read_hermes, "llama3": read_llama3}
