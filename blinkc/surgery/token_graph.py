"""The graph that surgery builds: activations `[rows, *inner]`, equal nodes made once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from blinkc.errors import BlinkError
from blinkc.surgery.fold_shapes import ROW_SYMBOLS, Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """A tensor of the front end's graph.

    `shape` is the shape it has there, rows as a symbol; `tensor` is what carries it in the new
    graph, of shape `squeezed(shape)`; `value` is its content where that is known, and then there
    may be no tensor. `items` are the members where it is a sequence of tensors.
    """

    shape: Shape
    dtype: np.dtype[Any]
    tensor: gs.Tensor | None = None
    value: np.ndarray | None = None
    items: tuple[Operand, ...] = ()

    @property
    def has_rows(self) -> bool:
        return bool(self.shape) and self.shape[0] in ROW_SYMBOLS


def squeezed(shape: Shape) -> Shape:
    """Drop unit axes behind the rows; two axes stay where there were two or more."""
    if not shape or shape[0] not in ROW_SYMBOLS or len(shape) == 1:
        return shape
    return (shape[0], *([dim for dim in shape[1:] if dim != 1] or [1]))


def kept_axes(shape: Shape, *wanted: int) -> list[int]:
    """Say which axes of `shape` survive squeezing, or must because an op works on them."""
    if not shape or shape[0] not in ROW_SYMBOLS:
        return list(range(len(shape)))
    kept = [0, *(axis for axis in range(1, len(shape)) if shape[axis] != 1 or axis in wanted)]
    if len(kept) == 1 and len(shape) > 1:
        kept.append(len(shape) - 1)
    return kept


def check_rows(shape: Shape, where: str) -> None:
    """Refuse shapes with rows anywhere but in front.

    Raises:
        BlinkError: tokens lie on another axis, so the node mixes or reorders them.
    """
    if any(isinstance(dim, str) for dim in shape[1:]):
        raise BlinkError(
            f"{where} makes a tensor of shape {list(shape)}: tokens must stay on axis 0",
            hint="an op that mixes tokens outside blink::PagedAttention cannot be compiled",
        )


class TokenGraph:
    """Builds the squeezed graph node by node."""

    def __init__(self, row_inputs: Mapping[str, gs.Tensor]) -> None:
        self._row_inputs = row_inputs  # a 1-D int64 input for each row symbol
        self.nodes: list[gs.Node] = []
        self._constants: dict[tuple[Any, ...], gs.Constant] = {}
        self._made: dict[tuple[Any, ...], tuple[gs.Variable, ...]] = {}
        self._num_tensors = 0

    def emit(
        self,
        op: str,
        inputs: Sequence[gs.Tensor],
        attributes: Mapping[str, Any],
        outputs: Sequence[tuple[Shape, np.dtype[Any]]],
        *,
        domain: str = "",
    ) -> tuple[gs.Variable, ...]:
        """Add a node, or return the outputs of an equal one that is there already."""
        frozen = tuple(sorted((name, _freeze(value)) for name, value in attributes.items()))
        key = (domain, op, tuple(id(tensor) for tensor in inputs), frozen, len(outputs))
        if key not in self._made:
            made = tuple(self._variable(shape, dtype) for shape, dtype in outputs)
            self.nodes.append(
                gs.Node(
                    op=op,
                    name=f"n{len(self.nodes)}",
                    attrs=dict(attributes),
                    inputs=list(inputs),
                    outputs=list(made),
                    domain=domain or None,
                )
            )
            self._made[key] = made
        return self._made[key]

    def constant(self, value: np.ndarray) -> gs.Constant:
        """Return the constant of this content."""
        value = np.ascontiguousarray(value).reshape(value.shape)
        key = (str(value.dtype), value.shape, value.tobytes())
        if key not in self._constants:
            self._constants[key] = gs.Constant(f"c{len(self._constants)}", value)
        return self._constants[key]

    def view(self, tensor: gs.Tensor, shape: Shape) -> gs.Tensor:
        """See a tensor under another shape with the same number of elements a row."""
        if tuple(tensor.shape) == shape:
            return tensor
        if isinstance(tensor, gs.Constant):
            return self.constant(np.asarray(tensor.values).reshape(shape))
        if tensor.inputs and tensor.inputs[0].op == "Reshape":
            return self.view(tensor.inputs[0].inputs[0], shape)
        target = [-1 if isinstance(dim, str) else dim for dim in shape]
        counted = math.prod(dim for dim in tensor.shape if not isinstance(dim, str))
        assert counted == math.prod(dim for dim in shape if not isinstance(dim, str))
        inputs = [tensor, self.constant(np.array(target, dtype=np.int64))]
        return self.emit("Reshape", inputs, {}, [(shape, tensor.dtype)])[0]

    def filled_rows(self, rows: str, value: np.ndarray) -> gs.Tensor:
        """Give every row the same content `[*inner]`: zero times an input, plus the content."""
        source = self._row_inputs[rows]
        int64, width = np.dtype(np.int64), (1,) * max(value.ndim, 1)
        zero = self.constant(np.array(0, dtype=np.int64))
        zeros = self.emit("Mul", [source, zero], {}, [((rows,), int64)])[0]
        column = self.view(zeros, (rows, *width))
        if value.dtype != int64:
            to = {"to": onnx.helper.np_dtype_to_tensor_dtype(value.dtype)}
            column = self.emit("Cast", [column], to, [((rows, *width), value.dtype)])[0]
        shape = (rows, *(value.shape or (1,)))
        return self.emit("Add", [column, self.constant(value)], {}, [(shape, value.dtype)])[0]

    def tensor_of(self, operand: Operand) -> gs.Tensor:
        """Return the tensor of an operand, as a constant where only its value is known."""
        if operand.tensor is not None:
            return operand.tensor
        if operand.value is None or operand.value.dtype == object:
            raise BlinkError(
                "the model computes with the number of tokens in a step",
                hint="a compiled model may use it for shapes only",
            )
        return self.constant(operand.value)

    def _variable(self, shape: Shape, dtype: np.dtype[Any]) -> gs.Variable:
        self._num_tensors += 1
        return gs.Variable(f"t{self._num_tensors}", dtype=dtype, shape=shape)


def _freeze(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, float):
        return value.hex()
    return value
