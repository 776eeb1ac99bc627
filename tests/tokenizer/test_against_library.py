# ruff: noqa: RUF001 (letters that look like others are what the texts are for)
"""Ids and text equal those of the `tokenizers` library, over random texts and named cases."""

from __future__ import annotations

import os
import random
from types import ModuleType

import pytest

from .conftest import Pair, pair_of
from .fuzz_text import fuzz_texts
from .vocabularies import ALL_NAMES

FUZZ_TEXTS = 10_000
SLOW_FUZZ_TEXTS = int(os.environ.get("BLINK_TOKENIZER_FUZZ", "1000000"))  # over all vocabularies


def check_text(pair: Pair, text: str) -> None:
    expected = pair.library_ids(text)
    assert pair.ours.encode(text) == expected, f"{pair.name}: {text!r}"
    decoded = pair.library.decode(expected, skip_special_tokens=False)
    assert pair.ours.decode(expected, False) == decoded, f"{pair.name}: {text!r}"


def check_random_ids(pair: Pair, module: ModuleType, random_: random.Random) -> None:
    """Ids that no text encodes to: pieces of code points, unknown ids, specials in between."""
    size = pair.ours.num_ids
    ids = [random_.randrange(size + 3) for _ in range(random_.randrange(1, 24))]
    for skip in (True, False):
        expected = pair.library.decode(ids, skip_special_tokens=skip)
        assert pair.ours.decode(ids, skip) == expected, f"{pair.name}: {ids}"
    detokenizer = module.Detokenizer(pair.ours)
    pieces = [detokenizer.append(id_) for id_ in ids] + [detokenizer.flush()]
    if pair.name not in ("gemma3", "llama2"):  # see Detokenizer: ill-formed runs of byte tokens
        assert "".join(pieces) == pair.library.decode(ids), f"{pair.name}: {ids}"


def run_fuzz(pair: Pair, module: ModuleType, seed: int, count: int) -> None:
    random_ = random.Random(seed)
    for number, text in enumerate(fuzz_texts(seed, count, pair.specials)):
        check_text(pair, text)
        if number % 5 == 0:
            expected = pair.library_ids(text, parse_special=False)
            assert pair.ours.encode(text, parse_special=False) == expected, f"{text!r}"
        if number % 3 == 0:
            check_random_ids(pair, module, random_)


def test_random_texts(pair: Pair, module: ModuleType) -> None:
    run_fuzz(pair, module, seed=20, count=FUZZ_TEXTS)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_million_random_texts(name: str, module: ModuleType) -> None:
    pair = pair_of(name, module)
    run_fuzz(pair, module, seed=random.randrange(1 << 30), count=SLOW_FUZZ_TEXTS // len(ALL_NAMES))


# Texts that some tokenizer, this one or another, got wrong; the comment says at what.
NAMED_TEXTS = (
    "",
    " ",
    "a",
    "\n",
    "  \n\n  x",  # line breaks end a run of spaces, the last space goes with the word
    "x  12",  # digits are split off before the run of spaces is
    "1 12 123 1234 12345 123456789",
    "->",
    "I'm WE'LL it'S 'ſ don'T y'all'd've",  # the long s is an s where case is ignored
    "e\u0301 a\u0323\u0308 \u1112\u1161\u11ab \u212b \u0958 \u0344",  # NFC, with exclusions
    "\u0301\u0301x",  # marks without a base
    "q\u0307\u0323 q\u0323\u0307",  # marks out of order
    "ǅ Ǆ ǆ ªA ªa Aª aª ʰA",  # title case, and letters of no case
    "HTTPServer iPhone ABCdef abcDEF ÀÉîõ",
    "/* a */ // b\r\n/c/",
    "中文 。中文あア一\u9fa6\u9fa5",  # the edge of DeepSeek's Han range
    "x²y ½ Ⅳ ٣ १ 𝟘 \U00011de5",  # numbers that are no ASCII digits, one newer than some tables
    "\u2028\u2029\u0085\u00a0\u3000\u200b\u180e\ufeff",  # white space and what only looks like it
    "👩‍👩‍👧‍👦🇫🇷❤️",
    "\x00\x01\x1f\x7f\x80\x9f",
    "\ue000\ufffd\U0010ffff",
    "<|begin_of_text|><|im_start|><|endoftext|> <bos><unk> </s><|im_end|",
    "<think>\n</think>\n\n<tool_call>{}</tool_call>",
    "<0x41><0xFF> <0x",  # the spelling of byte tokens in text
    "a" * 64 + "b" * 65 + "\n" * 66,
)


@pytest.mark.parametrize("text", NAMED_TEXTS, ids=range(len(NAMED_TEXTS)))
def test_named_text(pair: Pair, text: str) -> None:
    check_text(pair, text)


HOSTILE = (
    "a",
    "A",
    " ",
    "\n",
    "0",
    "-",
    "é",
    "\u0301",
    "中",
    "😀",
    "ªA",
    "'s",
    " \n",
    "<|",
    "ab",
    "\u200d",
)


@pytest.mark.parametrize("unit", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_repeats(pair: Pair, unit: str) -> None:
    """Ten thousand repeats, and edges of the run changed; the library's own time is the limit."""
    check_text(pair, unit * 10_000)
    check_text(pair, "x" + unit * 1_000 + "y")


def test_hundred_thousand_repeats(module: ModuleType) -> None:
    """Quadratic merging would take minutes here."""
    pair = pair_of("qwen3", module)
    for unit in ("a", "ab", "é", " "):
        check_text(pair, unit * 100_000)


@pytest.mark.parametrize("name", [name for name in ALL_NAMES if name not in ("gemma3", "llama2")])
def test_every_code_point_of_small_blocks(name: str, module: ModuleType) -> None:
    """Each code point between letters, digits and signs; the big uniform blocks by samples.

    For every vocabulary that splits by classes of characters.
    """
    pair = pair_of(name, module)
    uniform = (
        (0x3400, 0x9FFF),
        (0xAC00, 0xD7FF),
        (0xE000, 0xF8FF),
        (0x17000, 0x18CFF),
        (0x20000, 0x3FFFF),
        (0x40000, 0xDFFFF),
        (0xE0200, 0x10FFFF),
    )
    points = [
        c
        for c in range(0x110000)
        if not 0xD800 <= c <= 0xDFFF
        and (c % 257 == 0 or not any(low + 16 < c < high - 16 for low, high in uniform))
    ]
    for start in range(0, len(points), 512):
        chars = map(chr, points[start : start + 512])
        check_text(pair, "".join(f"a{c}A 1{c}1 {c}.{c}\n" for c in chars))


def test_streaming_gives_whole_code_points(pair: Pair, module: ModuleType) -> None:
    """An emoji in several tokens: nothing until it is whole, never U+FFFD before the end."""
    ids = pair.ours.encode("héllo 🦜🦩 中文 👩‍👩‍👧‍👦 नमस्ते \U0001fae8", add_special_tokens=False)
    detokenizer = module.Detokenizer(pair.ours)
    pieces = [detokenizer.append(id_) for id_ in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == pair.library.decode(ids)
    assert detokenizer.flush() == ""


def test_llama3_chat_starts_with_one_bos(module: ModuleType) -> None:
    """A rendered template spells its own BOS; the text is encoded without another."""
    pair = pair_of("llama3", module)
    text = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    ids = pair.ours.encode(text, add_special_tokens=False)
    assert ids.count(128000) == 1
    assert ids[0] == 128000


def test_qwen_arrow_and_digits(module: ModuleType) -> None:
    pair = pair_of("qwen3", module)
    assert len(pair.ours.encode("->")) == 1
    assert len(pair.ours.encode("2024")) == 4


def test_user_text_does_not_inject_special_tokens(pair: Pair) -> None:
    text = "".join(pair.specials[:50])
    special = {pair.ours.id_of(content) for content in pair.specials}
    special = {id_ for id_ in special if pair.ours.is_special(id_)}
    ids = pair.ours.encode(text, add_special_tokens=False, parse_special=False)
    assert not special.intersection(ids)
    assert ids == [i for i in pair.library_ids(text, parse_special=False) if i not in special]


def test_ids_of_tokens(pair: Pair) -> None:
    for content in pair.specials[:300]:
        assert pair.ours.id_of(content) == pair.library.token_to_id(content)
    assert pair.ours.id_of("no such token, surely") is None


def test_batch_equals_single(pair: Pair) -> None:
    texts = list(fuzz_texts(3, 50, pair.specials))
    assert pair.ours.encode_batch(texts) == [pair.ours.encode(text) for text in texts]


def test_lone_surrogates_are_refused(pair: Pair) -> None:
    with pytest.raises(UnicodeEncodeError):
        pair.ours.encode("a\ud800b")
