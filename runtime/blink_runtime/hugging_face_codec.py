"""The `tokenizers` library as the front end's codec, where the built-in one does not do.

Each call takes the GIL, which is why it is only the fallback.
"""

from __future__ import annotations

import re
from typing import Any

from blinkc.errors import BlinkError

# A code point has at most 4 bytes, so tokens of single bytes become whole within 4; more than this
# many tokens without one are not going to become text.
_MAX_HELD_TOKENS = 8
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_WORD_MARK = "\u2581"  # SentencePiece's space


class HuggingFaceCodec:
    """Text to ids and back through HuggingFace's library.

    Args:
        tokenizer_json: the text of tokenizer.json.

    Raises:
        BlinkError: the library is not installed, or refuses the file.
    """

    def __init__(self, tokenizer_json: str) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise BlinkError(
                "this bundle's tokenizer needs the tokenizers library",
                hint="pip install 'blinkc[fallback-tokenizer]'",
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise BlinkError(f"the tokenizers library refuses tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, adds_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=adds_special_tokens).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token is by itself; of a part of a code point the library tells U+FFFD."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        if _WORD_MARK in token:
            return str(token).replace(_WORD_MARK, " ").encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    def make_decoder(self, skips_special_tokens: bool) -> HuggingFaceDecoder:
        """Return a decoder for one request's output."""
        return HuggingFaceDecoder(self._tokenizer, skips_special_tokens)


class HuggingFaceDecoder:
    """Turns one request's ids into text as they come, in constant time per token.

    What a token adds is the difference between decoding a short window with and without it: the
    window begins one emitted token earlier, so that rules about spaces between tokens apply.
    """

    def __init__(self, tokenizer: Any, skips_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skips_special_tokens
        self._window: list[int] = []
        self._num_emitted = 0  # tokens at the window's start whose text is out

    def append(self, token_id: int) -> str:
        """Return the text that a token completes; bytes of a partial code point are held back."""
        self._window.append(token_id)
        new = self._new_text()
        num_held = len(self._window) - self._num_emitted
        if (not new or new.endswith("\ufffd")) and num_held < _MAX_HELD_TOKENS:
            return ""
        del self._window[: self._num_emitted]
        self._num_emitted = len(self._window)
        return new

    def flush(self) -> str:
        """Return what was held back, at the end of the output."""
        new = self._new_text()
        self._window.clear()
        self._num_emitted = 0
        return new

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._num_emitted])
        return self._decode(self._window)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips_special_tokens))
