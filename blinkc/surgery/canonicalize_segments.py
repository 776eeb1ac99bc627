"""Pieces of the graph -> segments, named and ordered so that equal layers give equal bytes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from blinkc.errors import BlinkError
from blinkc.surgery.cut_segments import Piece, is_made_anew
from blinkc.surgery.fold_shapes import TOKENS
from blinkc.surgery.segments import Segment, ValueSpec

DTYPE_NAMES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int32": "int32",
    "int64": "int64",
}


@dataclass(kw_only=True, slots=True)
class CanonicalPiece:
    """A segment's model, and what its inputs and outputs are in the whole graph, in order."""

    segment: Segment
    activations: list[gs.Tensor]
    weights: list[gs.Tensor]
    outputs: list[gs.Tensor]


def canonicalize_piece(piece: Piece, is_weight: Callable[[gs.Tensor], bool]) -> CanonicalPiece:
    """Write `piece` as a model of its own.

    Nodes come in the order of a depth-first walk from the outputs, so the result depends on the
    piece's structure alone. Activations are `[rows, n]` (1-D for ids and positions).
    """
    writer = _Writer(is_weight, piece.nodes)
    outputs = [writer.write_output(tensor, f"o{i}") for i, tensor in enumerate(piece.outputs)]
    inputs, weights = list(writer.activations.values()), list(writer.weights.values())
    graph = gs.Graph(
        nodes=writer.nodes,
        inputs=[*(v.inner for v in inputs), *(v.inner for v in weights)],
        outputs=outputs,
        name="segment",
        opset=18,
        import_domains=[onnx.helper.make_opsetid("", 18)],
    )
    model = gs.export_onnx(graph, do_type_check=False)
    model.ir_version = 8
    digest = hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    segment = Segment(
        name="",
        digest=digest,
        model=model,
        activations=tuple(value_spec(v.inner) for v in inputs),
        weights=tuple(_weight_spec(v.inner) for v in weights),
        outputs=tuple(value_spec(tensor) for tensor in outputs),
    )
    return CanonicalPiece(
        segment=segment,
        activations=[v.outer for v in inputs],
        weights=[v.outer for v in weights],
        outputs=list(piece.outputs),
    )


def value_spec(tensor: gs.Tensor, name: str | None = None) -> ValueSpec:
    """Describe a tensor that passes between calls."""
    rows = "tokens" if tensor.shape[0] == TOKENS else "samples"
    inner = tuple(int(dim) for dim in tensor.shape[1:])
    return ValueSpec(name=name or tensor.name, rows=rows, shape=inner, dtype=_dtype_name(tensor))


def flat_shape(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shape of a tensor while it crosses a cut: two axes, or one for ids and positions."""
    return (shape[0], math.prod(shape[1:]))


def _weight_spec(tensor: gs.Tensor) -> ValueSpec:
    shape = tuple(int(dim) for dim in tensor.shape)
    return ValueSpec(name=tensor.name, rows="", shape=shape, dtype=_dtype_name(tensor))


def _dtype_name(tensor: gs.Tensor) -> str:
    name = DTYPE_NAMES.get(np.dtype(tensor.dtype).name)
    if name is None:
        raise BlinkError(
            f"tensor `{tensor.name}` has type {tensor.dtype}, which no segment may take"
        )
    return name


@dataclass(kw_only=True, slots=True)
class _Input:
    outer: gs.Tensor
    inner: gs.Variable


class _Writer:
    """Clones what a piece computes, by depth-first walks from its outputs."""

    def __init__(self, is_weight: Callable[[gs.Tensor], bool], own: set[int]) -> None:
        self._is_weight = is_weight
        self._own = own
        self._made: dict[int, gs.Tensor] = {}
        self._constants: dict[tuple[Any, ...], gs.Constant] = {}
        self.nodes: list[gs.Node] = []
        self.activations: dict[int, _Input] = {}
        self.weights: dict[int, _Input] = {}

    def write_output(self, tensor: gs.Tensor, name: str) -> gs.Tensor:
        """Compute `tensor`, flattened for its way across the cut."""
        inner = self._view(self._write(tensor), flat_shape(tuple(tensor.shape)))
        if not inner.inputs or inner.name.startswith("o"):
            # An output must have a node and a name of its own.
            inner = self._emit("Identity", [inner], {}, [inner])[0]
        inner.name = name
        return inner

    def _write(self, tensor: gs.Tensor) -> gs.Tensor:
        key = id(tensor)
        if key not in self._made:
            self._made[key] = self._write_new(tensor)
        return self._made[key]

    def _write_new(self, tensor: gs.Tensor) -> gs.Tensor:
        if isinstance(tensor, gs.Constant):
            return self._constant(np.asarray(tensor.values))
        if self._is_weight(tensor):
            return self._input(self.weights, tensor, "w", tuple(tensor.shape))
        producer = tensor.inputs[0] if tensor.inputs else None
        if producer is not None and (id(producer) in self._own or is_made_anew(tensor)):
            inputs = [self._write(source) for source in producer.inputs]
            outputs = self._emit(producer.op, inputs, dict(producer.attrs), producer.outputs)
            for outer, inner in zip(producer.outputs, outputs, strict=True):
                self._made[id(outer)] = inner
            return self._made[id(tensor)]
        shape = tuple(tensor.shape)
        crossing = shape if producer is None else flat_shape(shape)
        return self._view(self._input(self.activations, tensor, "a", crossing), shape)

    def _input(
        self, among: dict[int, _Input], tensor: gs.Tensor, prefix: str, shape: tuple[Any, ...]
    ) -> gs.Tensor:
        inner = gs.Variable(f"{prefix}{len(among)}", dtype=tensor.dtype, shape=shape)
        among[id(tensor)] = _Input(outer=tensor, inner=inner)
        return inner

    def _view(self, tensor: gs.Tensor, shape: tuple[Any, ...]) -> gs.Tensor:
        if tuple(tensor.shape) == shape:
            return tensor
        if tensor.inputs and tensor.inputs[0].op == "Reshape":
            return self._view(tensor.inputs[0].inputs[0], shape)
        target = np.array([-1 if isinstance(d, str) else d for d in shape], dtype=np.int64)
        like = gs.Variable("", dtype=tensor.dtype, shape=shape)
        return self._emit("Reshape", [tensor, self._constant(target)], {}, [like])[0]

    def _constant(self, value: np.ndarray) -> gs.Constant:
        key = (str(value.dtype), value.shape, value.tobytes())
        if key not in self._constants:
            self._constants[key] = gs.Constant(f"c{len(self._constants)}", value)
        return self._constants[key]

    def _emit(
        self, op: str, inputs: list[gs.Tensor], attributes: dict[str, Any], likes: list[gs.Tensor]
    ) -> list[gs.Variable]:
        number = len(self.nodes)
        outputs = [
            gs.Variable(f"t{number}_{index}", dtype=like.dtype, shape=tuple(like.shape))
            for index, like in enumerate(likes)
        ]
        self.nodes.append(gs.Node(op, f"n{number}", attributes, inputs, outputs))
        return outputs
