"""Compiling tokenizer.json: equal bytes for equal input, and a named refusal of other kinds."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blinkc.bundle.compile_tokenizer import compile_tokenizer
from blinkc.bundle.tokenizer_kinds import GPT2, LLAMA3, SPLIT_PATTERNS, TEKKEN
from blinkc.errors import BlinkError

from .conftest import make_pair
from .fuzz_text import fuzz_texts
from .vocabularies import tokenizer_json


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A small byte-level tokenizer.json, trained on the spot."""
    return dict(json.loads(tokenizer_json("gpt2_small")))


def changed(document: dict[str, Any], **parts: Any) -> bytes:
    """Return the document with parts replaced; `model` is updated, not replaced."""
    result = copy.deepcopy(document)
    result["model"].update(parts.pop("model", {}))
    result.update(parts)
    return json.dumps(result).encode()


def test_equal_input_gives_equal_bytes(document: dict[str, Any]) -> None:
    raw = changed(document)
    assert compile_tokenizer(raw) == compile_tokenizer(raw.decode())


def test_a_path_is_read(tmp_path: Path, document: dict[str, Any]) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(changed(document))
    assert compile_tokenizer(path) == compile_tokenizer(path.read_bytes())
    with pytest.raises(BlinkError, match=r"nowhere\.json"):
        compile_tokenizer(tmp_path / "nowhere.json")


SPLIT_ON_COMMAS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": ","}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ],
}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "model type": {"model": {"type": "Unigram"}},
    "model.dropout": {"model": {"dropout": 0.1}},
    "model.continuing_subword_prefix": {"model": {"continuing_subword_prefix": "##"}},
    "model.end_of_word_suffix": {"model": {"end_of_word_suffix": "</w>"}},
    "unk_token": {"model": {"unk_token": "<none>"}},
    "normalizer": {"normalizer": {"type": "Lowercase"}},
    "pre-tokenizer": {"pre_tokenizer": SPLIT_ON_COMMAS},
    "pre-tokenizer is not": {"pre_tokenizer": {"type": "Whitespace"}},
    "decoder": {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    "decoder is not": {"decoder": None},
    "post-processor": {"post_processor": {"type": "Weird"}},
    "outside the vocabulary": {
        "post_processor": {"type": "BertProcessing", "cls": ["[CLS]", 9999], "sep": ["[SEP]", 0]}
    },
    "added token": {
        "added_tokens": [
            {
                "id": 5,
                "content": "<|endoftext|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ]
    },
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_other_kinds_are_refused_by_name(what: str, document: dict[str, Any]) -> None:
    with pytest.raises(BlinkError, match=what) as refused:
        compile_tokenizer(changed(document, **UNSUPPORTED[what]))
    assert "tokenizers" in refused.value.hint


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"{", b'{"model": 3}', b'{"model": {"vocab": {"a": "b"}}}', b"\xff"]
)
def test_malformed_files_are_user_errors(text: bytes) -> None:
    with pytest.raises(BlinkError, match=r"tokenizer\.json"):
        compile_tokenizer(text)


def test_merge_outside_the_vocabulary_is_named(document: dict[str, Any]) -> None:
    with pytest.raises(BlinkError, match="merge 0"):
        compile_tokenizer(changed(document, model={"merges": [["zz", "qqqq"]]}))


def split_by(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    """Return the parts of a pre-tokenizer that cuts by one of the known patterns."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior}
    split["invert"] = behavior == "Removed"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    byte_level["trim_offsets"] = True
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}}


PATTERN_OF = {kind: patterns for patterns, kind in SPLIT_PATTERNS.items()}
VARIANTS: dict[str, dict[str, Any]] = {
    "GPT-2's pattern spelled out": split_by(PATTERN_OF[GPT2][0]),
    "Llama-3's pattern inverted": split_by(PATTERN_OF[LLAMA3][0], "Removed"),
    "Tekken": split_by(PATTERN_OF[TEKKEN][0]),
    "prefix space": {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    },
    "template": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {
                "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
            },
        }
    },
    "merges as strings": {},
    "NFC": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}},
    "ignore merges": {"model": {"ignore_merges": True}},
    "unknown": {"model": {"unk_token": "<|endoftext|>"}},
    "flags of added tokens": {},
    "bytes missing": {"model": {"unk_token": None}},
    "bytes unknown": {"model": {"unk_token": "<|endoftext|>"}},
    "unknown fused": {"model": {"unk_token": "<|endoftext|>", "fuse_unk": True}},
}


def variant(document: dict[str, Any], name: str) -> bytes:
    result = json.loads(changed(document, **VARIANTS[name]))
    model = result["model"]
    if name == "merges as strings":
        model["merges"] = [" ".join(merge) for merge in model["merges"]]
    if name in ("bytes missing", "bytes unknown", "unknown fused"):
        # Letters that no merge needs any more: some vocabularies lack bytes.
        for char in "zqĠÃ":
            del model["vocab"][char]
        model["merges"] = [
            merge for merge in model["merges"] if not set("zqĠÃ") & set("".join(merge))
        ]
    if name == "flags of added tokens":
        size = len(model["vocab"])
        base = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        for content, flags in {
            "<left>": ["lstrip"],
            "<right>": ["rstrip", "special"],
            "<both>": ["lstrip", "rstrip"],
            "word": ["single_word"],
            "é\u0323": ["normalized"],
            "<|endoftext|>x": ["special"],
            "over": ["normalized", "single_word", "lstrip"],
            "a b": ["special", "rstrip", "single_word"],
        }.items():
            id_ = model["vocab"].get(content, size)
            size += id_ == size
            token = {**base, **dict.fromkeys(flags, True), "content": content, "id": id_}
            result["added_tokens"].append(token)
    return json.dumps(result).encode()


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_the_library(
    name: str, document: dict[str, Any], module: ModuleType
) -> None:
    """Settings that no vocabulary of the tests has, each against the library."""
    pair = make_pair(name, variant(document, name), module)
    specials = (*pair.specials, "\u0323", "é", "the word", "words", "over", " zzz q ")
    for seed, parse_special in ((31, True), (32, False)):
        for text in fuzz_texts(seed, 600, specials):
            expected = pair.library_ids(text, parse_special=parse_special)
            assert pair.ours.encode(text, parse_special=parse_special) == expected, repr(text)
            plain = pair.library.encode(text, add_special_tokens=False).ids
            assert pair.ours.encode(text, add_special_tokens=False) == plain, repr(text)
            assert pair.ours.decode(expected) == pair.library.decode(expected), repr(text)


def test_damaged_blobs_are_refused(document: dict[str, Any], module: ModuleType) -> None:
    blob = compile_tokenizer(changed(document))
    for size in (0, 1, 255, 256, len(blob) // 2, len(blob) - 1):
        with pytest.raises(module.TokenizerError):
            module.Tokenizer(blob[:size])
    for at in range(28, len(blob), 997):
        with pytest.raises(module.TokenizerError, match="checksum"):
            module.Tokenizer(blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :])
    newer = blob[:8] + struct.pack("<I", 99) + blob[12:]
    with pytest.raises(module.TokenizerError, match="version 99"):
        module.Tokenizer(newer)
    with pytest.raises(module.TokenizerError, match="not a compiled tokenizer"):
        module.Tokenizer(b"x" * 1000)
