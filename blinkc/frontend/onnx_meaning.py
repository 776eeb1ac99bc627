"""What an ONNX decoder's tensors mean once lengths and mask are gone: probes -> `Meaning`.

A tensor is a weight, a constant (the same at every size), the tokens' positions, or has to be
computed; its token axis is the one whose length follows the number of new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_attention import token_axis
from blinkc.frontend.onnx_model import ONNX_DOMAINS, OnnxModel, describe_node

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx

    from blinkc.frontend.onnx_probe import Probe

    Array = npt.NDArray[Any]

_FOLD_ELEMENTS = 1 << 24  # computed constants above this stay nodes
_WEIGHT_VIEWS = {"Identity", "Cast", "Transpose"}
_BROADCASTING = {"Add", "Sub", "Mul", "Div", "Where", "And", "Or", "Pow", "Min", "Max", "Equal"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """`kind`: "weight", "constant" (then `value`), "positions", or "computed"."""

    kind: str
    value: Array | None = None


class MeaningOf:
    """Looks meanings up, once per tensor. The last probe is the largest."""

    def __init__(self, model: OnnxModel, probes: Sequence[Probe]) -> None:
        self.model = model
        self.probes = probes
        self._found: dict[str, Meaning] = {}
        self._axes: dict[str, int | None] = {}

    def __call__(self, name: str) -> Meaning:
        if name not in self._found:
            self._found[name] = self._decide(name)
        return self._found[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape at the first size."""
        shape = self.probes[0].shapes.get(name)
        if shape is None:
            node = self.model.producer.get(name)
            where = describe_node(node) if node is not None else f"tensor '{name}'"
            raise BlinkError(f"{self.model.path}: {where}: the shape of its result is not known")
        return shape

    def element_type(self, name: str) -> int:
        """Return the ONNX element type in the file."""
        return self.probes[0].types[name]

    def token_axis(self, name: str) -> int | None:
        """Return the axis that counts tokens, or tokens times heads, or None.

        Raises BlinkError when the shape follows the lengths in any other way.
        """
        if name not in self._axes:
            shapes = [probe.shapes.get(name, ()) for probe in self.probes]
            axis = _token_axis(shapes, [probe.seq for probe in self.probes])
            rest = {tuple(d for a, d in enumerate(s) if a != axis) for s in shapes}
            if len(rest) != 1:
                node = self.model.producer.get(name)
                where = describe_node(node) if node is not None else f"tensor '{name}'"
                sizes = ", ".join(
                    f"{list(s)} for {p.seq}+{p.past}"
                    for s, p in zip(shapes, self.probes, strict=True)
                )
                raise BlinkError(
                    f"{self.model.path}: {where} mixes tokens: its result has shape {sizes} "
                    "new+past tokens",
                    hint="outside of attention a decoder may only work token by token",
                )
            self._axes[name] = axis
        return self._axes[name]

    def packed_shape(self, name: str) -> list[int]:
        """Return the shape with tokens on axis 0 (-1), each as a batch entry of length 1.

        An axis of tokens times heads keeps the heads.
        """
        dims = list(self.shape(name))
        axis = self.token_axis(name)
        if axis is None:
            return dims
        if (dims[0] != 1) if axis else (self.rows_per_token(name) != 1):
            node = self.model.producer.get(name)
            where = describe_node(node) if node is not None else f"tensor '{name}'"
            raise BlinkError(f"{self.model.path}: {where}: axis 0 of {dims} is not the batch")
        dims[axis] = self.rows_per_token(name)
        dims[0] = -1
        return dims

    def rows_per_token(self, name: str) -> int:
        """Return how many entries of the token axis belong to one token."""
        axis = self.token_axis(name)
        return 1 if axis is None else self.shape(name)[axis] // self.probes[0].seq

    def _decide(self, name: str) -> Meaning:
        if name in self.model.initializers or self._is_weight_view(name):
            return Meaning(kind="weight" if name in self.model.initializers else "computed")
        if name in self.probes[0].unknown_data:
            return Meaning(kind="computed")
        if any(np.prod(p.shapes.get(name, (0,))) > _FOLD_ELEMENTS for p in self.probes):
            return Meaning(kind="computed")
        values = [probe.value(name) for probe in self.probes]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return Meaning(kind="computed")
        if all(_same(value, known[0]) for value in known):
            return Meaning(kind="constant", value=known[0])
        if self._is_positions(known):
            return Meaning(kind="positions")
        uniform = np.unique(np.concatenate([value.ravel() for value in known]))
        if (
            len(uniform) == 1
            and len({value.ndim for value in known}) == 1
            and self._only_broadcast(name)
        ):
            axes = zip(*(value.shape for value in known), strict=True)
            shape = tuple(dims[0] if len(set(dims)) == 1 else 1 for dims in axes)
            return Meaning(kind="constant", value=np.full(shape, uniform[0], dtype=known[0].dtype))
        table = self._table(name, known)
        return Meaning(kind="computed") if table is None else Meaning(kind="constant", value=table)

    def _is_positions(self, values: Sequence[Array]) -> bool:
        """Is it `past .. past + seq - 1` at every size, whatever it was computed from?"""
        return all(
            value.dtype.kind in "iu"
            and value.size == probe.seq
            and np.array_equal(value.ravel(), np.arange(probe.past, probe.total))
            for value, probe in zip(values, self.probes, strict=True)
        )

    def _table(self, name: str, values: Sequence[Array]) -> Array | None:
        """Return the longest of tables cut to the total length, if only looked up by position.

        Older exports cut a rotary table to `past + seq` rows before they gather the positions'
        rows.
        """
        users = self.model.consumers.get(name, [])
        axes = [_gather_axis(node, name) for node in users if node.op_type != "Shape"]
        if not axes or any(axis is None or axis != axes[0] for axis in axes) or axes[0] is None:
            return None
        axis = axes[0]
        whole = np.moveaxis(values[-1], axis, 0)
        for value, probe in zip(values, self.probes, strict=True):
            rows = np.moveaxis(value, axis, 0)
            if len(rows) < probe.total or not np.array_equal(rows, whole[: len(rows)]):
                return None
        return values[-1]

    def _only_broadcast(self, name: str) -> bool:
        users = [n for n in self.model.consumers.get(name, []) if n.op_type != "Shape"]
        return all(
            node.op_type in _BROADCASTING
            and any(i != name and self._has_tokens(i) for i in node.input)
            for node in users
        )

    def _has_tokens(self, name: str) -> bool:
        return token_axis(name, self.probes) is not None

    def _is_weight_view(self, name: str) -> bool:
        """Is it a large initializer seen through casts and transposes? Those stay nodes."""
        node = self.model.producer.get(name)
        while node is not None and node.op_type in _WEIGHT_VIEWS and node.domain in ONNX_DOMAINS:
            name = node.input[0]
            node = self.model.producer.get(name)
        tensor = self.model.initializers.get(name)
        return tensor is not None and len(tensor.dims) >= 2


def _token_axis(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> int | None:
    """Return the one axis that grows with the new tokens: as long, or a multiple, at every size."""
    if len({len(shape) for shape in shapes}) != 1:
        return None
    axes = []
    for axis in range(len(shapes[0])):
        ratios = {divmod(shape[axis], seq) for shape, seq in zip(shapes, sizes, strict=True)}
        if len(ratios) == 1 and ratios.pop()[1] == 0 and shapes[0][axis]:
            axes.append(axis)
    return axes[0] if len(axes) == 1 else None


def _same(value: Array, other: Array) -> bool:
    if value.shape != other.shape:
        return False
    return value.tobytes() == other.tobytes()


def _gather_axis(node: onnx.NodeProto, name: str) -> int | None:
    if node.op_type != "Gather" or node.input[0] != name:
        return None
    return next((int(a.i) for a in node.attribute if a.name == "axis"), 0)
