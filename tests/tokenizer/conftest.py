"""Fixtures of the tokenizer's tests: the native module, and each vocabulary in the library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from blinkc.bundle.compile_tokenizer import compile_tokenizer

from . import vocabularies


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One vocabulary in both tokenizers."""

    name: str
    raw: bytes  # tokenizer.json
    library: Any  # tokenizers.Tokenizer
    ours: Any
    specials: tuple[str, ...]  # contents of all added tokens

    def library_ids(self, text: str, *, parse_special: bool = True) -> list[int]:
        self.library.encode_special_tokens = not parse_special
        ids: list[int] = self.library.encode(text).ids
        self.library.encode_special_tokens = False
        return ids


@pytest.fixture(scope="session")
def module() -> ModuleType:
    """The installed native module; a second one in this process would clash with it."""
    from blink_runtime import _native

    return _native


_pairs: dict[str, Pair] = {}


def make_pair(name: str, raw: bytes, module: ModuleType) -> Pair:
    from tokenizers import Tokenizer

    return Pair(
        name=name,
        raw=raw,
        library=Tokenizer.from_str(raw.decode()),
        ours=module.Tokenizer(compile_tokenizer(raw)),
        specials=tuple(token["content"] for token in json.loads(raw)["added_tokens"]),
    )


def pair_of(name: str, module: ModuleType) -> Pair:
    """Return a vocabulary, kept for the session; skip the test where it cannot be had."""
    if name not in _pairs:
        try:
            raw = vocabularies.tokenizer_json(name)
        except vocabularies.Unavailable as error:
            pytest.skip(str(error))
        _pairs[name] = make_pair(name, raw, module)
    return _pairs[name]


@pytest.fixture(params=vocabularies.ALL_NAMES)
def pair(request: pytest.FixtureRequest, module: ModuleType) -> Pair:
    """Each vocabulary in turn."""
    return pair_of(request.param, module)
