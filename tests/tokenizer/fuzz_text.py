# ruff: noqa: RUF001 (letters that look like others are what the texts are for)
"""Random texts for the tokenizer: seed -> strings of many scripts, code, controls, hostile runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

# Ranges of code points, each a script or a kind of character that some split pattern treats apart.
RANGES: tuple[tuple[int, int], ...] = (
    (0x20, 0x7E),  # ASCII
    (0x00, 0x1F),  # C0 controls
    (0x7F, 0x9F),  # DEL and C1 controls, with U+0085 among them
    (0xA0, 0xFF),  # Latin-1, with no-break space and soft hyphen
    (0x100, 0x24F),  # Latin extended, with U+017F and title case
    (0x250, 0x2FF),  # phonetic and modifier letters
    (0x300, 0x36F),  # combining marks
    (0x370, 0x3FF),  # Greek
    (0x400, 0x52F),  # Cyrillic
    (0x590, 0x5FF),  # Hebrew with points
    (0x600, 0x6FF),  # Arabic with its digits
    (0x900, 0x97F),  # Devanagari: letters, vowel signs, digits
    (0xB80, 0xBFF),  # Tamil
    (0xE00, 0xE7F),  # Thai
    (0xF00, 0xFFF),  # Tibetan
    (0x10A0, 0x10FF),  # Georgian
    (0x1100, 0x11FF),  # Hangul jamo: compose
    (0x1E00, 0x1FFF),  # Latin and Greek with marks
    (0x2000, 0x206F),  # spaces, joiners, bidi controls
    (0x2070, 0x209F),  # superscripts: numbers that are no digits
    (0x20D0, 0x20FF),  # enclosing marks
    (0x2100, 0x218F),  # letterlike symbols and Roman numerals, with singleton decompositions
    (0x2190, 0x27BF),  # arrows, mathematics, dingbats
    (0x3000, 0x30FF),  # CJK signs, Hiragana, Katakana
    (0x4E00, 0x9FFF),  # Han, to the end of the block and past U+9FA5
    (0xAC00, 0xD7A3),  # Hangul
    (0xE000, 0xE0FF),  # private use
    (0xF900, 0xFAFF),  # compatibility Han: decompose
    (0xFE00, 0xFE0F),  # variation selectors
    (0xFF00, 0xFFEF),  # full width
    (0x10400, 0x1044F),  # Deseret: case outside the basic plane
    (0x11DE0, 0x11DE9),  # digits newer than some Unicode tables
    (0x1D160, 0x1D1AF),  # musical signs: decompose, composition excluded
    (0x1D400, 0x1D7FF),  # mathematical letters and digits
    (0x1F300, 0x1FAFF),  # emoji
    (0xE0000, 0xE007F),  # tags
    (0x10FFF0, 0x10FFFF),  # the end
)
WORDS = (
    *("the", "quick", "Brown", "FOX", "jumps", "over", "internationalization", "don't", "WE'LL"),
    *("I'm", "'Re", "'ſ", "x'S", "it's", "they'VE", "snake_case", "camelCase", "HTTPServer"),
    *("naïve", "Straße", "Ĳssel", "être", "déjà", "привет", "мир", "γειά", "שלום", "مرحبا", "नमस्ते"),
    *(
        "สวัสดี",
        "こんにちは",
        "世界",
        "안녕하세요",
        "x²",
        "½",
        "Ⅳ",
        "１２３",
        "٣٤٥",
        "3.14159",
        "1234567",
    ),
    *(
        "->",
        "=>",
        "!=",
        "===",
        "//",
        "/*",
        "*/",
        "::",
        "...",
        "—",
        "“",
        "”",
        "…",
        "😀",
        "👩‍👩‍👧‍👦",
        "🇫🇷",
    ),
    *("def f(x):", "return", "#include <vector>", "{\n", "}\r\n", "\t", "&&", "||", "<|", "|>"),
    *(
        "e\u0301",
        "a\u0308\u0323",
        "\u1112\u1161\u11ab",
        "\u212b",
        "\u0958",
        "ﬁ",
        "\u00ad",
        "\ufeff",
    ),
)
SPACES = (
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x0b",
    " \n ",
    "\n\n",
)
REPEATED = (
    *("a", "A", "1", " ", "\n", "\r", "\t", ".", "-", "'", "é", "\u0301", "ª", "Aa", "ªA", "😀"),
    *(
        "中",
        "あ",
        "\u200d",
        "\u00a0",
        "ab",
        " a",
        "a ",
        "\n ",
        "'s",
        "<",
        "<|",
        "\x00",
        "ǅ",
        "/",
        "aB1 ",
    ),
)


def _piece(random_: random.Random, specials: Sequence[str]) -> str:
    kind = random_.random()
    if kind < 0.35:
        return random_.choice(WORDS)
    if kind < 0.6:
        return random_.choice(SPACES)
    if kind < 0.85:
        low, high = random_.choice(RANGES)
        return "".join(chr(random_.randint(low, high)) for _ in range(random_.randint(1, 8)))
    if kind < 0.90:
        return random_.choice(REPEATED) * random_.randint(1, 60)
    if kind < 0.93:
        return str(random_.randint(0, 10 ** random_.randint(1, 12)))
    if kind < 0.97 and specials:
        token = random_.choice(specials)
        return token if random_.random() < 0.8 else token[: random_.randint(1, len(token))]
    point = random_.randrange(0x110000 - 0x800)
    return chr(point if point < 0xD800 else point + 0x800)


def fuzz_texts(seed: int, count: int, specials: Sequence[str] = ()) -> Iterator[str]:
    """Yield `count` texts of up to a few hundred characters; equal seeds give equal texts."""
    random_ = random.Random(seed)
    for _ in range(count):
        pieces = int(random_.expovariate(1 / 10)) + 1
        yield "".join(_piece(random_, specials) for _ in range(pieces))
