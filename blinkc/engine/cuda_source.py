"""The CUDA source of a model's kernels: what the model needs -> one rendered .cu text.

The kernels themselves are headers under blink/device/kernels; the template holds their instances, and row
kernels come rendered from blinkc.engine.cuda_rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jinja2

from blinkc.engine.cuda_instances import GEMV_INSTANCES, GemvInstance
from blinkc.resources import templates_folder

CUDA_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "float", "int32": "int32_t", "bool": "bool"}
_ACTIVATIONS = {"silu": "kSilu", "gelu": "kGelu", "gelu_tanh": "kGeluTanh"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadInstance:
    """Template arguments of one decode attention."""

    name: str
    dim: int
    wide: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaNeeds:
    """What a model asks of the kernels: `heads` are (head size, query heads a KV head)."""

    dtype: str
    heads: tuple[tuple[int, int], ...]
    logits_dtype: str
    activation: str = ""  # of the experts; empty: none
    ids_dtype: str = "int32"
    expert_weights_dtype: str = "bf16"
    row_kernels: tuple[str, ...] = ()
    gemv: tuple[GemvInstance, ...] = GEMV_INSTANCES


def render_cuda_source(needs: CudaNeeds) -> str:
    """Return the .cu text; compiles by itself with the include folder on its path."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_folder()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    heads = sorted({(dim, group > 8) for dim, group in needs.heads})
    return environment.get_template("cuda_kernels.cu.jinja").render(
        dtype=CUDA_DTYPES[needs.dtype],
        logits_dtype=CUDA_DTYPES[needs.logits_dtype],
        gemv_variants=needs.gemv,
        heads=[
            HeadInstance(
                name=f"{dim}_wide" if wide else str(dim), dim=dim, wide="true" if wide else "false"
            )
            for dim, wide in heads
        ],
        head_dims=sorted({dim for dim, _ in heads}),
        activation=_ACTIVATIONS[needs.activation] if needs.activation else "",
        ids_dtype={"int32": "int32_t", "int64": "int64_t"}[needs.ids_dtype],
        expert_weights_dtype=CUDA_DTYPES[needs.expert_weights_dtype],
        row_kernels=needs.row_kernels,
    )
