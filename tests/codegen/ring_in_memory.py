"""A ring and step buffers in ordinary memory, and the writes of a front end."""

from __future__ import annotations

import ctypes
from typing import Any

from blinkc import abi
from blinkc.capture.plan import CapturePlan

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)
_MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    """The finalizer of splitmix64, as in blink/abi.hpp."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def checksum(words: list[int]) -> int:
    """The checksum of a request's words from `sequence` on, its prompt ids behind them."""
    return sum(mix64(index << 32 | word) for index, word in enumerate(words)) & _MASK


class RingInMemory:
    """A ring for one front end, whose sizes are a plan's."""

    def __init__(self, plan: CapturePlan) -> None:
        self._plan = plan
        sizes = {
            name: getattr(plan, name)
            for name in (
                "num_slots",
                "num_front_ends",
                "max_prompt_tokens",
                "max_output_tokens",
                "output_record_bytes",
                "trace_capacity",
            )
        }
        layout = abi.ring_layout(**sizes)
        self.num_bytes = layout.ring_bytes
        self._memory = ctypes.create_string_buffer(layout.ring_bytes + 64)
        self.address = (ctypes.addressof(self._memory) + 63) // 64 * 64
        self.header = self._at("blink_ring_header", 0)
        names = abi.constants()
        self.header.abi_version = names["BLINK_ABI_VERSION"]
        self.header.header_bytes = abi.size_of("blink_ring_header")
        for field in (*sizes, "max_seqlen", "max_batch", "vocab_size", "page_size_tokens"):
            setattr(self.header, field, getattr(plan, field))
        self.header.num_kv_pages = plan.num_kv_pages
        for field, offset in vars_of(layout).items():
            setattr(self.header, field, offset)
        self._layout = layout
        self._front_end = self._at("blink_front_end", layout.front_end_offset)
        self._front_end.epoch = 1
        self._num_submitted = 0
        self.header.magic = names["BLINK_MAGIC"]

    def _at(self, struct: str, offset: int) -> Any:
        return abi.structs()[struct].from_address(self.address + offset)

    def _of_slot(self, struct: str, offset: int, slot: int) -> Any:
        return self._at(struct, offset + slot * abi.size_of(struct))

    def status(self, slot: int) -> Any:
        """The slot's status."""
        return self._of_slot("blink_slot_status", self._layout.status_offset, slot)

    def state(self, slot: int) -> int:
        """The slot's state."""
        return int(self.status(slot).word >> 24 & 0xFF)

    def output(self, slot: int) -> list[int]:
        """The tokens that the slot's request has so far."""
        count = self.status(slot).word & 0xFFFFFF
        stride = self._plan.max_output_tokens * self._plan.output_record_bytes
        start = self.address + self._layout.output_offset + slot * stride
        return [
            ctypes.c_uint32.from_address(start + i * self._plan.output_record_bytes).value
            for i in range(count)
        ]

    def submit(self, slot: int, *, prompt: list[int], max_output_tokens: int) -> None:
        """Write a greedy request and its command."""
        area = self._layout.prompt_offset + slot * self._plan.max_prompt_tokens * 4
        (ctypes.c_uint32 * len(prompt)).from_address(self.address + area)[:] = prompt
        request = self._of_slot("blink_slot_request", self._layout.request_offset, slot)
        self._num_submitted += 1
        request.sequence = 1
        request.epoch = 1
        request.submit_number = self._num_submitted
        request.num_prompt_tokens = len(prompt)
        request.max_output_tokens = max_output_tokens
        request.top_p = 1.0
        request.repetition_penalty = 1.0
        words = (ctypes.c_uint32 * (ctypes.sizeof(request) // 4)).from_buffer_copy(request)
        request.checksum = checksum([*words[2:], *prompt])
        command = self._of_slot("blink_slot_command", self._layout.command_offset, slot)
        command.submit_number = self._num_submitted
        self._send(slot, abi.constants()["BLINK_COMMAND_SUBMIT"])

    def release(self, slot: int) -> None:
        """Give a finished slot back."""
        self._send(slot, abi.constants()["BLINK_COMMAND_RELEASE"])

    def _send(self, slot: int, command: int) -> None:
        line = self._of_slot("blink_slot_command", self._layout.command_offset, slot)
        line.word = 1 << 32 | command
        self._front_end.submit_count += 1


def vars_of(layout: abi.RingLayout) -> dict[str, int]:
    """The fields of a layout by name."""
    return {name: getattr(layout, name) for name in layout.__dataclass_fields__}


class StepState(ctypes.Structure):
    """blink_step_state."""

    _fields_ = [
        ("completion", ctypes.c_uint64),
        ("launch", ctypes.c_uint64),
        ("num_tokens", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("key_index", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 8),
    ]


class Buffers(ctypes.Structure):
    """blink_step_buffers."""

    _fields_ = [
        ("state", ctypes.c_void_p),
        ("input_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("token_row", ctypes.c_void_p),
        ("row_query_start", ctypes.c_void_p),
        ("row_kv_len", ctypes.c_void_p),
        ("row_lane", ctypes.c_void_p),
        ("sample_token", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("sampling", ctypes.c_void_p),
        ("sampled_ids", ctypes.c_void_p),
        ("sampled_logprobs", ctypes.c_void_p),
        ("max_step_tokens", ctypes.c_uint32),
        ("max_batch", ctypes.c_uint32),
        ("max_pages_per_lane", ctypes.c_uint32),
        ("page_size_tokens", ctypes.c_uint32),
    ]


class StepBuffers:
    """Step buffers for a plan, with a model that answers each token with the next number."""

    def __init__(self, plan: CapturePlan) -> None:
        def numbers(count: int) -> Any:
            return (ctypes.c_int32 * count)()

        self.state = StepState()
        tokens, rows = plan.max_step_tokens, plan.max_batch
        self.arrays = {
            "input_ids": numbers(tokens),
            "positions": numbers(tokens),
            "token_row": numbers(tokens),
            "row_query_start": numbers(rows + 1),
            "row_kv_len": numbers(rows),
            "row_lane": numbers(rows),
            "sample_token": numbers(rows),
            "page_table": numbers((rows + 1) * plan.max_pages_per_lane),
            "sampling": numbers(16 * rows),
            "sampled_ids": numbers(rows),
        }
        self.buffers = Buffers(
            state=ctypes.addressof(self.state),
            max_step_tokens=tokens,
            max_batch=rows,
            max_pages_per_lane=plan.max_pages_per_lane,
            page_size_tokens=plan.page_size_tokens,
        )
        for name, array in self.arrays.items():
            setattr(self.buffers, name, ctypes.addressof(array))

    def echo_next_ids(self) -> None:
        """Run the step: every row samples the id after its last token's."""
        for row in range(self.state.num_rows):
            token = self.arrays["sample_token"][row]
            self.arrays["sampled_ids"][row] = self.arrays["input_ids"][token] + 1
        self.state.completion = self.state.launch
