"""Compile a tokenizer: tokenizer.json -> the binary blob that the runtime's tokenizer loads.

The layout is `BlobHeader` in runtime/tokenizer/blob.h. Equal input gives equal bytes. Kinds that
the runtime cannot reproduce bit for bit raise `BlinkError`, which names what is not supported.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blinkc.errors import BlinkError

MAGIC = b"BLINKTOK"
VERSION = 1
HEADER_BYTES = 256
SECTION_ALIGNMENT_BYTES = 64
NO_ID = 0xFFFFFFFF
MAX_IDS = (1 << 20) - 1
MAX_MERGES = 1 << 24
MAX_TOKEN_BYTES = 1 << 16
LOW_BLOCK = "\u2581"

ALPHABET_BYTES, ALPHABET_CHARACTERS = 0, 1
GPT2, DIGITS_GPT2, LLAMA3, QWEN, O200K, DEEPSEEK_V3, WHOLE = range(7)
NORMALIZE_NONE, NORMALIZE_NFC, NORMALIZE_SPACE_TO_LOW_BLOCK = range(3)
FLAG_IGNORE_MERGES, FLAG_ADD_PREFIX_SPACE, FLAG_FUSE_UNKNOWN, FLAG_BYTE_FALLBACK = 1, 2, 4, 8
TOKEN_EXISTS, TOKEN_SPECIAL, TOKEN_IN_MODEL, TOKEN_BYTE = 1, 2, 4, 8
ADDED_FLAGS = {"special": 1, "lstrip": 2, "rstrip": 4, "single_word": 8, "normalized": 16}

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
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*|"
        r"\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+",
    ): DEEPSEEK_V3,
}
HINT = "the runtime falls back to the `tokenizers` library for this tokenizer"


def _unsupported(what: str, value: object) -> BlinkError:
    text = json.dumps(value, ensure_ascii=True) if not isinstance(value, str) else value
    if len(text) > 300:
        text = text[:300] + "..."
    return BlinkError(f"tokenizer.json: {what} is not supported: {text}", hint=HINT)


def compile_tokenizer(tokenizer_json: bytes | str | Path) -> bytes:
    """Compile the content of a tokenizer.json, or the file at a path.

    Truncation and padding settings are left out: the runtime checks lengths itself.

    Returns:
        The blob, little-endian, equal for equal input.

    Raises:
        BlinkError: not a tokenizer.json, or a kind that the runtime cannot reproduce.
    """
    if isinstance(tokenizer_json, Path):
        try:
            tokenizer_json = tokenizer_json.read_bytes()
        except OSError as error:
            raise BlinkError(f"cannot read {tokenizer_json}: {error}") from error
    try:
        document = json.loads(tokenizer_json)
        return _compile_document(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BlinkError(
            f"tokenizer.json is malformed: {type(error).__name__}: {error}",
            hint="save it again with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kinds:
    """What the pipeline around the model does, in the runtime's terms."""

    alphabet: int
    pretokenizer: int
    normalizer: int
    add_prefix_space: bool


def _compile_document(document: dict[str, Any]) -> bytes:
    model = document["model"]
    kinds = _read_kinds(document)
    _check_model(model)
    vocab: dict[str, int] = model["vocab"]
    added = _read_added_tokens(document.get("added_tokens") or [], vocab)
    contents = {token["id"]: token["content"] for token in added}
    num_ids = 1 + max((*vocab.values(), *contents), default=-1)
    if num_ids > MAX_IDS:
        raise _unsupported("a token id above 2^20 - 3", num_ids - 1)
    if min(vocab.values(), default=0) < 0 or len(set(vocab.values())) != len(vocab):
        raise BlinkError("tokenizer.json: two vocabulary entries share an id, or one is negative")
    token_offsets, token_bytes, token_flags, byte_ids = _token_tables(
        vocab, contents, {t["id"] for t in added if t["special"]}, num_ids, kinds, model
    )
    merges = _read_merges(model["merges"], vocab)
    added_records, added_bytes = _added_tables(added)
    prefix, suffix = _read_template(document.get("post_processor"))
    unknown = model.get("unk_token")
    if unknown is not None and unknown not in vocab:
        raise _unsupported("an unk_token that is not in the vocabulary", unknown)
    flags = (
        FLAG_IGNORE_MERGES * bool(model.get("ignore_merges"))
        | FLAG_ADD_PREFIX_SPACE * kinds.add_prefix_space
        | FLAG_FUSE_UNKNOWN * bool(model.get("fuse_unk"))
        | FLAG_BYTE_FALLBACK * bool(model.get("byte_fallback"))
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
        raise _unsupported("model type", model["type"])
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise _unsupported(f"model.{field}", model[field])


def _flatten(step: dict[str, Any] | None, children: str) -> list[dict[str, Any]]:
    """Return the steps of a possibly nested Sequence."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [leaf for child in step[children] for leaf in _flatten(child, children)]
    return [step]


def _read_kinds(document: dict[str, Any]) -> _Kinds:
    normalizer = _read_normalizer(_flatten(document.get("normalizer"), "normalizers"))
    steps = _flatten(document.get("pre_tokenizer"), "pretokenizers")
    decoders = _flatten(document.get("decoder"), "decoders")
    if [step["type"] for step in decoders] == ["ByteLevel"]:
        if normalizer == NORMALIZE_SPACE_TO_LOW_BLOCK:
            raise _unsupported("normalizer", document["normalizer"])
        pretokenizer, add_prefix_space = _read_byte_level_steps(steps)
        return _Kinds(
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
    if decoders != gemma_decoders:
        raise _unsupported("decoder", document.get("decoder"))
    if normalizer != NORMALIZE_SPACE_TO_LOW_BLOCK:
        raise _unsupported("normalizer", document.get("normalizer"))
    # No space is left by the normalizer, so that this split never splits.
    spaces = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    if steps not in ([], [spaces]):
        raise _unsupported("pre-tokenizer", steps)
    return _Kinds(
        alphabet=ALPHABET_CHARACTERS,
        pretokenizer=WHOLE,
        normalizer=normalizer,
        add_prefix_space=False,
    )


def _read_normalizer(steps: list[dict[str, Any]]) -> int:
    if not steps:
        return NORMALIZE_NONE
    if steps == [{"type": "NFC"}]:
        return NORMALIZE_NFC
    if steps == [{"type": "Replace", "pattern": {"String": " "}, "content": LOW_BLOCK}]:
        return NORMALIZE_SPACE_TO_LOW_BLOCK
    raise _unsupported("normalizer", steps)


def _read_byte_level_steps(steps: list[dict[str, Any]]) -> tuple[int, bool]:
    """Return (pre-tokenizer kind, add_prefix_space) of a chain that ends in ByteLevel."""
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise _unsupported("pre-tokenizer", steps)
    *splits, byte_level = steps
    add_prefix_space = bool(byte_level.get("add_prefix_space", True))
    if byte_level.get("use_regex", True):
        if not splits:
            return GPT2, add_prefix_space
        if splits == [{"type": "Digits", "individual_digits": True}] and not add_prefix_space:
            return DIGITS_GPT2, False
        raise _unsupported("pre-tokenizer", steps)
    patterns = tuple(_read_split(step) for step in splits)
    if patterns not in SPLIT_PATTERNS or add_prefix_space:
        raise _unsupported("pre-tokenizer", steps)
    return SPLIT_PATTERNS[patterns], False


def _read_split(step: dict[str, Any]) -> str:
    """Return the regex of a Split that makes every match, and all between, a piece."""
    if step["type"] != "Split" or "Regex" not in step["pattern"]:
        raise _unsupported("pre-tokenizer", step)
    isolated = step["behavior"] == "Isolated"
    # Removing what does not match is the same where the pattern matches every character; that of
    # DeepSeek does not, and is never written so.
    inverted = step["behavior"] == "Removed" and bool(step.get("invert"))
    if not (isolated or inverted) or (isolated and step.get("invert")):
        raise _unsupported("pre-tokenizer", step)
    return str(step["pattern"]["Regex"]) if isolated else _full_cover(step)


def _full_cover(step: dict[str, Any]) -> str:
    pattern = str(step["pattern"]["Regex"])
    if SPLIT_PATTERNS.get((pattern,)) is None:
        raise _unsupported("pre-tokenizer", step)
    return pattern


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
            raise _unsupported("an added token that is repeated or has another's id", token)
        seen[content] = given
    kept = [token for token in tokens if token["content"]]
    return [t for t in kept if t["special"]] + [t for t in kept if not t["special"]]


def _added_tables(added: list[dict[str, Any]]) -> tuple[bytes, bytes]:
    records, contents = [], bytearray()
    for token in added:
        content = token["content"].encode()
        if len(content) > MAX_TOKEN_BYTES:
            raise _unsupported("an added token longer than 65,536 bytes", token["id"])
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
    kinds: _Kinds,
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
        else:
            try:
                chunk = bytes(map(alphabet.__getitem__, name))
            except KeyError:  # not spelled in the alphabet: no merge reaches it
                chunk, flags[id_] = name.encode(), flags[id_] & ~TOKEN_IN_MODEL
        if len(chunk) > MAX_TOKEN_BYTES:
            raise _unsupported("a token longer than 65,536 bytes", id_)
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
        raise _unsupported("more than 2^24 merges", len(merges))
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


def _read_template(post_processor: dict[str, Any] | None) -> tuple[list[int], list[int]]:
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
                        raise _unsupported("post-processor", step)
                    seen_text = True
                else:
                    ids = step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
                    (after if seen_text else before).extend(ids)
            if not seen_text:
                raise _unsupported("post-processor", step)
        elif step["type"] in ("RobertaProcessing", "BertProcessing"):
            before, after = [step["cls"][1]], [step["sep"][1]]
        elif step["type"] != "ByteLevel":
            raise _unsupported("post-processor", step)
        prefix, suffix = before + prefix, suffix + after
    return prefix, suffix
