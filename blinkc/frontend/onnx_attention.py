"""What an attention found in an ONNX graph is, and the proof that it is `blink::PagedAttention`.

A matcher (GroupQueryAttention, the standard Attention, or primitive ops) says where queries, new
keys and new values enter, where the result leaves, and which scale, window and soft cap it believes
in. Unless the op states all that itself, `verify_attention` runs the region on random numbers and
compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_model import OnnxModel, describe_node

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx

    from blinkc.frontend.onnx_probe import Probe

    Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsSource:
    """A tensor that holds heads: which axis counts tokens, which one runs over the head's elements.

    `columns` picks a range of the last axis first (packed QKV). With `is_flat` the last axis holds
    `heads * head_dim` elements; otherwise all other axes together count the heads.
    """

    name: str
    heads: int
    head_dim: int
    token_axis: int
    dim_axis: int
    is_flat: bool = False
    columns: tuple[int, int] | None = None

    def to_heads(self, values: Array) -> Array:
        """Return `[tokens, heads, head_dim]`."""
        if self.columns:
            values = values[..., self.columns[0] : self.columns[1]]
        if self.is_flat:
            return np.asarray(values.reshape(-1, self.heads, self.head_dim))
        moved = values.transpose(self.permutation(values.ndim))
        return np.asarray(moved.reshape(moved.shape[0], self.heads, self.head_dim))

    def permutation(self, rank: int) -> list[int]:
        """Return the axis order that puts tokens first and the head's elements last."""
        others = [a for a in range(rank) if a not in (self.token_axis, self.dim_axis)]
        return [self.token_axis, *others, self.dim_axis]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSource:
    """Rotation that the attention op does itself: tables `[positions, rotary_dim / 2]`."""

    cos: str
    sin: str
    is_interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSource:
    """Norms of each query and key head that the attention op does itself, before rotation."""

    query: str
    key: str
    query_epsilon: float
    key_epsilon: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMatch:
    """One attention layer of the graph. `output` is replaced by the cut op's result."""

    node: onnx.NodeProto
    query: HeadsSource
    key: HeadsSource
    value: HeadsSource
    output: HeadsSource
    past_key: str
    past_value: str
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: str = ""
    has_zero_sinks: bool = False
    norms: NormSource | None = None
    rope: RopeSource | None = None
    bias: tuple[str, str, str] = ("", "", "")  # initializers added to q, k and v before rotation
    needs_proof: bool = True  # False when the op's own definition says all


def token_axis(name: str, probes: Sequence[Probe]) -> int | None:
    """Return the one axis that counts new tokens at every size, or None."""
    shapes = [probe.shapes.get(name) for probe in probes]
    if any(shape is None for shape in shapes):
        return None
    known = [shape for shape in shapes if shape is not None]
    axes = [
        axis
        for axis in range(len(known[0]))
        if all(s[axis] == p.seq for s, p in zip(known, probes, strict=True))
    ]
    return axes[0] if len(axes) == 1 else None


def heads_source(
    model: OnnxModel, name: str, probes: Sequence[Probe], *, dim_axis: int = -1
) -> HeadsSource:
    """Read the layout of a tensor that holds heads apart off its shapes."""
    axis = token_axis(name, probes)
    shape = probes[0].shapes.get(name, ())
    if axis is None or len(shape) < 3:
        raise BlinkError(
            f"{model.path}: tensor '{name}' (shape {list(shape)} for {probes[0].seq} tokens) "
            "does not "
            "hold one row per token"
        )
    dim_axis %= len(shape)
    head_dim = shape[dim_axis]
    heads = math.prod(shape) // (shape[axis] * head_dim)
    return HeadsSource(
        name=name, heads=heads, head_dim=head_dim, token_axis=axis, dim_axis=dim_axis
    )


def reference_attention(
    match: AttentionMatch, query: Array, key: Array, value: Array, past: int
) -> Array:
    """Compute attention the slow, obvious way.

    `query` `[T, Hq, d]`, `key` and `value` `[past + T, Hkv, d]`; returns `[T, Hq, d]` in float64.
    """
    groups = query.shape[1] // key.shape[1]
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    scores = np.einsum("thd,nhd->htn", q, k) * match.scale
    if match.softcap:
        scores = match.softcap * np.tanh(scores / match.softcap)
    scores = np.where(expected_mask(q.shape[0], past, match.window), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("htn,nhd->thd", weights, v))


def expected_mask(seq: int, past: int, window: int) -> Array:
    """Return `[seq, past + seq]`: which keys each query may see."""
    distance = np.arange(past, past + seq)[:, None] - np.arange(past + seq)[None, :]
    mask = distance >= 0
    if window:
        mask &= distance < window
    return np.asarray(mask)


def verify_attention(model: OnnxModel, match: AttentionMatch, probes: Sequence[Probe]) -> None:
    """Run the matched region on random numbers and compare it with what will replace it.

    Raises BlinkError naming the node when they differ.
    """
    random = np.random.default_rng(0)
    past_sources = [_past_source(name, probes) for name in (match.past_key, match.past_value)]
    for probe in probes:
        feeds: dict[str, Array] = {}
        names = [
            match.query.name,
            match.key.name,
            match.value.name,
            *(s.name for s in past_sources),
        ]
        for name in names:
            noise = random.standard_normal(probe.shapes[name]) * 1.5
            feeds[name] = noise.astype(_numpy_type(probe.types[name]))
        result = probe.run_region(match.output.name, feeds)
        if result is None:
            raise BlinkError(
                f"{model.path}: {describe_node(match.node)}: the attention around it depends on "
                "more than "
                "queries, keys, values and the mask"
            )
        new_key, new_value = (s.to_heads(feeds[s.name]) for s in (match.key, match.value))
        old_key, old_value = (s.to_heads(feeds[s.name]) for s in past_sources)
        wanted = reference_attention(
            match,
            match.query.to_heads(feeds[match.query.name]),
            np.concatenate([old_key, new_key]),
            np.concatenate([old_value, new_value]),
            probe.past,
        )
        got = match.output.to_heads(np.asarray(result, dtype=np.float64))
        tolerance = 2e-4 if feeds[match.query.name].dtype == np.float32 else 4e-2
        if got.shape != wanted.shape or not np.allclose(
            got, wanted, atol=tolerance, rtol=tolerance
        ):
            error = (
                "its shape" if got.shape != wanted.shape else f"{np.abs(got - wanted).max():.3g}"
            )
            raise BlinkError(
                f"{model.path}: {describe_node(match.node)} is not plain causal attention over "
                "the KV cache "
                f"(with {probe.seq} new and {probe.past} past tokens its result is off by {error})",
                hint="only softmax(scale * q k^T, causal or sliding mask, soft cap) v is supported",
            )


def _past_source(name: str, probes: Sequence[Probe]) -> HeadsSource:
    """Return the layout of a KV input `[1, H, past, d]` (any order of the last three axes)."""
    first, second = (probe.shapes[name] for probe in probes[:2])
    axis = next(a for a in range(4) if first[a] != second[a])
    dim_axis = 3 if axis != 3 else 2
    return HeadsSource(
        name=name,
        heads=math.prod(d for a, d in enumerate(first) if a not in (axis, dim_axis)),
        head_dim=first[dim_axis],
        token_axis=axis,
        dim_axis=dim_axis,
    )


def _numpy_type(element_type: int) -> Any:
    import onnx

    return onnx.helper.tensor_dtype_to_np_dtype(element_type)
