"""Rewrite an ONNX decoder for packed tokens: model, meanings, matches -> the new graph's nodes.

Tokens lie on axis 0, as if each were a batch entry of length one: what a decoder computes per batch
entry is then per token. Only what the logits need is written; masks, lengths and KV plumbing fall
away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_attention import AttentionMatch
from blinkc.frontend.onnx_meaning import MeaningOf
from blinkc.frontend.onnx_model import ONNX_DOMAINS, OnnxModel, attribute_values, describe_node
from blinkc.frontend.onnx_precision import wide_tensors
from blinkc.frontend.onnx_weights import DTYPE_NAMES, part_from_initializer, tensor_array

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx
    import onnx_graphsurgeon as gs

    from blinkc.frontend.onnx_writer import GraphWriter

    Array = npt.NDArray[Any]

_FLOAT = 1  # TensorProto.FLOAT
_BOOL = 9  # TensorProto.BOOL

Handler = Callable[["DecoderEmitter", "onnx.NodeProto"], "list[gs.Tensor]"]

# Inputs that only shape the result: folded, never written.
_FOLDED_INPUTS = {
    "Reshape": (1,),
    "Expand": (1,),
    "Slice": (1, 2, 3, 4),
    "Unsqueeze": (1,),
    "Squeeze": (1,),
    "Split": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "CumSum": (1,),
    "Dropout": (1, 2),
}


class DecoderEmitter:
    """Writes the tensors that are asked for, and everything they need, in the file's order."""

    def __init__(
        self,
        model: OnnxModel,
        meaning: MeaningOf,
        writer: GraphWriter,
        matches: Sequence[AttentionMatch],
        handlers: dict[tuple[str, str], Handler],
    ) -> None:
        self.model = model
        self.meaning = meaning
        self.writer = writer
        self.matches = {match.output.name: (i, match) for i, match in enumerate(matches)}
        self.handlers = handlers
        self.tensors: dict[str, gs.Tensor] = {}
        self._matrices: dict[str, gs.Tensor] = {}
        self._casts: dict[tuple[str, int], gs.Tensor] = {}
        # Type of the node being written, if tensors of the model's own type must agree with it.
        self._compute_type: int | None = None
        self._wide: set[str] = set()
        if writer.float_type != _FLOAT:
            self._wide = wide_tensors(model, meaning.probes)

    def emit(self, targets: Sequence[str]) -> None:
        """Write all nodes that `targets` need."""
        needed = self._needed(targets)
        for node in self.model.nodes:
            wanted = [name for name in node.output if name in needed]
            if not wanted:
                continue
            attention = [self.matches[name] for name in wanted if name in self.matches]
            if attention:
                from blinkc.frontend.onnx_emit_attention import emit_attention

                layer, match = attention[0]
                self._compute_type = self.writer.float_type
                self.tensors[match.output.name] = emit_attention(self, layer, match)
                continue
            outputs = self.lower(node)
            for name, tensor in zip(node.output, outputs, strict=False):
                if name:
                    self.tensors[name] = tensor
            for name in wanted:
                if name not in self.tensors:
                    raise self.fail(node, f"its output '{name}' is not supported")
                self._check_tokens(node, name)

    def lower(self, node: onnx.NodeProto) -> list[gs.Tensor]:
        """Write one node; its inputs are written already."""
        handler = self.handlers.get(_key(node))
        if handler is None:
            raise self.fail(
                node,
                "this op is not supported outside of attention",
                "export the model with standard ops",
            )
        self._compute_type = self._type_of_node(node)
        return handler(self, node)

    def operand(self, name: str, *, rank: int = 0) -> gs.Tensor:
        """Return a tensor of the file in the new graph.

        With `rank` a tensor of fewer axes that holds tokens is padded on the left, as broadcasting
        does.
        """
        meaning = self.meaning(name)
        if meaning.kind == "weight":
            return self.weight(name)
        if meaning.kind == "constant":
            assert meaning.value is not None
            return self.writer.constant(self.convert(meaning.value), name=name)
        is_positions = meaning.kind == "positions"
        tensor = self._positions(name) if is_positions else self._in_type(name)
        axis = self.meaning.token_axis(name)
        shape = self.meaning.shape(name)
        if axis is None or len(shape) >= rank:
            return tensor
        dims = [1] * (rank - len(shape)) + list(shape)
        dims[axis + rank - len(shape)] = self.meaning.rows_per_token(name)
        if axis != 0 and shape[0] != 1:
            raise BlinkError(
                f"{self.model.path}: tensor '{name}': axis 0 of {shape} is not the batch"
            )
        dims[0] = -1
        return self.writer.reshape(tensor, dims)

    def narrow_operand(self, name: str) -> gs.Tensor:
        """Return a tensor in the model's type, for ops that the file does not hold."""
        self._compute_type = self.writer.float_type
        return self.operand(name)

    def rebind(self, name: str, tensor: gs.Tensor) -> None:
        """Let a name of the file stand for another tensor, of the model's type, from here on."""
        self.tensors[name] = tensor
        self._wide.discard(name)
        self._casts = {key: cast for key, cast in self._casts.items() if key[0] != name}

    def _in_type(self, name: str) -> gs.Tensor:
        """Return a computed tensor, cast to the type of the node being written."""
        tensor = self.tensors[name]
        wanted = self._compute_type
        if wanted is None or self.meaning.element_type(name) != self.writer.model_type:
            return tensor
        if self.mapped_type(name) == wanted or name not in self.model.producer:
            return tensor
        key = (name, wanted)
        if key not in self._casts:
            self._casts[key] = self.writer.cast(tensor, wanted, name=name)
        return self._casts[key]

    def _type_of_node(self, node: onnx.NodeProto) -> int | None:
        """Return the type a node computes in, or None when the file's own casts rule."""
        if node.op_type == "Cast":
            return None
        element_type = self.meaning.element_type(node.output[0])
        if element_type == self.writer.model_type:
            return self.mapped_type(node.output[0])
        if element_type != _BOOL:
            return None
        floats = [n for n in node.input if n in self._wide]
        return _FLOAT if floats else self.writer.float_type

    def weight_type(self, element_type: int) -> int:
        """Return the type of a weight or constant read by the node being written."""
        if self._compute_type is not None and element_type == self.writer.model_type:
            return self._compute_type
        return self.writer.map_type(element_type)

    def weight(self, name: str) -> gs.Tensor:
        """Return an initializer: inline when small, a weight input otherwise."""
        tensor = self.model.initializers[name]
        if (
            math.prod(tensor.dims) * 4 <= 64
            or name in self.model.hoisted
            or tensor.data_type not in DTYPE_NAMES
        ):
            values = tensor_array(tensor, self.model.path)
            return self.writer.constant(self.convert(values), name=name)
        part = part_from_initializer(tensor, self.model.path)
        dtype = DTYPE_NAMES[self.weight_type(tensor.data_type)]
        return self.writer.weight(name, part.shape, dtype, (part,))

    def matrix(self, name: str) -> gs.Tensor:
        """Return a product's right operand `[K, N]`: a weight kept as `[N, K]` and a Transpose."""
        from dataclasses import replace

        if name in self._matrices:
            return self._matrices[name]
        meaning = self.meaning(name)
        if name in self.model.hoisted:
            values = tensor_array(self.model.initializers[name], self.model.path)
            weight: gs.Tensor = self.writer.constant(self.convert(values.T), name=name)
        elif meaning.kind == "weight":
            tensor = self.model.initializers[name]
            part = replace(part_from_initializer(tensor, self.model.path), transpose=True)
            dtype = DTYPE_NAMES[self.weight_type(tensor.data_type)]
            shape = (part.shape[1], part.shape[0])
            weight = self.writer.weight(name, shape, dtype, (part,))
        elif meaning.kind == "constant":
            assert meaning.value is not None
            weight = self.writer.constant(self.convert(meaning.value.T), name=name)
        else:
            return self.operand(name)
        self._matrices[name] = self.writer.one("Transpose", weight, perm=[1, 0])
        return self._matrices[name]

    def convert(self, values: Array) -> Array:
        """Return constants in the new graph's type."""
        import onnx

        try:
            element_type = onnx.helper.np_dtype_to_tensor_dtype(values.dtype)
        except (KeyError, ValueError):
            return values
        mapped = self.weight_type(element_type)
        if mapped == element_type:
            return values
        with np.errstate(over="ignore"):  # a mask's minimum becomes -inf
            return values.astype(onnx.helper.tensor_dtype_to_np_dtype(mapped))

    def mapped_type(self, name: str) -> int:
        """Return the type of one of the file's tensors in the new graph."""
        if name in self._wide and self.meaning.element_type(name) == self.writer.model_type:
            return _FLOAT
        return self.writer.map_type(self.meaning.element_type(name))

    def known(self, node: onnx.NodeProto, index: int) -> Array | None:
        """Return an input that must be the same at every size, or None when it is absent."""
        if index >= len(node.input) or not node.input[index]:
            return None
        name = node.input[index]
        meaning = self.meaning(name)
        if meaning.kind == "weight":
            return tensor_array(self.model.initializers[name], self.model.path)
        if meaning.value is None or meaning.kind != "constant":
            raise self.fail(node, f"its input '{name}' is not a constant")
        return meaning.value

    def fail(self, node: onnx.NodeProto, what: str, hint: str = "") -> BlinkError:
        """Return an error that names the node."""
        return BlinkError(f"{self.model.path}: {describe_node(node)}: {what}", hint=hint)

    def inner_axis(self, node: onnx.NodeProto, name: str, axis: int) -> int:
        """Return `axis` counted from 0; refuse the tokens' axis and the batch."""
        rank = len(self.meaning.shape(name))
        axis %= rank
        tokens = self.meaning.token_axis(name)
        if tokens is not None and axis in (tokens, 0):
            raise self.fail(
                node,
                "it works across tokens",
                "outside of attention a decoder may only work token by token",
            )
        return axis

    def attributes(self, node: onnx.NodeProto, *names: str) -> dict[str, Any]:
        """Return the attributes of these names that the node has."""
        return {k: v for k, v in attribute_values(node).items() if k in names}

    def _needed(self, targets: Sequence[str]) -> set[str]:
        needed: set[str] = set()
        seen: set[str] = set()
        stack: list[tuple[str, onnx.NodeProto | None]] = [(name, None) for name in targets]
        while stack:
            name, user = stack.pop()
            if not name or name in seen or name in self.tensors:
                continue
            seen.add(name)
            if name in self.matches:
                needed.add(name)
                match = self.matches[name][1]
                read = [s.name for s in (match.query, match.key, match.value)]
                read += [match.sinks, match.bias[0]]
                read += [match.norms.query, match.norms.key] if match.norms else []
                read += [match.rope.cos, match.rope.sin] if match.rope else []
                stack.extend((name, match.node) for name in read)
                continue
            if self.meaning(name).kind != "computed":
                continue
            node = self.model.producer.get(name)
            if node is None:
                self._take_input(name, user)
                continue
            needed.add(name)
            skipped = _folded_inputs(node)
            stack.extend((n, node) for i, n in enumerate(node.input) if i not in skipped)
        return needed

    def _take_input(self, name: str, user: onnx.NodeProto | None) -> None:
        """Bind an input of the file; only token ids have a place outside of attention."""
        if name != self.model.input_ids:
            node = user if user is not None else self.model.nodes[0]
            what = "cached keys or values" if name in self.model.past else f"'{name}'"
            raise self.fail(
                node, f"it reads {what} outside of attention", "see the supported ONNX dialects"
            )
        dims = self.meaning.packed_shape(name)
        self.tensors[name] = self.writer.reshape(self.writer.input_ids, dims)

    def _positions(self, name: str) -> gs.Tensor:
        import onnx

        tensor: gs.Tensor = self.writer.positions
        dims = self.meaning.packed_shape(name)
        if len(dims) > 1:
            tensor = self.writer.reshape(tensor, dims)
        element_type = self.meaning.element_type(name)
        if element_type != onnx.TensorProto.INT64:
            tensor = self.writer.cast(tensor, element_type)
        return tensor

    def _check_tokens(self, node: onnx.NodeProto, name: str) -> None:
        """Refuse what lost its token axis: some op mixed tokens."""
        if self.meaning.token_axis(name) is not None:
            return
        skipped = _folded_inputs(node)
        read = [n for i, n in enumerate(node.input) if n and i not in skipped]
        has_tokens = any(self.meaning.token_axis(n) is not None for n in read)
        if has_tokens or name in self.meaning.probes[0].unknown_data:
            raise self.fail(
                node,
                "it mixes tokens",
                "outside of attention a decoder may only work token by token",
            )


def _folded_inputs(node: onnx.NodeProto) -> tuple[int, ...]:
    return (1,) if node.op_type.startswith("Reduce") else _FOLDED_INPUTS.get(node.op_type, ())


def _key(node: onnx.NodeProto) -> tuple[str, str]:
    return ("" if node.domain in ONNX_DOMAINS else node.domain, node.op_type)
