"""Reads `--shapes`: the text of a spec -> `ShapesSpec`, or an error that points at the character.

    SPEC   := "auto" | CLAUSE ("/" CLAUSE)*         decode:1..32@64..8192x2/prefill:auto
    CLAUSE := KIND ":" ("auto" | AXIS "@" AXIS)     batch buckets @ seqlen buckets
    KIND   := "prefill" | "decode"
    AXIS   := ITEM ("," ITEM)*                      1,2,4..32+4
    ITEM   := SIZE [".." SIZE ["+" STEP | "x" FACTOR]]
    SIZE   := NUMBER ["k"] | "max"                  2k is 2048

A range holds both its ends; its step is 1 unless `+` or `x` says otherwise. A kind may stand in
several clauses, whose grids are united; a kind that is not named is `auto`. `max` is the limit of
that axis: --max-batch, and --max-prefill-tokens for prefill or --max-seqlen for decode. Spaces are
ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from blinkc.errors import BlinkError

Kind = Literal["prefill", "decode"]
KINDS: tuple[Kind, ...] = ("prefill", "decode")
MAX_SPEC_CHARACTERS = 4096
MAX_SIZE = 1 << 24  # of any batch or length; ids and counts are 24-bit in the ring

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+)(?P<kilo>[kK](?![A-WYZa-wyz0-9_]))?|(?P<word>[A-Za-z_]+)|"
    r"(?P<mark>\.\.|[/:@,+])|(?P<end>$))"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeSpec:
    """One size as written: `value` is None for `max`; `column` counts characters from 0."""

    value: int | None
    column: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeSpec:
    """`first..last`, by `+ step` or `x step`; a single size has first == last."""

    first: SizeSpec
    last: SizeSpec
    geometric: bool = False
    step: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ClauseSpec:
    """One grid of one kind; `auto` has no ranges."""

    kind: Kind
    auto: bool
    batch: tuple[RangeSpec, ...] = ()
    seqlen: tuple[RangeSpec, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapesSpec:
    """A parsed spec; `text` is kept for errors found later, when the limits are known."""

    text: str
    clauses: tuple[ClauseSpec, ...]

    def of_kind(self, kind: Kind) -> tuple[ClauseSpec, ...]:
        """Return the clauses of `kind`; none means auto."""
        return tuple(c for c in self.clauses if c.kind == kind and not c.auto)

    def largest(self, kind: Kind, axis: Literal["batch", "seqlen"]) -> int | None:
        """Return the largest size written for `axis`; None where `auto` or `max` stands instead."""
        sizes = [
            r.last.value
            for clause in self.of_kind(kind)
            for r in (clause.batch if axis == "batch" else clause.seqlen)
        ]
        if not sizes or any(size is None for size in sizes):
            return None
        return max(size for size in sizes if size is not None)


class ShapesError(BlinkError):
    """A spec that cannot be read or does not fit the limits; its text shows the place.

    Args:
        text: the whole spec.
        column: offset of the character, from 0.
        problem: what is wrong there.
    """

    def __init__(self, text: str, column: int, problem: str, *, hint: str = "") -> None:
        self.text = text
        self.column = column
        self.problem = problem
        # One line around the place, so that a long spec does not wrap away from its caret.
        start = max(0, column - 60)
        window = text[start : start + 76].replace("\t", " ").replace("\n", " ")
        lead = "..." if start else ""
        caret = " " * (len(lead) + column - start) + "^"
        super().__init__(
            f"--shapes, character {column + 1}: {problem}\n  {lead}{window}\n  {caret}",
            hint=hint
            or "grammar: prefill:BATCH@TOKENS/decode:BATCH@SEQLEN, or auto (blinkc compile --help)",
        )


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # "number", "word", "mark" or "end"
    text: str
    value: int
    column: int


def parse_shapes(text: str) -> ShapesSpec:
    """Parse a spec.

    Raises:
        ShapesError: the text is not in the grammar.
    """
    if len(text) > MAX_SPEC_CHARACTERS:
        raise ShapesError(
            text, MAX_SPEC_CHARACTERS, f"longer than {MAX_SPEC_CHARACTERS} characters"
        )
    return _Parser(text).parse()


def _tokenize(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = 0
    while not tokens or tokens[-1].kind != "end":
        match = _TOKEN.match(text, position)
        if match is None:
            column = position + len(text[position:]) - len(text[position:].lstrip())
            raise ShapesError(text, column, f"unexpected {text[column]!r}")
        kind = match.lastgroup or "end"
        kind = "number" if kind == "kilo" else kind
        column = match.start(kind)
        value = 0
        if kind == "number":
            digits = match["number"]
            value = (
                int(digits) * (1024 if match["kilo"] else 1) if len(digits) < 10 else MAX_SIZE + 1
            )
            if not 1 <= value <= MAX_SIZE:
                raise ShapesError(text, column, f"sizes go from 1 to {MAX_SIZE}")
        tokens.append(_Token(kind, match[kind], value, column))
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokenize(text)
        self._next = 0

    def parse(self) -> ShapesSpec:
        if self._peek().text == "auto":
            self._take()
            self._expect_end()
            return ShapesSpec(text=self._text, clauses=())
        clauses = [self._clause()]
        while self._take_if("/"):
            clauses.append(self._clause())
        self._expect_end()
        return ShapesSpec(text=self._text, clauses=tuple(clauses))

    def _clause(self) -> ClauseSpec:
        token = self._take()
        kind: Kind
        if token.text == "prefill":
            kind = "prefill"
        elif token.text == "decode":
            kind = "decode"
        else:
            raise self._error(token, 'expected "prefill", "decode" or "auto"')
        if not self._take_if(":"):
            raise self._error(self._peek(), f'expected ":" after "{kind}"')
        if self._peek().text == "auto":
            self._take()
            return ClauseSpec(kind=kind, auto=True)
        batch = self._axis("a batch size")
        if not self._take_if("@"):
            raise self._error(self._peek(), 'expected "@" between batch sizes and lengths')
        return ClauseSpec(kind=kind, auto=False, batch=batch, seqlen=self._axis("a length"))

    def _axis(self, what: str) -> tuple[RangeSpec, ...]:
        items = [self._item(what)]
        while self._take_if(","):
            items.append(self._item(what))
        return tuple(items)

    def _item(self, what: str) -> RangeSpec:
        first = self._size(what)
        if not self._take_if(".."):
            return RangeSpec(first=first, last=first)
        last = self._size(f"{what} to end the range")
        if first.value is None or (last.value is not None and last.value < first.value):
            raise ShapesError(self._text, last.column, "a range must go upwards")
        if self._take_if("+"):
            return RangeSpec(first=first, last=last, step=self._number("a step after +").value)
        if self._peek().text == "x":
            self._take()
            factor = self._number("a factor after x")
            if factor.value < 2:
                raise self._error(factor, "a factor must be at least 2")
            return RangeSpec(first=first, last=last, geometric=True, step=factor.value)
        return RangeSpec(first=first, last=last)

    def _size(self, what: str) -> SizeSpec:
        if self._peek().text == "max":
            return SizeSpec(value=None, column=self._take().column)
        token = self._number(f'{what}, or "max"')
        return SizeSpec(value=token.value, column=token.column)

    def _number(self, what: str) -> _Token:
        token = self._take()
        if token.kind != "number":
            raise self._error(token, f"expected {what}")
        return token

    def _expect_end(self) -> None:
        if self._peek().kind != "end":
            raise self._error(self._peek(), "expected the end of the spec here")

    def _error(self, token: _Token, problem: str) -> ShapesError:
        found = "the end" if token.kind == "end" else f'"{token.text}"'
        return ShapesError(self._text, token.column, f"{problem}, found {found}")

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        if token.kind != "end":
            self._next += 1
        return token

    def _take_if(self, mark: str) -> bool:
        if self._peek().kind == "mark" and self._peek().text == mark:
            self._next += 1
            return True
        return False
