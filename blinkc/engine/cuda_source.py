"""The CUDA source of a model's kernels: what the model needs -> one rendered .cu text.

The kernels themselves are headers under blink/device/kernels; the template holds their instances,
and row kernels come rendered from blinkc.engine.cuda_rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from blinkc.codegen.environment import render_template
from blinkc.engine.cuda_instances import (
    GEMV_INSTANCES,
    NARROW_INSTANCES,
    GemvInstance,
    NarrowInstance,
    decode_attention_kernel,
    decode_attention_warps,
)
from blinkc.errors import BlinkError

CUDA_DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "float", "int32": "int32_t", "bool": "bool"}
HEAD_SIZES = (64, 80, 96, 128, 256)
MAX_GROUP = 16
ACTIVATIONS = {"silu": "kSilu", "gelu": "kGelu", "gelu_tanh": "kGeluTanh"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadInstance:
    """Template arguments of one decode attention."""

    kernel: str
    dim: int
    wide: str
    warps: int


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
    narrow: tuple[NarrowInstance, ...] = NARROW_INSTANCES


@dataclass(frozen=True, kw_only=True, slots=True)
class _Context:
    """What cuda_kernels.cu.jinja is filled with."""

    dtype: str
    logits_dtype: str
    gemv_variants: tuple[GemvInstance, ...]
    narrow_variants: tuple[NarrowInstance, ...]
    heads: tuple[HeadInstance, ...]
    head_dims: tuple[int, ...]
    activation: str
    ids_dtype: str
    expert_weights_dtype: str
    row_kernels: tuple[str, ...]


def render_cuda_source(needs: CudaNeeds) -> str:
    """Return the .cu text; compiles by itself with the include folder on its path.

    Raises:
        BlinkError: a head size, group or activation that the kernels do not have.
    """
    for dim, group in needs.heads:
        if dim not in HEAD_SIZES or not 1 <= group <= MAX_GROUP:
            raise BlinkError(
                f"attention with head size {dim} and {group} query heads a KV head",
                hint=f"the cuda engine has head sizes {HEAD_SIZES} and groups up to {MAX_GROUP}",
            )
    if needs.activation and needs.activation not in ACTIVATIONS:
        raise BlinkError(
            f"experts with activation {needs.activation!r}",
            hint=f"the cuda engine has {', '.join(ACTIVATIONS)}",
        )
    heads = sorted({(dim, group > 8) for dim, group in needs.heads})
    context = _Context(
        dtype=CUDA_DTYPES[needs.dtype],
        logits_dtype=CUDA_DTYPES[needs.logits_dtype],
        gemv_variants=needs.gemv,
        narrow_variants=needs.narrow,
        heads=tuple(instance for dim, wide in heads for instance in _head_instances(dim, wide)),
        head_dims=tuple(sorted({dim for dim, _ in heads})),
        activation=ACTIVATIONS[needs.activation] if needs.activation else "",
        ids_dtype={"int32": "int32_t", "int64": "int64_t"}[needs.ids_dtype],
        expert_weights_dtype=CUDA_DTYPES[needs.expert_weights_dtype],
        row_kernels=needs.row_kernels,
    )
    return render_template("cuda_kernels.cu.jinja", context)


def _head_instances(dim: int, wide: bool) -> list[HeadInstance]:
    return [
        HeadInstance(
            kernel=decode_attention_kernel(dim, wide, warps),
            dim=dim,
            wide="true" if wide else "false",
            warps=warps,
        )
        for warps in decode_attention_warps(dim, wide)
    ]


def compile_kernels(source: str, architecture: str) -> bytes:
    """Compile what `render_cuda_source` returned; needs NVRTC, neither GPU nor nvcc.

    Raises:
        BlinkError: the tools are missing, or reject the source; carries their log.
    """
    from blinkc.codegen.compile_cuda import compile_whole

    # The kernels' headers have plain constexpr functions, for the host's tests too.
    return compile_whole({"kernels.cu": source}, architecture, flags=("-default-device",))
