"""Build the decoder graph: names tensors and collects weights over onnx-graphsurgeon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from blinkc.frontend.decoder_graph import WeightPart, WeightRef
from blinkc.frontend.onnx_weights import DTYPE_NAMES, ELEMENT_TYPES, part_from_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Array = npt.NDArray[Any]

OPSET = 18
_INLINE_BYTES = 64  # larger constants are weights


class GraphWriter:
    """Collects nodes and weights of the graph under construction.

    `float_type` is what the model's own float type becomes.
    """

    def __init__(self, *, model_type: int, float_type: int) -> None:
        self.model_type = model_type
        self.float_type = float_type
        self.nodes: list[gs.Node] = []
        self.weights: dict[str, WeightRef] = {}
        self.input_ids = gs.Variable("input_ids", dtype=np.int64, shape=("T",))
        self.positions = gs.Variable("positions", dtype=np.int64, shape=("T",))
        self.rows = gs.Variable("rows", dtype=np.int64, shape=("R",))
        self._weight_inputs: dict[str, gs.Variable] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], gs.Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], gs.Tensor] = {}
        self._taken: set[str] = {"input_ids", "positions", "rows", "logits"}

    def map_type(self, element_type: int) -> int:
        """Return the type a tensor of `element_type` has in the new graph."""
        floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
        if element_type not in floats:
            return element_type
        if self.float_type == onnx.TensorProto.FLOAT or element_type == self.model_type:
            return self.float_type
        return element_type

    def emit(
        self,
        op: str,
        inputs: Sequence[gs.Tensor | None],
        *,
        name: str = "",
        domain: str = "",
        num_outputs: int = 1,
        **attributes: Any,
    ) -> list[gs.Variable]:
        """Append a node and return its outputs."""
        base = self._unique(name or op.lower())
        outputs = [
            gs.Variable(base if i == 0 else self._unique(f"{base}_{i}")) for i in range(num_outputs)
        ]
        node = gs.Node(
            op=op,
            name=f"{base}_{op}",
            attrs=attributes,
            inputs=[gs.Variable.empty() if i is None else i for i in inputs],
            outputs=outputs,
            domain=domain or None,
        )
        self.nodes.append(node)
        return outputs

    def one(
        self, op: str, *inputs: gs.Tensor | None, name: str = "", **attributes: Any
    ) -> gs.Variable:
        """Append a node with one output."""
        return self.emit(op, inputs, name=name, **attributes)[0]

    def constant(self, values: Array, *, name: str = "") -> gs.Tensor:
        """Return a constant: inline when small, a weight with its bytes in the part otherwise."""
        values = np.asarray(values, order="C")
        key = (values.dtype.name, values.shape, values.tobytes())
        if key not in self._constants:
            base = self._unique(name or "constant")
            if values.nbytes > _INLINE_BYTES:
                dtype = DTYPE_NAMES[onnx.helper.np_dtype_to_tensor_dtype(values.dtype)]
                part = part_from_array(values, dtype)
                self._constants[key] = self.weight(base, values.shape, dtype, (part,))
            else:
                self._constants[key] = gs.Constant(base, values)
        return self._constants[key]

    def ints(self, *values: int) -> gs.Tensor:
        """Return a small int64 vector."""
        return self.constant(np.array(values, dtype=np.int64), name="ints")

    def number(self, value: float, element_type: int) -> gs.Tensor:
        """Return a scalar of the given (new graph's) type."""
        dtype = onnx.helper.tensor_dtype_to_np_dtype(element_type)
        return self.constant(np.array(value).astype(dtype), name="number")

    def weight(
        self, name: str, shape: tuple[int, ...], dtype: str, parts: tuple[WeightPart, ...]
    ) -> gs.Variable:
        """Return the graph input of a weight, adding it on first use."""
        ref = self.weights.get(name)
        if ref is not None and (ref.shape, ref.dtype, ref.parts) != (shape, dtype, parts):
            return self.weight(f"{name}__{dtype}_{len(shape)}", shape, dtype, parts)
        if name not in self._weight_inputs:
            self._taken.add(name)
            self.weights[name] = WeightRef(name=name, shape=shape, dtype=dtype, parts=parts)
            numpy_type = onnx.helper.tensor_dtype_to_np_dtype(ELEMENT_TYPES[dtype])
            self._weight_inputs[name] = gs.Variable(name, dtype=numpy_type, shape=list(shape))
        return self._weight_inputs[name]

    def reshape(self, tensor: gs.Tensor, dims: Sequence[int], *, name: str = "") -> gs.Tensor:
        """Return `tensor` seen under another shape."""
        key = (tensor.name, tuple(dims))
        if key not in self._views:
            self._views[key] = self.one("Reshape", tensor, self.ints(*dims), name=name)
        return self._views[key]

    def cast(self, tensor: gs.Tensor, element_type: int, *, name: str = "") -> gs.Variable:
        """Return `tensor` in another type."""
        return self.one("Cast", tensor, name=name, to=element_type)

    def finish(self, logits: gs.Variable) -> onnx.ModelProto:
        """Return the model: contract inputs, weights, and `logits`."""
        logits.name = "logits"
        logits.dtype = np.float32
        logits.shape = ("R", "V")
        graph = gs.Graph(
            nodes=self.nodes,
            inputs=[self.input_ids, self.positions, self.rows, *self._weight_inputs.values()],
            outputs=[logits],
            name="decoder",
            opset=OPSET,
            import_domains=[
                onnx.helper.make_opsetid("", OPSET),
                onnx.helper.make_opsetid("blink", 1),
            ],
            ir_version=8,
        )
        graph.cleanup(remove_unused_graph_inputs=False)
        used = {t.name for node in graph.nodes for t in node.inputs}
        graph.inputs = [i for i in graph.inputs if i.name in used or i.name not in self.weights]
        self.weights = {name: ref for name, ref in self.weights.items() if name in used}
        model: onnx.ModelProto = gs.export_onnx(graph, do_type_check=False)
        return model

    def _unique(self, name: str) -> str:
        unique, count = name, 0
        while unique in self._taken:
            count += 1
            unique = f"{name}__{count}"
        self._taken.add(unique)
        return unique
