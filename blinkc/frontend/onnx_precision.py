"""Which tensors stay fp32 when a model is compiled to a narrower type: model, probes -> names.

Files often hold no casts: an fp32 export computes norms and rotary angles in its one type. As in
transformers, what is computed from positions stays fp32, and so do norms: sums of squares, roots,
and what they scale, up to the next product or residual sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from blinkc.frontend.onnx_model import ONNX_DOMAINS, OnnxModel

if TYPE_CHECKING:
    import onnx

    from blinkc.frontend.onnx_probe import Probe

_WIDE_OPS = {"Pow", "Sqrt", "Reciprocal", "Exp", "Log", "Softmax", "LogSoftmax"}
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Max", "Min", "Where", "Clip"}
_VIEWS = {
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Transpose",
    "Slice",
    "Split",
    "Concat",
    "Gather",
    "Expand",
    "Identity",
    "Cast",
    "TopK",
}


def wide_tensors(model: OnnxModel, probes: Sequence[Probe]) -> set[str]:
    """Return the names of tensors to keep in fp32."""
    data = probes[0].unknown_data
    wide: set[str] = set()
    for node in model.nodes:
        if node.domain not in ONNX_DOMAINS:
            continue
        inputs = [name for name in node.input if name in data]
        if not inputs or _is_wide(node, inputs, wide, probes[0]):
            wide.update(name for name in node.output if name)
    return wide


def _is_wide(node: onnx.NodeProto, inputs: list[str], wide: set[str], probe: Probe) -> bool:
    op = node.op_type
    if op in _WIDE_OPS or op.startswith("Reduce"):
        return True
    if op in _VIEWS:
        return all(name in wide for name in inputs)
    if op not in _ELEMENTWISE or not any(name in wide for name in inputs):
        return False
    # A norm scales its input by something reduced; a residual sum adds two tensors of full size.
    size = math.prod(probe.shapes.get(node.output[0], ()))
    return all(
        name in wide or any(_is_smaller(other, size, probe) for other in inputs if other in wide)
        for name in inputs
    )


def _is_smaller(name: str, size: int, probe: Probe) -> bool:
    return math.prod(probe.shapes.get(name, ())) < size
