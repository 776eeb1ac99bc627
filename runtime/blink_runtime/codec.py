"""Pick the bundle's tokenizer: the compiled one, or HuggingFace's library with a notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blinkc.bundle.reader import Bundle
from blinkc.errors import BlinkError


def load_codec(bundle: Bundle, notice: Callable[[str], None]) -> Any:
    """Return a native `Tokenizer`, or a `HuggingFaceCodec` where the bundle has no compiled one.

    Args:
        bundle: an opened bundle.
        notice: told in one sentence when the slow way is taken.

    Raises:
        BlinkError: the bundle has no tokenizer at all, or the library is missing.
    """
    from blink_runtime import _native

    tokenizer = bundle.manifest.tokenizer
    if tokenizer.compiled is not None:
        return _native.Tokenizer(bundle.read_bytes(tokenizer.compiled))
    if tokenizer.tokenizer_json is None:
        raise BlinkError(
            f"{bundle.path} has no tokenizer",
            hint="compile the model with --tokenizer PATH to a tokenizer.json",
        )
    from blink_runtime.hugging_face_codec import HuggingFaceCodec

    notice(
        "this tokenizer is not built in: using the tokenizers library, at several times the cost"
    )
    return HuggingFaceCodec(bundle.read_bytes(tokenizer.tokenizer_json).decode())
