"""Compile a tokenizer: tokenizer.json -> the binary blob that the runtime's tokenizer loads.

The layout is `BlobHeader` in runtime/tokenizer/blob.h. Equal input gives equal bytes. Kinds that
the runtime cannot reproduce bit for bit raise `BlinkError`, which names what is not supported.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from array import array
from pathlib import Path
from typing import Any

from blinkc.bundle.tokenizer_kinds import (
    ALPHABET_BYTES,
    ALPHABET_CHARACTERS,
    TokenizerKinds,
    read_kinds,
    read_template,
    unsupported,
)
from blinkc.errors import BlinkError

MAGIC = b"BLINKTOK"
VERSION = 1
HEADER_BYTES = 256
SECTION_ALIGNMENT_BYTES = 64
NO_ID = 0xFFFFFFFF
MAX_IDS = (1 << 20) - 1
MAX_MERGES = 1 << 24
MAX_TOKEN_BYTES = 1 << 16
FLAG_IGNORE_MERGES, FLAG_ADD_PREFIX_SPACE, FLAG_FUSE_UNKNOWN, FLAG_BYTE_FALLBACK = 1, 2, 4, 8
FLAG_STRIP_LEADING_SPACE = 16
TOKEN_EXISTS, TOKEN_SPECIAL, TOKEN_IN_MODEL, TOKEN_BYTE = 1, 2, 4, 8
ADDED_FLAGS = {"special": 1, "lstrip": 2, "rstrip": 4, "single_word": 8, "normalized": 16}


def compile_tokenizer(tokenizer_json: bytes | str | Path) -> bytes:
    """Compile the content of a tokenizer.json, or the file at a path.

    Truncation and padding settings are left out: the runtime checks lengths itself.

    Returns:
        The blob, little-endian, equal for equal input.

    Raises:
        BlinkError: not a tokenizer.json, or a kind that the runtime cannot reproduce.
    """
    if isinstance(tokenizer_json, Path):
        path = tokenizer_json
        try:
            tokenizer_json = path.read_bytes()
        except OSError as error:
            raise BlinkError(f"cannot read {path}: {error}") from error
    try:
        document = json.loads(tokenizer_json)
        return _compile_document(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BlinkError(
            f"tokenizer.json is malformed: {type(error).__name__}: {error}",
            hint="save it again with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        ) from error


def _compile_document(document: dict[str, Any]) -> bytes:
    model = document["model"]
    kinds = read_kinds(document)
    _check_model(model)
    vocab: dict[str, int] = model["vocab"]
    added = _read_added_tokens(document.get("added_tokens") or [], vocab)
    contents = {token["id"]: token["content"] for token in added}
    num_ids = 1 + max((*vocab.values(), *contents), default=-1)
    if num_ids > MAX_IDS:
        raise unsupported("a token id above 2^20 - 3", num_ids - 1)
    if min(vocab.values(), default=0) < 0 or len(set(vocab.values())) != len(vocab):
        raise BlinkError("tokenizer.json: two vocabulary entries share an id, or one is negative")
    token_offsets, token_bytes, token_flags, byte_ids = _token_tables(
        vocab, contents, {t["id"] for t in added if t["special"]}, num_ids, kinds, model
    )
    merges = _read_merges(model["merges"], vocab)
    added_records, added_bytes = _added_tables(added)
    prefix, suffix = read_template(document.get("post_processor"))
    if not all(0 <= id_ < num_ids for id_ in (*prefix, *suffix)):
        raise unsupported("a post-processor with ids outside the vocabulary", [*prefix, *suffix])
    unknown = model.get("unk_token")
    if unknown is not None and unknown not in vocab:
        raise unsupported("an unk_token that is not in the vocabulary", unknown)
    flags = (
        FLAG_IGNORE_MERGES * bool(model.get("ignore_merges"))
        | FLAG_ADD_PREFIX_SPACE * kinds.add_prefix_space
        | FLAG_FUSE_UNKNOWN * bool(model.get("fuse_unk"))
        | FLAG_BYTE_FALLBACK * bool(model.get("byte_fallback"))
        | FLAG_STRIP_LEADING_SPACE * kinds.strips_leading_space
    )
    fields = (
        *(0, kinds.alphabet, kinds.pretokenizer, kinds.normalizer, flags),
        *(num_ids, len(merges) // 3, len(added), len(prefix), len(suffix)),
        NO_ID if unknown is None else vocab[unknown],
    )
    return _assemble(
        fields,
        (
            _little_endian(token_offsets),
            token_bytes,
            bytes(token_flags),
            _little_endian(merges),
            _little_endian(byte_ids),
            added_records,
            added_bytes,
            struct.pack(f"<{len(prefix) + len(suffix)}I", *prefix, *suffix),
        ),
    )


def _little_endian(values: array[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def _assemble(fields: tuple[int, ...], sections: tuple[bytes, ...]) -> bytes:
    """Put header and aligned sections together; the checksum covers all that follows it."""
    ranges, body, offset = [], [], HEADER_BYTES
    for section in sections:
        ranges += [offset, len(section)]
        padding = -len(section) % SECTION_ALIGNMENT_BYTES
        body += [section, bytes(padding)]
        offset += len(section) + padding
    checked = struct.pack(f"<{len(fields)}I{len(ranges)}Q", *fields, *ranges)
    head_bytes = len(MAGIC) + 4 + 4 + 8 + 4
    checked = b"".join([checked.ljust(HEADER_BYTES - head_bytes, b"\0"), *body])
    return (
        MAGIC + struct.pack("<IIQI", VERSION, HEADER_BYTES, offset, zlib.crc32(checked)) + checked
    )


def _check_model(model: dict[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE":
        raise unsupported("model type", model["type"])
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise unsupported(f"model.{field}", model[field])


def _read_added_tokens(tokens: list[dict[str, Any]], vocab: dict[str, int]) -> list[dict[str, Any]]:
    """Check ids as the library would give them; return special tokens first, else in file order."""
    seen: dict[str, int] = {}
    taken = {id_: content for content, id_ in vocab.items()}
    for token in tokens:
        content, given = token["content"], token["id"]
        if not content:
            continue
        expected = vocab.get(content)
        if expected is None:
            expected = max(len(vocab), max(seen.values(), default=-1) + 1)
        if content in seen or expected != given or taken.setdefault(given, content) != content:
            raise unsupported("an added token that is repeated or has another's id", token)
        seen[content] = given
    kept = [token for token in tokens if token["content"]]
    return [t for t in kept if t["special"]] + [t for t in kept if not t["special"]]


def _added_tables(added: list[dict[str, Any]]) -> tuple[bytes, bytes]:
    records, contents = [], bytearray()
    for token in added:
        content = token["content"].encode()
        if len(content) > MAX_TOKEN_BYTES:
            raise unsupported("an added token longer than 65,536 bytes", token["id"])
        flags = sum(bit for name, bit in ADDED_FLAGS.items() if token[name])
        records.append(struct.pack("<4I", token["id"], flags, len(contents), len(content)))
        contents += content
    return b"".join(records), bytes(contents)


def _byte_level_alphabet() -> dict[str, int]:
    """Return the character that stands for each byte in a byte-level vocabulary -> that byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet


def _token_tables(
    vocab: dict[str, int],
    added: dict[int, str],
    special: set[int],
    num_ids: int,
    kinds: TokenizerKinds,
    model: dict[str, Any],
) -> tuple[array[int], bytes, bytearray, array[int]]:
    """Return offsets, bytes and flags of every id, and the id of every byte."""
    names = dict.fromkeys(range(num_ids), "")
    flags = bytearray(num_ids)
    for name, id_ in vocab.items():
        names[id_], flags[id_] = name, TOKEN_EXISTS | TOKEN_IN_MODEL
    for id_, content in added.items():
        names[id_] = content
        flags[id_] |= TOKEN_EXISTS
    for id_ in special:
        flags[id_] |= TOKEN_SPECIAL
    alphabet = _byte_level_alphabet() if kinds.alphabet == ALPHABET_BYTES else {}
    byte_names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    offsets, chunks, total = array("I", [0]), [], 0
    for id_ in range(num_ids):
        name = names[id_]
        if kinds.alphabet == ALPHABET_CHARACTERS:
            chunk = name.encode()
            if name in byte_names:
                # Text "<0x41>" never becomes this id by merges of its characters alone.
                chunk, flags[id_] = bytes([byte_names[name]]), flags[id_] | TOKEN_BYTE
            elif re.fullmatch(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>", name):
                # The library's decoder takes these spellings for bytes, its encoder does not.
                raise unsupported("a byte token that is not spelled <0xNN> in capitals", name)
        else:
            try:
                chunk = bytes(map(alphabet.__getitem__, name))
            except KeyError:  # not spelled in the alphabet: no merge reaches it
                chunk, flags[id_] = name.encode(), flags[id_] & ~TOKEN_IN_MODEL
        if len(chunk) > MAX_TOKEN_BYTES:
            raise unsupported("a token longer than 65,536 bytes", id_)
        chunks.append(chunk)
        total += len(chunk)
        offsets.append(total)
    if kinds.alphabet == ALPHABET_BYTES:
        by_byte = {byte: vocab.get(char, NO_ID) for char, byte in alphabet.items()}
    else:
        by_byte = {byte: vocab.get(name, NO_ID) for name, byte in byte_names.items()}
    byte_ids = array("I", [by_byte[byte] for byte in range(256)])
    return offsets, b"".join(chunks), flags, byte_ids


def _read_merges(merges: list[Any], vocab: dict[str, int]) -> array[int]:
    """Return left, right, merged of every merge by rank; merges are "a b" or ["a", "b"]."""
    if len(merges) > MAX_MERGES:
        raise unsupported("more than 2^24 merges", len(merges))
    triples = array("I")
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        try:
            triples.extend((vocab[left], vocab[right], vocab[left + right]))
        except KeyError as error:
            raise BlinkError(
                f"tokenizer.json: merge {rank} needs {error}, which is not in the vocabulary"
            ) from error
    return triples
