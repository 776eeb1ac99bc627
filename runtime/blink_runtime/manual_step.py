"""Drives a target's graphs by hand, without its scheduler: rows of tokens in, logits and ids out.

For self-tests and benchmarks: step buffers are filled as the scheduler would (step.h), lane = row.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

import numpy as np

from blink_runtime.cuda_driver import check, driver
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blink_runtime.cuda_target import CudaTarget
    from blinkc.capture.grid import GraphKey

Row = tuple["Sequence[int]", int]  # new token ids, tokens of the lane that are in the cache already


def write_pages(target: CudaTarget, num_lanes: int, pages_each: int) -> None:
    """Give each of `num_lanes` lanes pages of its own, scattered over the cache."""
    plan = target.plan
    table = np.zeros((plan.max_batch + 1, plan.max_pages_per_lane), np.int32)
    order = np.random.default_rng(0).permutation(plan.num_kv_pages)[: num_lanes * pages_each] + 1
    table[:num_lanes, :pages_each] = order.reshape(num_lanes, pages_each)
    target.step.write("page_table", table.tobytes())


def write_step(target: CudaTarget, key: GraphKey, rows: Sequence[Row], launch: int) -> None:
    """Fill the step buffers for a key; every row samples greedily, the rest is padding."""
    tokens: list[int] = []
    positions: list[int] = []
    token_row: list[int] = []
    starts, kv_len, sample = [0], [], []
    for row, (ids, done) in enumerate(rows):
        tokens += ids
        positions += range(done, done + len(ids))
        token_row += [row] * len(ids)
        starts.append(len(tokens))
        kv_len.append(done + len(ids))
        sample.append(len(tokens) - 1)
    total = key.seqlen if key.kind == "prefill" else key.batch
    pad_rows, pad_tokens = key.batch - len(rows), total - len(tokens)
    if pad_rows < 0 or pad_tokens < 0:
        raise ValueError(f"{len(rows)} rows of {len(tokens)} tokens do not fit {key}")
    sink = target.plan.max_batch
    values = {
        "input_ids": tokens + [0] * pad_tokens,
        "positions": positions + [0] * pad_tokens,
        "token_row": token_row + [-1] * pad_tokens,
        "row_query_start": starts + [len(tokens)] * pad_rows,
        "row_kv_len": kv_len + [0] * pad_rows,
        "row_lane": list(range(len(rows))) + [sink] * pad_rows,
        "sample_token": sample + [0] * pad_rows,
    }
    for name, numbers in values.items():
        target.step.write(name, np.asarray(numbers, np.int32).tobytes())
    sampling = [
        # seed, token index, flags, temperature, top_p, min_p, top_k, slot, logprobs, reserved
        struct.pack("QIIfffIII6I", 1, 0, int(row < len(rows)), 0.0, 1.0, 0.0, 0, 0, 0, *[0] * 6)
        for row in range(key.batch)
    ]
    target.step.write("sampling", b"".join(sampling))
    target.step.write("state", struct.pack("QQII", 0, launch, len(tokens), len(rows)))


def run_step(target: CudaTarget, key_index: int, rows: Sequence[Row], launch: int) -> None:
    """Run one step to its end.

    Raises:
        BlinkError: the graph did not write its completion word.
    """
    write_step(target, target.plan.keys[key_index], rows, launch)
    target.execs[key_index].launch(target.stream)
    target.stream.synchronize()
    (completion,) = struct.unpack("Q", target.step.read("state", 8))
    if completion != launch:
        raise BlinkError(f"the graph of {target.plan.keys[key_index]} did not complete")


def read_sampled(target: CudaTarget, num_rows: int) -> list[int]:
    """Return the sampled ids of the last step."""
    data = target.step.read("sampled_ids", 4 * num_rows)
    return [int(x) for x in np.frombuffer(data, np.int32)]


def read_logits(target: CudaTarget, num_rows: int) -> np.ndarray:
    """Return the logits that the last step sampled from, `[num_rows, vocab]` fp32."""
    sample = next(s for s in target.launches["steps"] if s["op"] == "sample")
    vocab_size, dtype = target.launches["vocab_size"], sample["dtype"]
    storage = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}[dtype]
    data = np.empty((num_rows, vocab_size), storage)
    address = target.addresses.arena + sample["logits"][1]
    check(driver().cuMemcpyDtoH(data.ctypes.data, address, data.nbytes), "reading logits")
    if dtype == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def read_weight(target: CudaTarget, number: int) -> np.ndarray:
    """Return a weight's bytes as it lies on the GPU, 2-byte types as uint16."""
    entry = target.launches["weights"][number]
    storage = {"fp32": np.float32, "fp16": np.uint16, "bf16": np.uint16, "int32": np.int32}
    data = np.empty(entry["shape"], storage[entry["dtype"]])
    address = target.addresses.weights[number]
    check(
        driver().cuMemcpyDtoH(ctypes.c_void_p(data.ctypes.data).value, address, data.nbytes),
        "reading",
    )
    return data
