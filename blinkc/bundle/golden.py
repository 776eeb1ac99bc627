"""Runs a golden prompt on the CPU target: prompt ids -> greedy output ids, through a real ring.

The host side of the ring (ABI: abi.h) in a few lines of Python: one request, no front end.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from blinkc import abi
from blinkc.bundle.manifest import Golden, Limits
from blinkc.bundle.reader import Bundle
from blinkc.errors import BlinkError

GOLDEN_TEXT = "The quick brown fox jumps over the lazy dog. The capital of France is"
NUM_GOLDEN_TOKENS = 16
# A reference's choice this close to its second one, in standard deviations of its logits, is a tie:
# rounding to 16 bits decides it.
GOLDEN_TIE_STD = 0.15
_MASK64 = (1 << 64) - 1
_WORD_BYTES = 8


def run_golden(
    bundle: Bundle,
    prompt_token_ids: Sequence[int],
    num_tokens: int,
    *,
    weights_from: Sequence[Path] = (),
    timeout_s: float = 600.0,
) -> list[int]:
    """Return the first `num_tokens` greedy tokens after a prompt.

    Raises:
        BlinkError: the target does not load, fails the request, or does not finish in `timeout_s`.
    """
    from blink_runtime.cpu_target import CpuTarget

    manifest = bundle.manifest
    if manifest.target.library is None:
        raise BlinkError(f"{bundle.path} is for {manifest.target.name}: it has no CPU library")
    with bundle.weights(search=weights_from) as weights:
        ring = PythonRing(manifest.limits)
        try:
            with CpuTarget(
                library=bundle.file(manifest.target.library),
                weights=weights.addresses,
                ring_address=ring.address,
                ring_bytes=ring.num_bytes,
                num_kv_pages=manifest.limits.num_kv_pages + 1,
            ) as target:
                target.start()
                try:
                    return ring.complete(prompt_token_ids, num_tokens, timeout_s)
                finally:
                    ring.stop()
        finally:
            ring.close()


def compare_golden(golden: Golden, expected: Sequence[int], found: Sequence[int]) -> str:
    """Compare what came out with what should have; say how far they agree.

    From the first tie of the reference on, the texts may part.

    Raises:
        BlinkError: a token differs where the reference was sure.
    """
    if not expected and not any(found):
        raise BlinkError("the golden prompt gives token 0 alone: the model computes nothing here")
    who = golden.made_by or "an earlier load"
    for number, (want, token) in enumerate(zip(expected, found, strict=False)):
        if token == want:
            continue
        margin = golden.margins[number] if number < len(golden.margins) else float("inf")
        if margin <= GOLDEN_TIE_STD:
            return (
                f"golden prompt gives {number} tokens of {who}, then the other side of a tie "
                f"(margin {margin:.3f} of the logits' spread)"
            )
        raise BlinkError(
            f"the golden prompt gives token {token} at position {number}, {who} gave {want}: "
            f"{list(found[:8])}... instead of {list(expected[:8])}..."
        )
    if len(found) < len(expected):
        raise BlinkError(f"the golden prompt gives {len(found)} tokens of {len(expected)}")
    return f"golden prompt gives its {len(found)} tokens"


class PythonRing:
    """A ring in this process's memory, with its header filled in, for one golden prompt.

    Raises:
        BlinkError: there is no memory of its size.
    """

    def __init__(self, limits: Limits) -> None:
        layout = _layout_from_limits(limits)
        self.num_bytes = layout.ring_bytes
        try:
            self._map = mmap.mmap(-1, layout.ring_bytes)  # zeroed, on a page boundary
        except (OSError, OverflowError) as error:
            raise BlinkError(
                f"no memory for the ring of {limits.num_slots} slots: {layout.ring_bytes} bytes",
                hint="compile it with a smaller --num-slots or --max-seqlen",
            ) from error
        self._bytes = (ctypes.c_char * layout.ring_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._bytes)
        self._header = abi.structs()["blink_ring_header"].from_address(self.address)
        values: dict[str, Any] = {
            "abi_version": abi.constants()["BLINK_ABI_VERSION"],
            "header_bytes": abi.size_of("blink_ring_header"),
            **{name: getattr(limits, name) for name in _LIMITS_IN_HEADER},
            **{name: getattr(layout, name) for name in layout.__slots__},
        }
        for name, value in values.items():
            setattr(self._header, name, value)
        self._header.magic = abi.constants()["BLINK_MAGIC"]
        self._probe = RingProbe(limits, HostBytes(self.address))

    def complete(
        self, prompt_token_ids: Sequence[int], num_tokens: int, timeout_s: float
    ) -> list[int]:
        """Submit a greedy request and return its tokens; see `RingProbe.complete`."""
        return self._probe.complete(prompt_token_ids, num_tokens, timeout_s)

    def stop(self) -> None:
        """Tell the scheduler to return."""
        self._header.stop = 1

    def close(self) -> None:
        """Free the ring; the target must have been closed."""
        del self._header
        del self._bytes


class RingBytes(Protocol):
    """A ring as a probe reaches it: copies in and out, in the order of the calls."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the ring; an aligned word of 8 comes whole."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes into the ring; an aligned word of 8 appears whole."""
        ...


class HostBytes:
    """A ring that this process addresses."""

    def __init__(self, address: int) -> None:
        self._address = address

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the ring."""
        if num_bytes == _WORD_BYTES:
            return ctypes.c_uint64.from_address(self._address + offset).value.to_bytes(8, "little")
        return ctypes.string_at(self._address + offset, num_bytes)

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes into the ring."""
        if len(data) == _WORD_BYTES:
            word = ctypes.c_uint64.from_address(self._address + offset)
            word.value = int.from_bytes(data, "little")
        else:
            ctypes.memmove(self._address + offset, data, len(data))


class RingProbe:
    """The host side of one request in slot 0 of a ring that no front end has attached to yet.

    Args:
        limits: the sizes that the ring was laid out with.
        ring: its bytes.
    """

    def __init__(self, limits: Limits, ring: RingBytes) -> None:
        self._limits = limits
        self._layout = _layout_from_limits(limits)
        self._ring = ring

    def complete(
        self, prompt_token_ids: Sequence[int], num_tokens: int, timeout_s: float
    ) -> list[int]:
        """Submit a greedy request, return its tokens and give the slot back.

        Raises:
            BlinkError: the request failed, or took longer than `timeout_s`.
        """
        constants = abi.constants()
        self._write_request(prompt_token_ids, num_tokens)
        self._write_command(constants["BLINK_COMMAND_SUBMIT"], 1)
        final = (constants["BLINK_STATE_DECODE_COMPLETED"], constants["BLINK_STATE_FAILED"])
        word = self._wait_for(final, timeout_s)
        if (word >> 24) & 0xFF == constants["BLINK_STATE_FAILED"]:
            place = self._layout.status_offset + abi.offset_of("blink_slot_status", "error")
            error = int.from_bytes(self._ring.read(place, 4), "little")
            raise BlinkError(f"the golden prompt failed: {_error_name(error)}")
        count = word & constants["BLINK_MAX_NUM_GENERATED"]
        stride = self._limits.output_record_bytes
        records = self._ring.read(self._layout.output_offset, count * stride)
        tokens = [
            int.from_bytes(records[number * stride : number * stride + 4], "little")
            for number in range(count)
        ]
        self._write_command(constants["BLINK_COMMAND_RELEASE"], 2)
        self._wait_for((constants["BLINK_STATE_EMPTY"],), timeout_s)
        return tokens

    def _write_command(self, command: int, number: int) -> None:
        slot = self._layout.command_offset
        front_end = self._layout.front_end_offset
        self._write_word(slot + abi.offset_of("blink_slot_command", "submit_number"), number)
        self._write_word(slot + abi.offset_of("blink_slot_command", "word"), (1 << 32) | command)
        self._write_word(front_end + abi.offset_of("blink_front_end", "submit_count"), number)

    def _write_word(self, offset: int, value: int) -> None:
        self._ring.write(offset, value.to_bytes(_WORD_BYTES, "little"))

    def _wait_for(self, states: Sequence[int], timeout_s: float) -> int:
        """Return the status word once the request is in one of `states`."""
        place = self._layout.status_offset + abi.offset_of("blink_slot_status", "word")
        deadline = time.monotonic() + timeout_s
        while True:
            word = int.from_bytes(self._ring.read(place, _WORD_BYTES), "little")
            if word >> 32 == 1 and (word >> 24) & 0xFF in states:
                return word
            if time.monotonic() > deadline:
                raise BlinkError(f"the golden prompt did not finish within {timeout_s:.0f} s")
            time.sleep(0.001)

    def _write_request(self, prompt_token_ids: Sequence[int], num_tokens: int) -> None:
        front_end = abi.structs()["blink_front_end"]()
        front_end.epoch = 1
        front_end.heartbeat = 1
        self._ring.write(self._layout.front_end_offset, bytes(front_end))
        count = len(prompt_token_ids)
        prompt = bytes((ctypes.c_uint32 * count)(*prompt_token_ids))
        self._ring.write(self._layout.prompt_offset, prompt)
        request = abi.structs()["blink_slot_request"]()
        request.sequence = request.epoch = request.submit_number = request.seed = 1
        request.num_prompt_tokens = count
        request.max_output_tokens = num_tokens
        request.flags = abi.constants()["BLINK_REQUEST_IGNORE_EOS"]
        request.top_p = request.repetition_penalty = 1.0
        covered = bytes(request)[abi.offset_of("blink_slot_request", "sequence") :]
        words = (ctypes.c_uint32 * (len(covered) // 4)).from_buffer_copy(covered)
        request.checksum = payload_checksum([*words, *prompt_token_ids])
        self._ring.write(self._layout.request_offset, bytes(request))


def _error_name(error: int) -> str:
    """Return what abi.h calls an error of a slot, such as "out of pages"."""
    prefix = "BLINK_ERROR_"
    for name, value in abi.constants().items():
        if name.startswith(prefix) and value == error:
            return name.removeprefix(prefix).replace("_", " ").lower()
    return f"error {error}"


def _layout_from_limits(limits: Limits) -> abi.RingLayout:
    return abi.ring_layout(
        num_slots=limits.num_slots,
        num_front_ends=limits.num_front_ends,
        max_prompt_tokens=limits.max_prompt_tokens,
        max_output_tokens=limits.max_output_tokens,
        output_record_bytes=limits.output_record_bytes,
        trace_capacity=limits.trace_capacity,
    )


_LIMITS_IN_HEADER = (
    "num_slots", "num_front_ends", "max_prompt_tokens", "max_output_tokens", "output_record_bytes",
    "max_seqlen", "max_batch", "vocab_size", "page_size_tokens", "num_kv_pages", "trace_capacity",
    "sampler_features",
)  # fmt: skip


def payload_checksum(words: Sequence[int]) -> int:
    """Return `blink::request_checksum` over 32-bit words: a sum of splitmix64 finalizers."""
    total = 0
    for index, word in enumerate(words):
        x = (index << 32) | word
        x ^= x >> 30
        x = x * 0xBF58476D1CE4E5B9 & _MASK64
        x ^= x >> 27
        x = x * 0x94D049BB133111EB & _MASK64
        total += x ^ (x >> 31)
    return total & _MASK64


def golden_prompt(tokenizer_json: Path | None, limits: Limits) -> list[int]:
    """Return the prompt's ids: a sentence where the tokenizers library is here, else small ids."""
    longest = max(min(32, limits.max_seqlen - 1), 1)
    ids = _tokenize(tokenizer_json) if tokenizer_json is not None else []
    if not ids:
        ids = [1 + number * 7 % max(limits.vocab_size - 1, 1) for number in range(8)]
    return [token % limits.vocab_size for token in ids[:longest]]


def _tokenize(tokenizer_json: Path) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return []
    encoding = Tokenizer.from_file(str(tokenizer_json)).encode(GOLDEN_TEXT)
    return [int(token) for token in encoding.ids]
