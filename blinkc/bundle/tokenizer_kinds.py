"""Recognize a tokenizer's pipeline: parts of tokenizer.json -> the runtime's kinds, or a refusal.

Everything around the merges is told by exact comparison: a split pattern counts only if its text is
the one that a scanner of runtime/tokenizer/pretokenize.h was written for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from blinkc.errors import BlinkError

LOW_BLOCK = "\u2581"

ALPHABET_BYTES, ALPHABET_CHARACTERS = 0, 1
GPT2, DIGITS_GPT2, LLAMA3, QWEN, O200K, DEEPSEEK_V3, WHOLE, TEKKEN = range(8)
NORMALIZE_NONE, NORMALIZE_NFC, NORMALIZE_SPACES, NORMALIZE_PREPEND_SPACES = range(4)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = _CONTRACTIONS + "|" + _PREFIX + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
# The split patterns that the runtime has a scanner for, by their exact text.
SPLIT_PATTERNS: dict[tuple[str, ...], int] = {
    (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",): GPT2,
    (_LLAMA3,): LLAMA3,
    (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),): QWEN,
    (
        f"{_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,
    ): O200K,
    (
        f"{_PREFIX}{_UPPER}*{_LOWER}+|{_PREFIX}{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,
    ): TEKKEN,
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*|"
        r"\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+",
    ): DEEPSEEK_V3,
}
HINT = "the runtime falls back to the `tokenizers` library for this tokenizer"


def unsupported(what: str, value: object) -> BlinkError:
    text = json.dumps(value, ensure_ascii=True) if not isinstance(value, str) else value
    if len(text) > 300:
        text = text[:300] + "..."
    return BlinkError(f"tokenizer.json: {what} is not supported: {text}", hint=HINT)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerKinds:
    """What the pipeline around the model does, in the runtime's terms."""

    alphabet: int
    pretokenizer: int
    normalizer: int
    add_prefix_space: bool
    strips_leading_space: bool = False  # decoding takes one space off the front


def _flatten(step: dict[str, Any] | None, children: str) -> list[dict[str, Any]]:
    """Return the steps of a possibly nested Sequence."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [leaf for child in step[children] for leaf in _flatten(child, children)]
    return [step]


def read_kinds(document: dict[str, Any]) -> TokenizerKinds:
    normalizer = _read_normalizer(_flatten(document.get("normalizer"), "normalizers"))
    steps = _flatten(document.get("pre_tokenizer"), "pretokenizers")
    decoders = _flatten(document.get("decoder"), "decoders")
    if [step["type"] for step in decoders] == ["ByteLevel"]:
        if normalizer in (NORMALIZE_SPACES, NORMALIZE_PREPEND_SPACES):
            raise unsupported("normalizer", document["normalizer"])
        pretokenizer, add_prefix_space = _read_byte_level_steps(steps)
        return TokenizerKinds(
            alphabet=ALPHABET_BYTES,
            pretokenizer=pretokenizer,
            normalizer=normalizer,
            add_prefix_space=add_prefix_space,
        )
    gemma_decoders = [
        {"type": "Replace", "pattern": {"String": LOW_BLOCK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    strips_leading_space = decoders == [*gemma_decoders, strip]
    if decoders != gemma_decoders and not strips_leading_space:
        raise unsupported("decoder", document.get("decoder"))
    if normalizer not in (NORMALIZE_SPACES, NORMALIZE_PREPEND_SPACES):
        raise unsupported("normalizer", document.get("normalizer"))
    # No space is left by the normalizer, so that this split never splits.
    spaces = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    if steps not in ([], [spaces]):
        raise unsupported("pre-tokenizer", steps)
    return TokenizerKinds(
        alphabet=ALPHABET_CHARACTERS,
        pretokenizer=WHOLE,
        normalizer=normalizer,
        add_prefix_space=False,
        strips_leading_space=strips_leading_space,
    )


def _read_normalizer(steps: list[dict[str, Any]]) -> int:
    if not steps:
        return NORMALIZE_NONE
    if steps == [{"type": "NFC"}]:
        return NORMALIZE_NFC
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": LOW_BLOCK}
    if steps == [replace]:
        return NORMALIZE_SPACES
    if steps == [{"type": "Prepend", "prepend": LOW_BLOCK}, replace]:
        return NORMALIZE_PREPEND_SPACES
    raise unsupported("normalizer", steps)


def _read_byte_level_steps(steps: list[dict[str, Any]]) -> tuple[int, bool]:
    """Return (pre-tokenizer kind, add_prefix_space) of a chain that ends in ByteLevel."""
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise unsupported("pre-tokenizer", steps)
    *splits, byte_level = steps
    add_prefix_space = bool(byte_level.get("add_prefix_space", True))
    if byte_level.get("use_regex", True):
        if not splits:
            return GPT2, add_prefix_space
        if splits == [{"type": "Digits", "individual_digits": True}] and not add_prefix_space:
            return DIGITS_GPT2, False
        raise unsupported("pre-tokenizer", steps)
    patterns = tuple(_read_split(step) for step in splits)
    if patterns not in SPLIT_PATTERNS or add_prefix_space:
        raise unsupported("pre-tokenizer", steps)
    return SPLIT_PATTERNS[patterns], False


def _read_split(step: dict[str, Any]) -> str:
    """Return the regex of a Split that makes every match, and all between, a piece."""
    if step["type"] != "Split" or "Regex" not in step["pattern"]:
        raise unsupported("pre-tokenizer", step)
    isolated = step["behavior"] == "Isolated"
    # Removing what does not match is the same where the pattern matches every character; that of
    # DeepSeek does not, and is never written so.
    inverted = step["behavior"] == "Removed" and bool(step.get("invert"))
    if not (isolated or inverted) or (isolated and step.get("invert")):
        raise unsupported("pre-tokenizer", step)
    return str(step["pattern"]["Regex"]) if isolated else _full_cover(step)


def _full_cover(step: dict[str, Any]) -> str:
    pattern = str(step["pattern"]["Regex"])
    if SPLIT_PATTERNS.get((pattern,)) is None:
        raise unsupported("pre-tokenizer", step)
    return pattern


def read_template(post_processor: dict[str, Any] | None) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor puts before and after one text."""
    prefix: list[int] = []
    suffix: list[int] = []
    for step in _flatten(post_processor, "processors"):
        before: list[int] = []
        after: list[int] = []
        if step["type"] == "TemplateProcessing":
            seen_text = False
            for part in step["single"]:
                if "Sequence" in part:
                    if seen_text or part["Sequence"]["id"] != "A":
                        raise unsupported("post-processor", step)
                    seen_text = True
                else:
                    ids = step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
                    (after if seen_text else before).extend(ids)
            if not seen_text:
                raise unsupported("post-processor", step)
        elif step["type"] in ("RobertaProcessing", "BertProcessing"):
            before, after = [step["cls"][1]], [step["sep"][1]]
        elif step["type"] != "ByteLevel":
            raise unsupported("post-processor", step)
        prefix, suffix = before + prefix, suffix + after
    return prefix, suffix
