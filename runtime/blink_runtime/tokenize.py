"""`blink-runtime tokenize`: text -> ids (or back) with a bundle's own tokenizer."""

from __future__ import annotations

from pathlib import Path

import click

from blink_runtime.codec import load_codec
from blinkc.bundle.reader import open_bundle
from blinkc.errors import BlinkError


def run_tokenize(path: Path, text: str, decode: bool, pieces: bool) -> None:
    """Print ids separated by spaces, one `id<TAB>text` a line with `pieces`, or decoded text.

    Raises:
        BlinkError: the text is not UTF-8, or `--decode` was given something that is no id of this
            tokenizer.
    """
    with open_bundle(path, check_hashes=False) as bundle:
        vocab_size = bundle.manifest.limits.vocab_size
        codec = load_codec(bundle, lambda sentence: click.echo(sentence, err=True))
    if decode:
        click.echo(codec.decode(_ids_from_text(text, vocab_size), skip_special_tokens=False))
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BlinkError("the text is not UTF-8", hint="convert it, with iconv say") from error
    token_ids = codec.encode(text)
    if pieces:
        for token_id in token_ids:
            click.echo(f"{token_id}\t{codec.decode([token_id], skip_special_tokens=False)!r}")
    else:
        click.echo(" ".join(map(str, token_ids)))


def _ids_from_text(text: str, vocab_size: int) -> list[int]:
    token_ids = []
    for word in text.replace(",", " ").strip("[] \n").split():
        if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) < vocab_size):
            raise BlinkError(f"{word!r} is no token id below {vocab_size}")
        token_ids.append(int(word))
    return token_ids
