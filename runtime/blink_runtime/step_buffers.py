"""The step buffers of step.h on the GPU: limits -> one allocation, addresses by field name."""

from __future__ import annotations

import re
import struct
from functools import cache

from blink_runtime.cuda_driver import DeviceBuffer
from blink_runtime.cuda_kernels import StepAddresses
from blinkc import abi
from blinkc.resources import include_folder

_ALIGNMENT_BYTES = 256
STATE_BYTES = 64
SAMPLING_BYTES = 64  # blink_sampling_params


@cache
def buffer_fields() -> tuple[tuple[str, bool], ...]:
    """Return the fields of blink_step_buffers in order, each with whether it is a pointer."""
    text = (include_folder() / "blink" / "step.h").read_text(encoding="utf-8")
    body = text[text.rindex("typedef struct blink_step_buffers {") :]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    fields = re.findall(r"^\s*\w+(\*?) (\w+);", body, flags=re.MULTILINE)
    return tuple((name, star == "*") for star, name in fields)


class StepBuffers:
    """All step buffers, zeroed. Without `has_logprobs` there is no place for them."""

    def __init__(
        self,
        *,
        max_step_tokens: int,
        max_batch: int,
        max_pages_per_lane: int,
        page_size_tokens: int,
        has_logprobs: bool = False,
    ) -> None:
        tokens, rows = max_step_tokens * 4, (max_batch + 1) * 4
        sizes = {
            "state": STATE_BYTES,
            "input_ids": tokens,
            "positions": tokens,
            "token_row": tokens,
            "row_query_start": rows,
            "row_kv_len": rows,
            "row_lane": rows,
            "sample_token": rows,
            "page_table": rows * max_pages_per_lane,
            "sampling": (max_batch + 1) * SAMPLING_BYTES,
            "sampled_ids": rows,
            "sampled_logprobs": max_batch * abi.logprobs_bytes() if has_logprobs else 0,
        }
        offsets, total = {}, 0
        for name, size in sizes.items():
            offsets[name] = total
            total += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.memory = DeviceBuffer(total, "the step buffers")
        self.memory.fill(0)
        self.offsets, self.sizes = offsets, sizes
        self.addresses = StepAddresses(
            **{
                name: self.memory.address + offset if sizes[name] else 0
                for name, offset in offsets.items()
            },
            max_step_tokens=max_step_tokens,
            max_batch=max_batch,
            max_pages_per_lane=max_pages_per_lane,
            page_size_tokens=page_size_tokens,
        )

    def packed(self) -> bytes:
        """Return `blink_step_buffers` as the scheduler's kernels take it, by value."""
        fields = buffer_fields()
        return struct.pack(
            "".join("Q" if pointer else "I" for _, pointer in fields),
            *(getattr(self.addresses, name) for name, _ in fields),
        )

    def write(self, name: str, data: bytes) -> None:
        """Overwrite the head of one buffer from the host; for tests and benchmarks."""
        if len(data) > self.sizes[name]:
            raise ValueError(f"{len(data)} bytes do not fit {name}")
        self.memory.write(data, self.offsets[name])

    def read(self, name: str, num_bytes: int) -> bytes:
        """Read the head of one buffer."""
        return self.memory.read(num_bytes, self.offsets[name])

    def close(self) -> None:
        """Free them."""
        self.memory.close()
