"""Generate unicode_tables.cc: every table is read off the `tokenizers` library itself.

Input: the installed `tokenizers` package, probed with every Unicode scalar value. Output: C++
source on stdout or in the file named by `--output`. Asking the library, not a copy of the Unicode
database, is what keeps the classes equal to those that its three engines use (Oniguruma for split
patterns, Rust's `regex` for added tokens, Rust's `char::is_numeric` for digits), whatever Unicode
version each of them has.
"""

from __future__ import annotations

import argparse
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

SCALARS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
BATCH = 4096
BLOCK = 256
HANGUL = range(0xAC00, 0xD7A4)
# Bit order equals CharClass in unicode.h.
CLASS_PATTERNS = [
    r"[\p{Lu}\p{Lt}]",
    r"\p{Ll}",
    r"[\p{Lm}\p{Lo}]",
    r"\p{M}",
    r"\p{N}",
    r"\p{P}",
    r"\p{S}",
    r"\s",
]
NUMERIC_BIT = 8
WORD_BIT = 9
STRIP_BIT = 10
NFC_UNSAFE_BIT = 11


def batches() -> Iterator[list[int]]:
    for start in range(0, len(SCALARS), BATCH):
        yield SCALARS[start : start + BATCH]


def chars_matching(pattern: str) -> set[int]:
    """Return the code points that one Oniguruma character class matches."""
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    found: set[int] = set()
    for batch in batches():
        for piece, _ in split.pre_tokenize_str("".join(map(chr, batch))):
            found.update(map(ord, piece))
    return found


def numeric_chars() -> set[int]:
    """Return the code points that the `Digits` pre-tokenizer splits off."""
    split = pre_tokenizers.Digits(individual_digits=True)
    found: set[int] = set()
    for batch in batches():
        for piece, _ in split.pre_tokenize_str("".join(f"a{chr(c)}a" for c in batch)):
            if len(piece) == 1 and piece != "a":
                found.add(ord(piece))
    return found


def added_token_probe(token: AddedToken) -> Tokenizer:
    probe = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    probe.add_tokens([token])
    return probe


def word_chars() -> set[int]:
    """Return the code points that stop a `single_word` added token before them."""
    probe = added_token_probe(AddedToken("\x01", single_word=True, normalized=False))
    found: set[int] = set()
    for batch in batches():
        text = "".join(f" \x01{chr(c)}" for c in batch)
        encoding = probe.encode(text)
        matched = {a for i, (a, _) in zip(encoding.ids, encoding.offsets, strict=True) if i == 1}
        found.update(c for k, c in enumerate(batch) if 3 * k + 1 not in matched)
    found.discard(1)
    return found


def strip_chars() -> set[int]:
    """Return the code points that an `lstrip` added token swallows."""
    probe = added_token_probe(AddedToken("\x01", lstrip=True, normalized=False))
    found: set[int] = set()
    for batch in batches():
        text = "".join(f"a{chr(c)}\x01" for c in batch)
        encoding = probe.encode(text)
        starts = {a for i, (a, _) in zip(encoding.ids, encoding.offsets, strict=True) if i == 1}
        found.update(c for k, c in enumerate(batch) if 3 * k + 1 in starts)
    found.discard(1)
    return found


def decompositions() -> dict[int, str]:
    """Return the full canonical decomposition of every code point that has one, Hangul left out."""
    nfd = normalizers.NFD()
    found = {}
    for c in SCALARS:
        text = nfd.normalize_str(chr(c))
        if text != chr(c) and c not in HANGUL:
            found[c] = text
    return found


def combining_classes(decomposed: dict[int, str]) -> dict[int, int]:
    """Return the non-zero canonical combining class of every code point, by how NFD reorders it.

    A mark of class r followed by c is swapped exactly when 0 < class(c) < r, so the greatest r
    that is not swapped is c's class.
    """
    nfd = normalizers.NFD()
    low, high = "\u0334", "\u0345"  # classes 1 and 240: the least and the greatest
    marks = []
    for c in SCALARS:
        x = chr(c)
        swapped = nfd.normalize_str(high + x) != high + x or nfd.normalize_str(x + low) != x + low
        if swapped and c not in decomposed and c not in HANGUL:
            marks.append(c)
    # Python's database may know marks that the library does not, which cannot be references.
    references: dict[int, str] = {}
    for c in marks:
        if r := unicodedata.combining(chr(c)):
            references.setdefault(r, chr(c))
    found = {}
    for c in marks:
        pairs = ((r, mark + chr(c)) for r, mark in references.items())
        found[c] = max(r for r, pair in pairs if nfd.normalize_str(pair) == pair)
    return found


def compositions(decomposed: dict[int, str]) -> dict[tuple[int, int], int]:
    """Return the primary composites: (first, second) -> composed, Hangul left out."""
    nfc = normalizers.NFC()
    found = {}
    for c, text in decomposed.items():
        if len(text) < 2 or nfc.normalize_str(chr(c)) != chr(c):
            continue
        first, second = nfc.normalize_str(text[:-1]), text[-1]
        if len(first) == 1 and nfc.normalize_str(first + second) == chr(c):
            found[ord(first), ord(second)] = c
    return found


def two_stage(values: list[int]) -> tuple[list[int], list[int]]:
    """Return (index of each block of 256, distinct blocks one after another)."""
    blocks: dict[tuple[int, ...], int] = {}
    index = []
    for start in range(0, 0x110000, BLOCK):
        block = tuple(values[start : start + BLOCK])
        index.append(blocks.setdefault(block, len(blocks)))
    return index, [value for block in blocks for value in block]


def array(kind: str, name: str, values: Iterable[int]) -> str:
    items = [f"{value}," for value in values]
    lines, line = [], "   "
    for item in items:
        if len(line) + 1 + len(item) > 100:
            lines.append(line)
            line = "   "
        line += " " + item
    lines.append(line)
    body = "\n".join(lines)
    return f"const {kind} {name}[{len(items)}] = {{\n{body}\n}};\n"


def render() -> str:
    """Probe the library and return the C++ source."""
    classes = [0] * 0x110000
    for bit, pattern in enumerate(CLASS_PATTERNS):
        for c in chars_matching(pattern):
            classes[c] |= 1 << bit
    for bit, chars in (
        (NUMERIC_BIT, numeric_chars()),
        (WORD_BIT, word_chars()),
        (STRIP_BIT, strip_chars()),
    ):
        for c in chars:
            classes[c] |= 1 << bit
    decomposed = decompositions()
    ccc = combining_classes(decomposed)
    composed = compositions(decomposed)
    nfc = normalizers.NFC()
    unsafe = set(ccc) | {b for _, b in composed}
    unsafe |= {c for c in decomposed if nfc.normalize_str(chr(c)) != chr(c)}
    unsafe |= set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3))
    # A composite whose last part can still combine is safe itself, but one that starts with a mark
    # is not a boundary.
    unsafe |= {c for c, text in decomposed.items() if ord(text[0]) in ccc}
    for c in unsafe:
        classes[c] |= 1 << NFC_UNSAFE_BIT
    class_index, class_blocks = two_stage(classes)
    ccc_index, ccc_blocks = two_stage([ccc.get(c, 0) for c in range(0x110000)])
    keys, offsets, chars = [], [0], []
    for c in sorted(decomposed):
        keys.append(c)
        chars.extend(map(ord, decomposed[c]))
        offsets.append(len(chars))
    pairs = sorted(composed)
    parts = [
        f"// Generated by generate_unicode_tables.py from tokenizers {tokenizers.__version__};"
        " do not edit.\n// clang-format off\n",
        '#include "unicode_tables.h"\n',
        "namespace blink::unicode {\n",
        array("uint8_t", "kClassIndex", class_index),
        array("uint16_t", "kClassBlocks", class_blocks),
        array("uint8_t", "kCombiningIndex", ccc_index),
        array("uint8_t", "kCombiningBlocks", ccc_blocks),
        array("uint32_t", "kDecompositionKeys", keys),
        array("uint16_t", "kDecompositionOffsets", offsets),
        array("uint32_t", "kDecompositionChars", chars),
        array("uint64_t", "kCompositionPairs", ((a << 32) | b for a, b in pairs)),
        array("uint32_t", "kCompositionResults", (composed[pair] for pair in pairs)),
        f"const uint32_t kNumDecompositions = {len(keys)};\n",
        f"const uint32_t kNumCompositions = {len(pairs)};\n",
        "}  // namespace blink::unicode",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="file to write; stdout without it")
    arguments = parser.parse_args()
    text = render()
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
