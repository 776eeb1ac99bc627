"""Reads abi.h, the single truth about the ring: header text -> struct sizes and constants."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from blinkc.errors import InternalError
from blinkc.resources import include_folder

_DEFINE = re.compile(r"#define\s+(BLINK_\w+)\s+(0[xX][0-9a-fA-F]+|\d+)[uUlL]*\s*$", re.MULTILINE)
_STRUCT = re.compile(r"typedef struct \w+ \{([^}]*)\} (\w+);")
_FIELD = re.compile(r"(\w+)\s+(\w+)(?:\[(\d+)\])?")
_NUMBERS: dict[str, Any] = {
    "uint64_t": ctypes.c_uint64,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
}
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


_LINE_BYTES = 64
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class RingLayout:
    """Byte offsets of a ring's areas and the size of the whole; names as in abi.hpp."""

    front_end_offset: int
    command_offset: int
    request_offset: int
    status_offset: int
    prompt_offset: int
    output_offset: int
    trace_offset: int
    ring_bytes: int


@cache
def constants() -> dict[str, int]:
    """Return every integer `#define` of abi.h."""
    return {name: int(value, 0) for name, value in _DEFINE.findall(_header_text())}


@cache
def structs() -> dict[str, type[ctypes.Structure]]:
    """Return every struct of abi.h as a ctypes class, fields in order, C's alignment.

    Raises:
        InternalError: the header has a field that is no fixed-width number, array or known struct.
    """
    found: dict[str, type[ctypes.Structure]] = {}
    for body, name in _STRUCT.findall(_header_text()):
        fields = []
        for field in filter(None, (part.strip() for part in body.split(";"))):
            match = _FIELD.fullmatch(field)
            kind = (_NUMBERS.get(match[1]) or found.get(match[1])) if match else None
            if match is None or kind is None:
                raise InternalError(f"abi.h, struct {name}: cannot read {field!r}")
            fields.append((match[2], kind * int(match[3]) if match[3] else kind))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def size_of(struct: str) -> int:
    """Return `sizeof(struct)` in bytes."""
    return ctypes.sizeof(structs()[struct])


def offset_of(struct: str, field: str) -> int:
    """Return the byte offset of a field."""
    return int(getattr(structs()[struct], field).offset)


def logprobs_bytes() -> int:
    """Return the bytes of a row of step.h's `sampled_logprobs`: 32-bit values, the chosen token's
    and pairs of id and logprob."""
    return 4 * (1 + 2 * constants()["BLINK_MAX_TOP_LOGPROBS"])


def ring_layout(
    *,
    num_slots: int,
    num_front_ends: int,
    max_prompt_tokens: int,
    max_output_tokens: int,
    output_record_bytes: int,
    trace_capacity: int,
) -> RingLayout:
    """Lay a ring out as `blink::ring_layout_from_sizes` of abi.hpp does; a test compares them."""
    sizes_and_alignments = (
        ("front_end_offset", size_of("blink_ring_header"), _LINE_BYTES),
        ("command_offset", num_front_ends * size_of("blink_front_end"), _LINE_BYTES),
        ("request_offset", num_slots * size_of("blink_slot_command"), _LINE_BYTES),
        ("status_offset", num_slots * size_of("blink_slot_request"), _PAGE_BYTES),
        ("prompt_offset", num_slots * size_of("blink_slot_status"), _PAGE_BYTES),
        ("output_offset", num_slots * max_prompt_tokens * 4, _PAGE_BYTES),
        ("trace_offset", num_slots * max_output_tokens * output_record_bytes, _PAGE_BYTES),
        ("ring_bytes", trace_capacity * size_of("blink_trace_record"), _PAGE_BYTES),
    )
    offsets: dict[str, int] = {}
    position = 0
    for name, size_before, alignment in sizes_and_alignments:
        position = -(-(position + size_before) // alignment) * alignment
        offsets[name] = position
    return RingLayout(**offsets)


@cache
def _header_text() -> str:
    path = include_folder() / "blink" / "abi.h"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InternalError(f"{path} cannot be read: {error}") from error
    return _COMMENT.sub(" ", text)
