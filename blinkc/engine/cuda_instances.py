"""Which instances of the streaming product (gemv.cuh) every CUDA model gets; read by compiler and
loader."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GemvInstance:
    """Template arguments of one instance.

    A block's `warps` split K; `depth` steps are in flight; a work item is `tiles` times 8 weight
    rows by `row_tiles` times 8 activation rows. `input_shared`: the activations stay in shared
    memory.
    """

    name: str
    tiles: int
    row_tiles: int
    input_shared: bool
    warps: int
    depth: int

    @property
    def max_rows(self) -> int:
        """Return the most activation rows it takes."""
        return 8 * self.row_tiles


GEMV_INSTANCES = (
    GemvInstance(name="gemv_resident", tiles=2, row_tiles=1, input_shared=True, warps=16, depth=10),
    GemvInstance(name="gemv_8", tiles=2, row_tiles=1, input_shared=False, warps=16, depth=6),
    GemvInstance(name="gemv_8x4", tiles=4, row_tiles=1, input_shared=False, warps=8, depth=8),
    GemvInstance(name="gemv_16", tiles=2, row_tiles=2, input_shared=False, warps=16, depth=4),
    GemvInstance(name="gemv_16x4", tiles=4, row_tiles=2, input_shared=False, warps=8, depth=6),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowInstance:
    """Template arguments of one instance of the product for up to 64 rows (narrow.cuh).

    `columns` activation rows; `splits` blocks of a cluster share k; `stages` of 64 values of k are
    in shared memory; each of `groups` warpgroups has 128 weight rows.
    """

    columns: int
    groups: int
    splits: int
    stages: int

    @property
    def name(self) -> str:
        """Return the kernel's name."""
        return f"narrow_{self.columns}_{self.groups}_{self.splits}_{self.stages}"

    @property
    def tile(self) -> int:
        """Return the weight rows of a block."""
        return 128 * self.groups


# Activations are read anew by every block, through L2: of 64 columns two warpgroups share them
# where there are weight rows enough.
NARROW_INSTANCES = (
    *(
        NarrowInstance(columns=columns, groups=1, splits=splits, stages=stages)
        for columns, stages in ((16, 5), (32, 4), (64, 4))
        for splits in (1, 2, 4, 8)
    ),
    NarrowInstance(columns=64, groups=2, splits=1, stages=4),
)


def decode_attention_warps(head_dim: int, wide: bool) -> tuple[int, ...]:
    """Return the warps of a block of each instance of decode attention, most first.

    Wide groups and heads want more registers. Of heads of 65 to 128 one block of eight warps fits
    on a multiprocessor, two of six, four of three: where there are many rows, smaller blocks start
    and merge while others stream. Smaller heads fit more than once as they are.
    """
    if wide or head_dim > 128:
        return (4,)
    return (8, 6, 3) if head_dim > 64 else (8,)


def decode_attention_kernel(head_dim: int, wide: bool, warps: int) -> str:
    """Return the name of an instance."""
    return f"decode_attention_{head_dim}{'_wide' if wide else ''}_{warps}"


EXPERT_STREAM_WARPS = 8
EXPERT_STREAM_BLOCKS_PER_MULTIPROCESSOR = 2
