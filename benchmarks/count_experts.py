"""Counts the distinct experts that a layer's rows really go to, while a model is served.

Every mixture layer writes its routing ids to the same place in the arena. A thread copies that
place out on a stream of its own, again and again: each copy is some layer of some step. Copies made
while another layer was writing, or while something else lay there, are recognised by their ids and
dropped, as is everything but full decode steps.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from blink_runtime.cuda_driver import Stream, check, driver

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from blink_runtime.cuda_target import CudaTarget

PAUSE_S = 0.0005
_NUM_ROWS, _KIND = 5, 6  # 32-bit words of blink_step_state
DECODE = 1


def routing_ids(
    raw: bytes, num_rows: int, num_choices: int, num_experts: int
) -> NDArray[np.int64] | None:
    """Return the ids `[num_rows, num_choices]` in a copy of the place, or None if they are none.

    Ids are 32 or 64 bits wide. Valid ones are in range, and distinct within a row.
    """
    count = num_rows * num_choices
    words = np.frombuffer(raw, np.uint32)
    is_wide = len(words) >= 2 * count and not words[1 : 2 * count : 2].any()
    ids = (words[: 2 * count : 2] if is_wide else words[:count]).astype(np.int64)
    ids = ids.reshape(num_rows, num_choices)
    if (ids >= num_experts).any():
        return None
    ordered = np.sort(ids, axis=1)
    if num_choices > 1 and (ordered[:, 1:] == ordered[:, :-1]).any():
        return None
    return ids


class ExpertCounter:
    """Samples a served mixture until `finish`. One stream, one thread, small copies."""

    def __init__(self, target: CudaTarget) -> None:
        entry = next(e for e in target.launches["steps"] if e["op"] == "experts")
        self._num_choices = int(entry["num_choices"])
        self._num_experts = int(entry["num_experts"])
        self._target = target
        self._address = target.steps._address(entry["ids"])
        self._state_address = target.step.addresses.state
        self._max_rows = int(target.plan.max_batch)
        self._counts: dict[int, list[int]] = {}
        self._num_dropped = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="count-experts", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def _run(self) -> None:
        self._target.context.make_current()
        stream = Stream()
        num_bytes = self._max_rows * self._num_choices * 8
        before, after = (ctypes.create_string_buffer(64) for _ in range(2))
        place = ctypes.create_string_buffer(num_bytes)
        copies = (
            (before, self._state_address, 64),
            (place, self._address, num_bytes),
            (after, self._state_address, 64),
        )
        cu = driver()
        while not self._is_over.is_set():
            for buffer, address, size in copies:
                check(
                    cu.cuMemcpyDtoHAsync(ctypes.addressof(buffer), address, size, stream.handle),
                    "copying routing ids",
                )
            stream.synchronize()
            self._take(before.raw, place.raw, after.raw)
            time.sleep(PAUSE_S)
        stream.close()

    def _take(self, before: bytes, place: bytes, after: bytes) -> None:
        first, second = (np.frombuffer(state, np.uint32) for state in (before, after))
        num_rows = int(first[_NUM_ROWS])
        same = num_rows == int(second[_NUM_ROWS])
        if not same or num_rows == 0 or first[_KIND] != DECODE or second[_KIND] != DECODE:
            return
        ids = routing_ids(place, num_rows, self._num_choices, self._num_experts)
        if ids is None:
            self._num_dropped += 1
            return
        self._counts.setdefault(num_rows, []).append(len(np.unique(ids)))

    def finish(self) -> dict[str, Any]:
        """Stop; return by number of rows how many distinct experts the samples had."""
        self._is_over.set()
        self._thread.join()
        return {
            "num_experts": self._num_experts,
            "dropped": self._num_dropped,
            "by_rows": {
                str(rows): {
                    "samples": len(counts),
                    "min": min(counts),
                    "mean": round(sum(counts) / len(counts), 1),
                    "max": max(counts),
                }
                for rows, counts in sorted(self._counts.items())
            },
        }
