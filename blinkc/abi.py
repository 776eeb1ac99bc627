"""Reads abi.h, the single truth about the ring: header text -> struct sizes and constants."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from blinkc.errors import InternalError
from blinkc.resources import include_folder

if TYPE_CHECKING:
    import cffi

_DEFINE = re.compile(r"#define\s+(BLINK_\w+)\s+(0[xX][0-9a-fA-F]+|\d+)[uUlL]*\s*$", re.MULTILINE)
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
def ffi() -> cffi.FFI:
    """Return a cffi FFI that knows abi.h's structs (sizes and offsets, no library)."""
    import cffi

    builder = cffi.FFI()
    lines = [line for line in _header_text().splitlines() if not line.lstrip().startswith("#")]
    builder.cdef("\n".join(lines))
    return builder


def size_of(struct: str) -> int:
    """Return `sizeof(struct)` in bytes."""
    return int(ffi().sizeof(struct))


def offset_of(struct: str, field: str) -> int:
    """Return the byte offset of a field."""
    return int(ffi().offsetof(struct, field))


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
