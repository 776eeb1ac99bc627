"""What every front end delivers: one decoder graph with `blink::` cut ops, and its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """One attention layer: head counts, head size and what its scores go through."""

    layer: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # tokens a query sees, itself included; 0: all
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: off


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """One mixture-of-experts layer."""

    layer: int
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Facts read from a model."""

    name: str
    architecture: str
    dtype: str  # of weights and activations: "fp32", "fp16" or "bf16"
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    attention: tuple[AttentionSpec, ...]
    experts: tuple[ExpertsSpec, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # what compiling fixed, e.g. length-dependent rope scaling


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPart:
    """A tensor in a file (or made at random), as it lies there.

    `source` is "safetensors", "onnx", "inline" or "random". `shape` is the shape in the file;
    `transpose` swaps its two axes on reading. `rows` picks a range of the first axis, after the
    transpose.
    """

    source: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    path: Path | None = None
    inline: bytes | None = field(default=None, repr=False)
    transpose: bool = False
    rows: tuple[int, int] | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightEncoding:
    """Which half of a quantized matrix a weight is; `quantize_weights.py` makes it of the parts."""

    kind: str  # "fp8" or "int4"
    part: str  # "values" or "scales"
    num_columns: int  # of the matrix
    group: int  # columns that share a scale
    scale_dtype: str  # the values depend on it too


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRef:
    """One weight input of the graph: its parts, read and concatenated along axis 0.

    With an `encoding` the parts are the matrix, and the weight is what that makes of them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[WeightPart, ...]
    encoding: WeightEncoding | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderGraph:
    """The whole decoder as one ONNX graph without weights.

    Graph inputs: `input_ids` int64 `[T]`, `positions` int64 `[T]`, `rows` int64 `[R]` (tokens whose
    logits are wanted), then one input for each entry of `weights`, same name, static shape. Output:
    `logits` `[R, vocab_size]`. Nodes of domain `blink` are the cut ops; everything else is standard
    ONNX.
    """

    spec: ModelSpec
    model: onnx.ModelProto
    weights: dict[str, WeightRef]
