"""The host side of a ring in a few lines of Python: plan + memory -> requests submitted and
awaited.

For self-tests and benchmarks of a target without the front end; the ABI is abi.h, read by
blinkc.abi.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

from blinkc import abi
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from blink_runtime.cuda_driver import MappedBuffer
    from blinkc.capture.plan import CapturePlan

_MASK64 = (1 << 64) - 1
_LIMITS_IN_HEADER = (
    "num_slots", "num_front_ends", "max_prompt_tokens", "max_output_tokens", "output_record_bytes",
    "max_seqlen", "max_batch", "vocab_size", "page_size_tokens", "num_kv_pages", "trace_capacity",
    "sampler_features",
)  # fmt: skip


def payload_checksum(words: Sequence[int]) -> int:
    """Return the checksum of abi.hpp over 32-bit words."""
    import numpy as np

    values = np.asarray(words, np.uint64)
    with np.errstate(over="ignore"):
        x = (np.arange(len(values), dtype=np.uint64) << np.uint64(32)) | values
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return int(x.sum(dtype=np.uint64))


class RingMemory:
    """A ring laid out in memory that `allocate` gives, and one front end (number 0) over all its
    slots."""

    def __init__(self, plan: CapturePlan, allocate: Callable[[int], MappedBuffer]) -> None:
        self._plan = plan
        self._layout = abi.ring_layout(
            num_slots=plan.num_slots,
            num_front_ends=plan.num_front_ends,
            max_prompt_tokens=plan.max_prompt_tokens,
            max_output_tokens=plan.max_output_tokens,
            output_record_bytes=plan.output_record_bytes,
            trace_capacity=plan.trace_capacity,
        )
        self.memory = allocate(self._layout.ring_bytes)
        self._base = self.memory.host_address
        header = self.header
        header.abi_version = abi.constants()["BLINK_ABI_VERSION"]
        header.header_bytes = abi.size_of("blink_ring_header")
        for name in _LIMITS_IN_HEADER:
            setattr(header, name, getattr(plan, name))
        for name in self._layout.__slots__:
            setattr(header, name, getattr(self._layout, name))
        header.magic = abi.constants()["BLINK_MAGIC"]
        front_end = self._struct("blink_front_end", self._layout.front_end_offset)
        front_end.epoch = 1
        front_end.heartbeat = 1
        self._submits = 0
        self._sequence = 0

    @property
    def header(self) -> Any:
        """Return the ring's header."""
        return self._struct("blink_ring_header", 0)

    def _struct(self, name: str, offset: int, index: int = 0) -> Any:
        return abi.structs()[name].from_address(self._base + offset + index * abi.size_of(name))

    def submit(self, slot: int, prompt: Sequence[int], num_tokens: int, **settings: float) -> int:
        """Put a request into a free slot; return its sequence number. Greedy unless `settings` say
        else."""
        self._sequence += 1
        sequence = self._sequence
        self._submits += 1
        address = self._base + self._layout.prompt_offset + slot * self._plan.max_prompt_tokens * 4
        (ctypes.c_uint32 * len(prompt)).from_address(address)[:] = list(prompt)
        request = self._struct("blink_slot_request", self._layout.request_offset, slot)
        ctypes.memset(ctypes.addressof(request), 0, ctypes.sizeof(request))
        request.sequence = sequence
        request.epoch = 1
        request.submit_number = self._submits
        request.seed = 1
        request.num_prompt_tokens = len(prompt)
        request.max_output_tokens = num_tokens
        request.flags = abi.constants()["BLINK_REQUEST_IGNORE_EOS"]
        request.top_p = request.repetition_penalty = 1.0
        for name, value in settings.items():
            setattr(request, name, value)
        skip = abi.offset_of("blink_slot_request", "sequence")
        words = (ctypes.c_uint32 * ((ctypes.sizeof(request) - skip) // 4)).from_address(
            ctypes.addressof(request) + skip
        )
        request.checksum = payload_checksum([*words, *prompt])
        self._command(slot, sequence, "SUBMIT")
        return sequence

    def _command(self, slot: int, sequence: int, command: str) -> None:
        entry = self._struct("blink_slot_command", self._layout.command_offset, slot)
        entry.submit_number = self._submits
        entry.word = sequence << 32 | abi.constants()[f"BLINK_COMMAND_{command}"]
        front_end = self._struct("blink_front_end", self._layout.front_end_offset)
        front_end.submit_count += 1

    def word(self, slot: int) -> tuple[int, int, int]:
        """Return (sequence, state, tokens generated) of a slot."""
        word = self._struct("blink_slot_status", self._layout.status_offset, slot).word
        return word >> 32, word >> 24 & 0xFF, word & 0xFFFFFF

    def tokens(self, slot: int, count: int) -> list[int]:
        """Return the first `count` output tokens of a slot."""
        stride = self._plan.output_record_bytes
        base = (
            self._base + self._layout.output_offset + slot * self._plan.max_output_tokens * stride
        )
        return [ctypes.c_uint32.from_address(base + i * stride).value for i in range(count)]

    def wait(self, slots: Iterable[int], timeout_s: float) -> None:
        """Wait until the requests in `slots` have ended.

        Raises:
            BlinkError: one failed or time ran out; says where the ring stands.
        """
        states = abi.constants()
        deadline = time.monotonic() + timeout_s
        for slot in slots:
            while self.word(slot)[1] != states["BLINK_STATE_DECODE_COMPLETED"]:
                if self.word(slot)[1] == states["BLINK_STATE_FAILED"]:
                    raise BlinkError(f"slot {slot} failed; {self.summary()}")
                if time.monotonic() > deadline:
                    raise BlinkError(f"slot {slot} is open after {timeout_s} s; {self.summary()}")
                time.sleep(200e-6)

    def steps(self) -> list[tuple[int, int, int, int]]:
        """Return (kind, key index, lanes, tokens) of every step still in the trace."""
        header = self.header
        first = max(0, header.trace_count - header.trace_capacity)
        records = (
            self._struct("blink_trace_record", header.trace_offset, i % header.trace_capacity)
            for i in range(first, header.trace_count)
        )
        return [(r.kind, r.key_index, r.num_lanes, r.num_tokens) for r in records]

    def run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, timeout_s: float, **settings: float
    ) -> dict[str, Any]:
        """Run requests in slots 0.. at once, to their ends; return times (s) and a digest of the
        tokens.

        Raises:
            BlinkError: a request failed or time ran out; says where the ring stands.
        """
        states = abi.constants()
        done_state, failed = states["BLINK_STATE_DECODE_COMPLETED"], states["BLINK_STATE_FAILED"]
        started = time.perf_counter()
        sequences = [self.submit(i, p, num_tokens, **settings) for i, p in enumerate(prompts)]
        first = [0.0] * len(prompts)
        ended = [0.0] * len(prompts)
        deadline = started + timeout_s
        open_slots = set(range(len(prompts)))
        while open_slots:
            now = time.perf_counter()
            for slot in list(open_slots):
                sequence, state, count = self.word(slot)
                if sequence != sequences[slot]:
                    continue
                if count > 0 and not first[slot]:
                    first[slot] = now
                if state == failed:
                    error = self._struct(
                        "blink_slot_status", self._layout.status_offset, slot
                    ).error
                    raise BlinkError(f"slot {slot} failed with error {error}; {self.summary()}")
                if state == done_state:
                    ended[slot] = now
                    open_slots.discard(slot)
            time.sleep(20e-6)  # lets other threads of this process run
            if now > deadline:
                raise BlinkError(
                    f"{len(open_slots)} requests open after {timeout_s} s; {self.summary()}; "
                    f"slots {[self.word(s) for s in sorted(open_slots)[:4]]}"
                )
        outputs = [self.tokens(slot, num_tokens) for slot in range(len(prompts))]
        for slot, sequence in enumerate(sequences):
            self._command(slot, sequence, "RELEASE")
        while any(
            self.word(slot)[1] != states["BLINK_STATE_EMPTY"] for slot in range(len(prompts))
        ):
            if time.perf_counter() > deadline:
                raise BlinkError(f"slots were not released; {self.summary()}")
        span = max(ended) - started
        tpot = [
            (e - f) / (num_tokens - 1) for e, f in zip(ended, first, strict=True) if num_tokens > 1
        ]
        ttft = sorted(f - started for f in first)
        return {
            "ttft_ms_first": ttft[0] * 1e3,
            "ttft_ms_median": ttft[len(ttft) // 2] * 1e3,
            "tpot_ms": sum(tpot) / max(len(tpot), 1) * 1e3,
            "tokens_per_s": len(prompts) * num_tokens / span,
            "digest": payload_checksum([t for o in outputs for t in o]) % 10**8,
            "head": outputs[0][:6],
        }

    def stop(self) -> None:
        """Tell the scheduler to return."""
        self.header.stop = 1

    def summary(self) -> dict[str, int]:
        """Return where the scheduler stands."""
        header = self.header
        return {
            "state": header.scheduler_state,
            "stopped_word": header.stopped,
            "steps": header.step,
            "heartbeat": header.heartbeat,
            "launch_error": header.launch_error,
            "off_cache": header.counters.off_cache_steps,
            "output_tokens": header.counters.output_tokens,
        }
