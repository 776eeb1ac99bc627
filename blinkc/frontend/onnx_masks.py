"""Masks of an ONNX attention: their values at several sizes -> a window, or an error.

However a mask was spelled, at a given size it is an array. It is accepted when it is the causal
mask, or the causal mask cut to a sliding window, at every size probed; the largest size is the
model's own limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_attention import expected_mask
from blinkc.frontend.onnx_model import OnnxModel, describe_node

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx

    from blinkc.frontend.onnx_probe import Probe

    Array = npt.NDArray[Any]

MASKED_BELOW = -9000.0  # additive masks use -inf, the type's minimum, or -10000


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskUse:
    """One mask. `kind`: "add" (0 or very negative), "keep" (true: seen), "drop" (true: hidden)."""

    node: onnx.NodeProto
    name: str
    kind: str


def window_from_masks(
    model: OnnxModel,
    node: onnx.NodeProto,
    masks: Sequence[MaskUse],
    probes: Sequence[Probe],
    *,
    is_causal: bool = False,
    window: int = 0,
) -> int:
    """Return the window (0: none) that all masks together amount to.

    `is_causal` and `window` are what the attention op masks by itself.

    Raises BlinkError naming the node that applies a mask which is neither causal nor sliding.
    """
    allowed = []
    for probe in probes:
        seen = np.ones((probe.seq, probe.total), dtype=bool)
        if is_causal:
            seen &= expected_mask(probe.seq, probe.past, window)
        for mask in masks:
            seen &= _allowed_by(model, mask, probe)
        allowed.append(seen)
    largest = max(range(len(probes)), key=lambda i: probes[i].total)
    visible = int(allowed[largest][-1].sum())
    found = visible if visible < probes[largest].total else 0
    for probe, seen in zip(probes, allowed, strict=True):
        if not np.array_equal(seen, expected_mask(probe.seq, probe.past, found)):
            where = describe_node(masks[0].node if masks else node)
            what = "is not causal" if seen.all() else "is neither causal nor a sliding window"
            raise BlinkError(
                f"{model.path}: {where}: the attention mask {what} "
                f"(with {probe.seq} new and {probe.past} past tokens)",
                hint="only causal and sliding-window attention can be served",
            )
    return found


def _allowed_by(model: OnnxModel, mask: MaskUse, probe: Probe) -> Array:
    """Return `[seq, total]`: what one mask lets through."""
    value = probe.value(mask.name)
    where = f"{model.path}: {describe_node(mask.node)}"
    if value is None:
        raise BlinkError(
            f"{where}: its mask '{mask.name}' depends on more than the attention mask and the "
            "lengths",
            hint="position biases (ALiBi, relative) and custom masks are not supported",
        )
    if value.dtype == bool:
        seen = value if mask.kind != "drop" else ~value
    else:
        numbers = np.asarray(value, dtype=np.float64)
        seen = numbers == 0
        if not np.all(seen | (numbers <= MASKED_BELOW)):
            raise BlinkError(
                f"{where}: it adds a bias to the scores, not only a mask (values such as "
                f"{float(numbers[~seen & (numbers > MASKED_BELOW)][0]):.4g})",
                hint="position biases such as ALiBi are not supported",
            )
    rank_wanted = max(seen.ndim, 2)
    try:
        full = np.broadcast_to(
            seen,
            np.broadcast_shapes(seen.shape, (1,) * (rank_wanted - 2) + (probe.seq, probe.total)),
        )
    except ValueError as error:
        raise BlinkError(f"{where}: the mask has shape {list(value.shape)}") from error
    planes = full.reshape(-1, *full.shape[-2:])
    if planes.shape[1:] != (probe.seq, probe.total) or not (planes == planes[:1]).all():
        raise BlinkError(f"{where}: the mask differs from head to head")
    return np.asarray(planes[0])
