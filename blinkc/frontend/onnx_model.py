"""Read an ONNX file without its weights: path -> `OnnxModel`, its inputs told apart.

Nothing in the file is trusted: external data must lie beside the model, sizes must agree, and what
cannot be a causal decoder with a KV cache is refused here, by the name of the input that says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from blinkc.errors import BlinkError

if TYPE_CHECKING:
    import onnx


ONNX_DOMAINS = ("", "ai.onnx")
CONTRIB_DOMAIN = "com.microsoft"
_MIN_OPSET = 13
_MAX_OPSET = 25
_FOREIGN_INPUTS = {
    r"encoder|cross": "it is an encoder-decoder model (cross attention)",
    r"inputs_embeds|pixel|image|vision|audio": "it takes embeddings instead of token ids",
    r"token_type": "it takes token types",
    r"beam|cache_indirection": "it reorders its KV cache by beams",
    r"slot_mapping|block_table": "it is paged already",
}


@dataclass(kw_only=True, slots=True)
class OnnxModel:
    """A decoder as ONNX nodes in topological order, with the roles of its inputs.

    `past` lists the KV inputs in file order; `output_names` still holds logits and presents.
    """

    path: Path
    opset: int
    nodes: list[onnx.NodeProto]
    initializers: dict[str, onnx.TensorProto]
    inputs: dict[str, onnx.ValueInfoProto]
    output_names: list[str]
    input_ids: str = ""
    attention_mask: str = ""
    position_ids: str = ""
    past: list[str] = field(default_factory=list)
    fixed: dict[str, bool] = field(default_factory=dict)  # inputs the compiler decides
    hoisted: set[str] = field(default_factory=set)  # initializers that were Constant nodes
    notes: list[str] = field(default_factory=list)
    producer: dict[str, onnx.NodeProto] = field(default_factory=dict)
    consumers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)

    def index(self) -> None:
        """Rebuild `producer` and `consumers` after `nodes` changed."""
        self.producer = {name: node for node in self.nodes for name in node.output if name}
        self.consumers = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.input):
                if name:
                    self.consumers.setdefault(name, []).append(node)

    @property
    def logits(self) -> str:
        """The output that holds the logits."""
        for name in self.output_names:
            if name.split("/")[-1] in ("logits", "lm_logits", "output_logits"):
                return name
        return self.output_names[0]


def describe_node(node: onnx.NodeProto) -> str:
    """Name a node for an error message."""
    domain = f"{node.domain}::" if node.domain not in ONNX_DOMAINS else ""
    name = node.name or (node.output[0] if node.output else "?")
    return f"node '{name}' (op {domain}{node.op_type})"


def attribute_values(node: onnx.NodeProto) -> dict[str, object]:
    """Return the node's attributes as Python values (bytes decoded)."""
    import onnx

    values: dict[str, object] = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        values[attribute.name] = value.decode() if isinstance(value, bytes) else value
    return values


def read_onnx_model(path: Path) -> OnnxModel:
    """Read `path` without its weights.

    Raises BlinkError for a file that is missing, damaged or unsafe, and for a model whose inputs
    show that it is no causal decoder with a KV cache.
    """
    import onnx

    proto = load_proto(path)
    for tensor in _all_tensors(proto.graph):
        check_tensor(tensor, path)
    if proto.graph.sparse_initializer:
        name = proto.graph.sparse_initializer[0].values.name
        raise BlinkError(f"{path}: initializer '{name}' is sparse", hint="export dense weights")
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    opset = next((o.version for o in proto.opset_import if o.domain in ONNX_DOMAINS), 0)
    if not _MIN_OPSET <= opset <= _MAX_OPSET:
        raise BlinkError(
            f"{path}: ONNX opset {opset} is not supported",
            hint=f"export with an opset from {_MIN_OPSET} to {_MAX_OPSET}",
        )
    initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
    model = OnnxModel(
        path=path,
        opset=opset,
        nodes=list(proto.graph.node),
        initializers=initializers,
        inputs={i.name: i for i in proto.graph.input if i.name not in initializers},
        output_names=[o.name for o in proto.graph.output],
    )
    model.index()
    _assign_roles(model)
    return model


def load_proto(path: Path) -> onnx.ModelProto:
    """Parse the protobuf; external data is not read."""
    import onnx

    if not path.is_file():
        raise BlinkError(f"{path}: no such ONNX file")
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's DecodeError has no stubs; any failure means this
        raise BlinkError(
            f"{path}: not a whole ONNX file ({error})", hint="copy or export it again"
        ) from error
    if not proto.graph.node or not proto.graph.output:
        raise BlinkError(f"{path}: the file holds no ONNX graph", hint="copy or export it again")
    return proto


def check_tensor(tensor: onnx.TensorProto, path: Path) -> None:
    """Check that a tensor's bytes are there and that external data lies beside the model."""
    import onnx

    num_bytes = tensor_num_bytes(tensor)
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        if tensor.HasField("raw_data") and len(tensor.raw_data) != num_bytes:
            raise BlinkError(
                f"{path}: tensor '{tensor.name}' holds {len(tensor.raw_data)} bytes, its shape "
                f"{list(tensor.dims)} needs {num_bytes}",
                hint="copy or export the file again",
            )
        return
    data_path, offset, length = external_range(tensor, path)
    if length != num_bytes:
        raise BlinkError(
            f"{path}: tensor '{tensor.name}' has {length} external bytes, its shape "
            f"{list(tensor.dims)} needs {num_bytes}",
            hint="copy or export the file again",
        )
    size = data_path.stat().st_size
    if offset + length > size:
        raise BlinkError(
            f"{data_path}: {size} bytes long, but tensor '{tensor.name}' ends at {offset + length}",
            hint="the file is truncated: copy it again",
        )


def tensor_num_bytes(tensor: onnx.TensorProto) -> int:
    """Return the bytes the tensor's shape and type ask for (0 for strings)."""
    import math

    import onnx

    if tensor.data_type == onnx.TensorProto.STRING:
        return 0
    count: int = math.prod(tensor.dims)
    name = onnx.TensorProto.DataType.Name(tensor.data_type)
    if name.endswith("INT4") or name.endswith("4E2M1"):
        return (count + 1) // 2
    if name.endswith("INT2"):
        return (count + 3) // 4
    return count * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def external_range(tensor: onnx.TensorProto, path: Path) -> tuple[Path, int, int]:
    """Return (file, offset, length) of external data; refuse to leave the model's folder.

    A hub cache keeps files as links into one `blobs` folder: a link is followed when it ends in the
    folder where the model file itself ends.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    folder = path.parent.resolve()
    target = path.parent / location
    is_name = bool(location) and "\0" not in location
    inside = is_name and not Path(location).is_absolute() and ".." not in Path(location).parts
    resolved = target.resolve() if inside else target
    if not inside or not any(
        resolved.is_relative_to(allowed) for allowed in (folder, path.resolve().parent)
    ):
        raise BlinkError(
            f"{path}: external data of tensor '{tensor.name}' points outside the model's folder: "
            f"{location!r}",
            hint="keep external data beside the model file",
        )
    if not resolved.is_file():
        raise BlinkError(
            f"{path}: external data file '{location}' of tensor '{tensor.name}' is missing",
            hint="put the file beside the model",
        )
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", tensor_num_bytes(tensor)))
    except ValueError as error:
        raise BlinkError(f"{path}: external data of tensor '{tensor.name}': {error}") from error
    if offset < 0 or length < 0:
        raise BlinkError(f"{path}: external data of tensor '{tensor.name}' has a negative range")
    return resolved, offset, length


def _all_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _all_tensors(attribute.g)


def _assign_roles(model: OnnxModel) -> None:
    """Tell ids, mask, positions and KV inputs apart; refuse inputs no packed decoder has."""
    import onnx

    integers = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    for name, info in model.inputs.items():
        element_type = info.type.tensor_type.elem_type
        rank = len(info.type.tensor_type.shape.dim)
        for pattern, reason in _FOREIGN_INPUTS.items():
            if re.search(pattern, name, re.IGNORECASE):
                raise BlinkError(
                    f"{model.path}: input '{name}': {reason}",
                    hint="compile a decoder-only text model exported with past key values",
                )
        if name in ("input_ids", "input", "tokens", "ids") and element_type in integers:
            model.input_ids = name
        elif "mask" in name and rank == 2:
            model.attention_mask = name
        elif re.fullmatch(r"position_ids|positions?|cache_position", name):
            if rank > 2:
                raise BlinkError(
                    f"{model.path}: input '{name}' has {rank} axes (several positions a token)"
                )
            model.position_ids = name
        elif name == "use_cache_branch":
            model.fixed[name] = True
        elif re.search(r"past|cache", name) or rank == 4:
            if element_type not in floats or rank != 4:
                kind = onnx.TensorProto.DataType.Name(element_type).lower()
                raise BlinkError(
                    f"{model.path}: KV input '{name}' is {kind} of {rank} axes; only fp32, fp16 "
                    "and bf16 "
                    "caches of 4 axes (keys and values apart) are supported",
                    hint="export with an unquantized KV cache",
                )
            model.past.append(name)
        else:
            raise BlinkError(f"{model.path}: input '{name}' is not one a decoder is known to take")
    if not model.input_ids:
        raise BlinkError(f"{model.path}: there is no input 'input_ids'")
    if not model.past:
        raise BlinkError(
            f"{model.path}: the model has no past key/value inputs",
            hint="export with the KV cache (optimum: --task text-generation-with-past)",
        )
