"""The fallback codec's streamed text equals the library's decoding of all ids at once."""

from __future__ import annotations

import random
from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")

from blink_runtime.hugging_face_codec import HuggingFaceCodec  # noqa: E402
from blinkc.errors import BlinkError  # noqa: E402

TEXTS = [
    "Hello world, hello again.",
    "  two  spaces and a tab\t",
    "naïve café 日本語 text 😀👩‍👩‍👧 mixed",
    "line\nbreaks\n\n\nand {code: [1, 2]}",
]


def byte_level() -> Any:
    """A byte-level BPE, as GPT-2's."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def byte_fallback() -> Any:
    """SentencePiece-like: spaces as U+2581, unknown bytes as <0xNN>."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "▁Hello", "▁world", "Hello", "world", ",", ".", "a", "e", "▁a", "日", "<s>"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *words])}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True)
    )
    tokenizer.add_special_tokens(["<s>"])
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("skips", [True, False])
def test_stream_equals_decoding_at_once(make: Any, skips: bool) -> None:
    tokenizer = make()
    codec = HuggingFaceCodec(tokenizer.to_str())
    random.seed(5)
    size = tokenizer.get_vocab_size()
    sequences = [tokenizer.encode(text).ids for text in TEXTS]
    sequences += [[random.randrange(size) for _ in range(30)] for _ in range(200)]
    for ids in sequences:
        expected = tokenizer.decode(ids, skip_special_tokens=skips)
        decoder = codec.make_decoder(skips)
        pieces = [decoder.append(token_id) for token_id in ids]
        pieces.append(decoder.flush())
        text = "".join(pieces)
        if "\ufffd" in expected:
            # Malformed bytes: how many replacement characters they give depends on the cut, and
            # byte fallback gives up all bytes of a run for one that is wrong.
            assert make is byte_fallback or text.strip("\ufffd") == expected.strip("\ufffd")
        else:
            assert text == expected


def test_code_points_come_whole() -> None:
    tokenizer = byte_level()
    decoder = HuggingFaceCodec(tokenizer.to_str()).make_decoder(True)
    ids = tokenizer.encode("🦜🦜").ids
    assert len(ids) > 4
    assert [piece for piece in map(decoder.append, ids) if piece] == ["🦜", "🦜"]


def test_one_incomplete_token_repeated_stays_linear() -> None:
    # The window must not grow: a thousand continuation bytes, each decoded in a short window.
    tokenizer = byte_fallback()
    decoder = HuggingFaceCodec(tokenizer.to_str()).make_decoder(True)
    for _ in range(1000):
        decoder.append(0x80)
        assert len(decoder._window) <= 16


def test_special_tokens_around_the_text() -> None:
    tokenizer = byte_level()
    codec = HuggingFaceCodec(tokenizer.to_str())
    bos = tokenizer.token_to_id("<s>")
    assert codec.encode("Hello", True) == [bos, *codec.encode("Hello", False)]


def test_a_file_that_is_no_tokenizer() -> None:
    with pytest.raises(BlinkError, match=r"tokenizer\.json"):
        HuggingFaceCodec("{}")
