"""Root-mean-square norms spelled out in primitive ops: tensor, scale -> normed tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

    from blinkc.frontend.onnx_emit import DecoderEmitter

_FLOAT = 1  # TensorProto.FLOAT


def rms_norm(
    emitter: DecoderEmitter,
    source: gs.Tensor,
    scale: str,
    epsilon: float,
    *,
    like: str,
    name: str = "",
) -> gs.Tensor:
    """Write x / sqrt(mean(x^2) + epsilon) * scale over the last axis.

    The norm runs in fp32, as the ops' definitions want; the result has the type of the file's
    tensor `like`.
    """
    writer = emitter.writer
    element_type = emitter.mapped_type(like)
    wide = source if element_type == _FLOAT else writer.cast(source, _FLOAT)
    two = writer.constant(np.array(2.0, dtype=np.float32), name="two")
    square = writer.one("Pow", wide, two)
    mean = writer.one("ReduceMean", square, writer.ints(-1), keepdims=1)
    shifted = writer.one("Add", mean, writer.number(epsilon, _FLOAT))
    inverse = writer.one("Reciprocal", writer.one("Sqrt", shifted))
    normed = writer.one("Mul", wide, inverse)
    if element_type != _FLOAT:
        normed = writer.cast(normed, element_type)
    return writer.one("Mul", normed, emitter.operand(scale), name=name)
