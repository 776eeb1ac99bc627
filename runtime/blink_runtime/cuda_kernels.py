"""Cut ops and small matrix products as kernel launches: addresses and sizes -> `Launch` lists.

Every choice here (variant, grid, split) depends on the graph key and the model alone, never on the
data of a step: equal keys run equal launches.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_uint64
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blink_runtime.cuda_driver import Function
from blink_runtime.cuda_graphs import Launch
from blinkc.engine.cuda_instances import (
    GEMV_INSTANCES,
    NARROW_INSTANCES,
    GemvInstance,
    NarrowInstance,
    decode_attention_kernel,
    decode_attention_warps,
)
from blinkc.errors import InternalError

if TYPE_CHECKING:
    from blink_runtime.cuda_driver import DeviceSpec, Module

_INPUT_SHARED_BYTES = 33 * 1024  # activations up to this size stay in shared memory
_MIN_SPLIT_TOKENS = 256
_UNSPLIT_TOKENS = 512
MAX_SPLITS = 64  # of decode attention, attention_decode.cuh
_BLOCKS_OF_WARPS = {8: 1, 6: 2, 4: 2, 3: 4}  # of decode attention, on a multiprocessor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAddresses:
    """Device addresses of the step buffers (step.h)."""

    state: int
    input_ids: int
    positions: int
    token_row: int
    row_query_start: int
    row_kv_len: int
    row_lane: int
    sample_token: int
    page_table: int
    sampling: int
    sampled_ids: int
    sampled_logprobs: int
    max_step_tokens: int
    max_batch: int
    max_pages_per_lane: int
    page_size_tokens: int

    @property
    def page_shift(self) -> int:
        """Return log2 of the page size."""
        return self.page_size_tokens.bit_length() - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """What a layer's attention is compiled for."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0

    @property
    def group(self) -> int:
        """Return the query heads that share a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def is_wide(self) -> bool:
        """Say whether a group fills more than half of the tensor core's 16 rows."""
        return self.group > 8

    @property
    def decode_warps(self) -> tuple[int, ...]:
        """Return the warps of a decode block, of each instance, most first."""
        return decode_attention_warps(self.head_dim, self.is_wide)


def pointer(address: int) -> c_uint64:
    """Return a kernel argument that holds an address."""
    return c_uint64(address)


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeShare:
    """How decode attention of a key is shared out: splits of a row, fewest tokens of one."""

    num_splits: int
    min_split_tokens: int


def share_decode(
    shape: AttentionShape, batch: int, seqlen: int, num_multiprocessors: int
) -> DecodeShare:
    """Choose for a key: rows are split until every multiprocessor has 8 warps.

    Short reaches are not split, because merging costs more than a few more rounds of the warps.
    """
    reach = seqlen if shape.window <= 0 else min(seqlen, shape.window + 16)
    least = _UNSPLIT_TOKENS if reach <= _UNSPLIT_TOKENS else _MIN_SPLIT_TOKENS
    blocks = num_multiprocessors * 8 // shape.decode_warps[0]
    wanted = max(1, blocks // (batch * shape.num_kv_heads))
    return DecodeShare(
        num_splits=min(wanted, MAX_SPLITS, ceil_div(reach, least)), min_split_tokens=least
    )


def choose_decode_warps(shape: AttentionShape, num_blocks: int, num_multiprocessors: int) -> int:
    """Return the warps of a block: those that need the fewest waves, the most of them.

    A block that starts or merges streams nothing: better all at once, than one after the other.
    """

    def waves(warps: int) -> int:
        return ceil_div(num_blocks, num_multiprocessors * _BLOCKS_OF_WARPS[warps])

    return min(shape.decode_warps, key=lambda warps: (waves(warps), -warps))


def choose_gemv(m: int, n: int, k: int, num_multiprocessors: int) -> GemvInstance:
    """Return the instance for `m` rows.

    Activations stay in shared memory while they are small. Else each item of work reads them anew,
    so that tall items are better, unless they share out `n` unevenly over the multiprocessors.
    """
    able = [
        g
        for g in GEMV_INSTANCES
        if m <= g.max_rows and (not g.input_shared or m * (k + 32) * 2 <= _INPUT_SHARED_BYTES)
    ]
    if not able:
        raise InternalError(f"no streaming product takes {m} rows")
    if able[0].input_shared:
        return able[0]
    fewest_rows = min(g.row_tiles for g in able)

    def cost(g: GemvInstance) -> float:
        rows = 8 * g.tiles
        turns = ceil_div(ceil_div(n, rows), num_multiprocessors)
        return turns * rows * (1.0 + 0.12 * g.row_tiles / g.tiles)

    return min((g for g in able if g.row_tiles == fewest_rows), key=cost)


def choose_narrow(m: int, n: int, k: int, num_multiprocessors: int) -> NarrowInstance:
    """Return the instance for `m` rows.

    Tall blocks where there are enough of them for most multiprocessors; else k is shared out until
    two blocks a multiprocessor are busy, each share with at least four steps of 64, so that adding
    the shares stays cheap. Multiprocessors are grouped by 14 to 18: clusters of 8 could not fill
    them.
    """
    columns = min(i.columns for i in NARROW_INSTANCES if i.columns >= m)

    def is_able(i: NarrowInstance) -> bool:
        blocks = ceil_div(n, i.tile) * i.splits
        if i.groups > 1 and blocks < 0.75 * num_multiprocessors:
            return False
        if i.columns != columns:
            return False
        most = num_multiprocessors if i.splits == 8 else 2 * num_multiprocessors
        return i.splits == 1 or (blocks <= most and k // 64 // i.splits >= 4)

    return max(filter(is_able, NARROW_INSTANCES), key=lambda i: (i.groups, i.splits))


class CudaKernels:
    """The instances of one model's module, as launches."""

    def __init__(self, module: Module, spec: DeviceSpec) -> None:
        self._module = module
        self.num_multiprocessors = spec.num_multiprocessors
        self._constants: dict[str, int] = {}

    def constant(self, name: str) -> int:
        """Return a 4-byte constant of the module."""
        if name not in self._constants:
            self._constants[name] = self._module.read_uint32(name)
        return self._constants[name]

    def shared_bytes(self, name: str) -> int:
        """Return the dynamic shared memory that a kernel wants."""
        return self.constant(f"{name}_shared_bytes")

    def function(self, name: str) -> Function:
        """Look a kernel up."""
        return self._module.function(name)

    def gemv(
        self,
        x: int,
        weight: int,
        bias: int,
        out: int,
        m: int,
        n: int,
        k: int,
        instance: GemvInstance | None = None,
    ) -> Launch:
        """Return the product of 1..16 rows; `instance` overrides the choice made by size."""
        instance = instance or choose_gemv(m, n, k, self.num_multiprocessors)
        shared = self.shared_bytes(instance.name)
        if instance.input_shared:
            shared += m * (k + 32) * 2
        items = ceil_div(n, 8 * instance.tiles)
        return Launch(
            self.function(instance.name),
            (min(items, self.num_multiprocessors), 1, 1),
            instance.warps * 32,
            shared,
            (
                pointer(weight),
                pointer(x),
                pointer(bias),
                pointer(out),
                c_int32(m),
                c_int32(n),
                c_int32(k),
            ),
        )

    def narrow(
        self,
        x: int,
        weight: int,
        bias: int,
        out: int,
        m: int,
        n: int,
        k: int,
        instance: NarrowInstance | None = None,
    ) -> Launch:
        """Return the product of 1..64 rows by warpgroup products; `k` in steps of 64."""
        instance = instance or choose_narrow(m, n, k, self.num_multiprocessors)
        return Launch(
            self.function(instance.name),
            (instance.splits, ceil_div(n, instance.tile), 1),
            instance.tile,  # as many threads as weight rows
            self.shared_bytes(instance.name),
            (
                *map(pointer, (weight, x, bias, out)),
                *map(c_int32, (m, n, k)),
            ),
        )

    def decode_partial_bytes(self, shape: AttentionShape, batch: int, seqlen: int) -> int:
        """Return the bytes of split results that decode attention wants for a key."""
        splits = share_decode(shape, batch, seqlen, self.num_multiprocessors).num_splits
        return batch * shape.num_q_heads * splits * (shape.head_dim + 2) * 4 if splits > 1 else 0

    def decode_attention(
        self,
        step: StepAddresses,
        shape: AttentionShape,
        q: int,
        k: int,
        v: int,
        out: int,
        kv: int,
        sinks: int,
        partial: int,
        arrivals: int,
        batch: int,
        seqlen: int,
        warps: int = 0,
    ) -> list[Launch]:
        """Return attention (and KV append) of one token a row; `warps` of a block override the
        choice made by size."""
        share = share_decode(shape, batch, seqlen, self.num_multiprocessors)
        blocks = share.num_splits * shape.num_kv_heads * batch
        warps = warps or choose_decode_warps(shape, blocks, self.num_multiprocessors)
        name = decode_attention_kernel(shape.head_dim, shape.is_wide, warps)
        pointers = (
            q,
            k,
            v,
            out,
            kv,
            step.page_table,
            step.row_kv_len,
            step.row_lane,
            sinks,
            partial,
            arrivals,
        )
        numbers = (
            shape.num_kv_heads,
            shape.group,
            step.max_pages_per_lane,
            step.page_shift,
            share.min_split_tokens,
            shape.window,
        )
        return [
            Launch(
                self.function(name),
                (share.num_splits, shape.num_kv_heads, batch),
                warps * 32,
                self.shared_bytes(name),
                (
                    *map(pointer, pointers),
                    *map(c_int32, numbers),
                    c_float(shape.scale),
                    c_float(shape.softcap),
                ),
            )
        ]

    def prefill_attention(
        self,
        step: StepAddresses,
        shape: AttentionShape,
        q: int,
        k: int,
        v: int,
        out: int,
        kv: int,
        sinks: int,
        batch: int,
        num_tokens: int,
    ) -> list[Launch]:
        """Return KV append, then attention over packed rows."""
        append = Launch(
            self.function("append_kv"),
            (num_tokens, 1, 1),
            256,
            0,
            (
                *map(
                    pointer,
                    (k, v, kv, step.page_table, step.positions, step.token_row, step.row_lane),
                ),
                *map(
                    c_int32,
                    (shape.num_kv_heads, shape.head_dim, step.max_pages_per_lane, step.page_shift),
                ),
            ),
        )
        name = f"prefill_attention_{shape.head_dim}"
        tiles = num_tokens // (128 // shape.group) + batch
        pointers = (
            q,
            out,
            kv,
            step.page_table,
            step.row_query_start,
            step.row_kv_len,
            step.row_lane,
            sinks,
        )
        numbers = (
            batch,
            shape.num_kv_heads,
            shape.group,
            step.max_pages_per_lane,
            step.page_shift,
            shape.window,
        )
        attention = Launch(
            self.function(name),
            (shape.num_kv_heads, tiles, 1),
            self.constant(f"{name}_threads"),
            self.shared_bytes(name),
            (
                *map(pointer, pointers),
                *map(c_int32, numbers),
                c_float(shape.scale),
                c_float(shape.softcap),
            ),
        )
        return [append, attention]

    def sample(
        self, step: StepAddresses, logits: int, counts: int, batch: int, vocab_size: int
    ) -> list[Launch]:
        """Return the sampling of every row: a cluster of blocks each, which hold the row.

        Args:
            step: where parameters are and results go; logprobs if there is a place for them.
            logits: [batch, vocab_size].
            counts: uint32 [batch, vocab_size], zero before and after; of tokens that penalties
                look at.
            batch: rows.
            vocab_size: columns.
        """
        blocks, threads = self.constant("sample_rows_blocks"), self.constant("sample_rows_threads")
        parts = blocks * threads // 32
        places = ceil_div(ceil_div(vocab_size, parts), 256) * 256  # RowPart::places
        sampling, state, ids = map(pointer, (step.sampling, step.state, step.sampled_ids))
        vocab = c_int32(vocab_size)
        launches = [
            Launch(
                self.function("sample_rows"),
                (blocks, batch, 1),
                threads,
                places * (threads // 32) * self.constant("sample_rows_element_bytes"),
                (pointer(logits), sampling, state, pointer(counts), ids, vocab),
            )
        ]
        if count_blocks := self.constant("sample_counts_blocks"):
            launches.insert(
                0,
                Launch(
                    self.function("sample_counts"),
                    (count_blocks, batch, 1),
                    self.constant("sample_counts_threads"),
                    0,
                    (sampling, state, pointer(counts), vocab),
                ),
            )
        if step.sampled_logprobs:
            launches.append(
                Launch(
                    self.function("sample_logprobs"),
                    (batch, 1, 1),
                    self.constant("sample_logprobs_threads"),
                    0,
                    (pointer(logits), sampling, ids, pointer(step.sampled_logprobs), vocab),
                )
            )
        return launches

    def finish(self, step: StepAddresses) -> Launch:
        """Return the kernel that writes the completion word."""
        return Launch(self.function("finish_step"), (1, 1, 1), 1, 0, (pointer(step.state),))
