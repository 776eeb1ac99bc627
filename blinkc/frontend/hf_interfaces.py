"""Our entries in transformers' attention, mask and experts interfaces: `blink::` ops come out.

A model built with `attn_implementation="blink"` calls `attend` for each attention layer and
`run_experts` for each mixture of experts. Both refuse every argument whose effect a cut op cannot
carry: a lost argument would be a wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn
from unittest import mock

import torch
from transformers import masking_utils
from transformers.integrations import moe
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from blinkc.errors import BlinkError

IMPLEMENTATION = "blink"

# What a model may hand to the interface without any effect on the result: bookkeeping of
# transformers.
_HARMLESS_ARGUMENTS = frozenset(
    {
        "use_cache",
        "position_ids",
        "position_embeddings",
        "output_attentions",
        "output_hidden_states",
    }
    | {"return_dict", "cache", "past_key_values", "cache_position", "output_router_logits"}
    | {"num_items_in_batch", "layer_idx", "layer_type", "deterministic", "token_type_ids"}
)

# The positions of the step while a model is being traced: cut ops read them, model code need not
# pass them.
_positions: ContextVar[torch.Tensor] = ContextVar("positions")


class MaskMarker:
    """Stands for a causal mask, sliding or not, where the model expects a tensor.

    Whatever a model does to its mask except handing it on fails here, so nothing it adds (ALiBi,
    padding, chunks) is lost.
    """

    def __init__(self, window: int) -> None:
        self.window = window

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise BlinkError(
            "the model changes its attention mask before the attention interface sees it",
            hint="only causal masks, sliding or not, can be compiled",
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __getitem__ = __and__ = __or__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


def mark_mask(*, mask_function: Any, **_kwargs: object) -> MaskMarker:
    """Find out what a mask function of transformers does by asking it, and return the marker.

    Raises:
        BlinkError: it is neither causal nor causal with a sliding window.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        window = _window_of(mask_function)
    return MaskMarker(window)


_PROBE_TOKENS = 1 << 20  # longer than any window in use


def _window_of(mask_function: Any) -> int:
    last = _PROBE_TOKENS - 1
    visible = _visible(mask_function, last)
    window = _PROBE_TOKENS - int(visible[0]) if len(visible) else 0
    for query in (0, 1, window - 1, window, window + 1, 2 * window + 3, last):
        if not 0 <= query <= last:
            continue
        expected = torch.arange(max(0, query - window + 1), query + 1)
        if not torch.equal(_visible(mask_function, query), expected):
            raise BlinkError(
                "the model uses an attention mask that is neither causal nor causal and sliding",
                hint="chunked, bidirectional and prefix masks cannot be compiled",
            )
    return 0 if window == _PROBE_TOKENS else window


def _visible(mask_function: Any, query: int) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    seen = mask_function(zero, zero, torch.tensor(query), torch.arange(_PROBE_TOKENS))
    return torch.nonzero(torch.broadcast_to(seen, (_PROBE_TOKENS,)))[:, 0]


@torch.library.custom_op("blink::paged_attention", mutates_args=())  # type: ignore[untyped-decorator]
def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Attend to all pages of each token's request: q `[T, Hq, d]`, k and v `[T, Hkv, d]`."""
    raise NotImplementedError("exists for export only")


@paged_attention.register_fake  # type: ignore[untyped-decorator]
def _(q: torch.Tensor, *_rest: object) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("blink::moe_experts", mutates_args=())  # type: ignore[untyped-decorator]
def moe_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Run the chosen experts: x `[T, H]`, ids and weights `[T, k]`, gate_up `[E, 2I, H]`."""
    raise NotImplementedError("exists for export only")


@moe_experts.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, *_rest: object) -> torch.Tensor:
    return torch.empty_like(x)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One attention layer: q, k, v `[T, heads, 1, d]` -> `[T, 1, heads, d]`."""
    where = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    if not isinstance(attention_mask, MaskMarker):
        raise BlinkError(f"{where} runs without the causal mask that transformers makes")
    window = attention_mask.window
    if sliding_window and sliding_window != window:
        raise BlinkError(
            f"{where} asks for window {sliding_window}, its mask has {window or 'none'}"
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise BlinkError(f"{where} is not causal", hint="encoders cannot be compiled")
    _check_carried(where, {"dropout": dropout or None, **kwargs})
    _check_head_sizes(where, query.shape[-1], value.shape[-1])
    if query.shape[2] != 1:
        # A sequence: only the guard asks so, and looks at shapes alone.
        return torch.empty_like(query).transpose(1, 2), None
    out = paged_attention(
        query.squeeze(2),
        key.squeeze(2),
        value.squeeze(2),
        _positions.get(),
        s_aux,
        float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window,
        float(softcap or 0.0),
    )
    return out.unsqueeze(1), None


def _check_carried(where: str, arguments: dict[str, Any]) -> None:
    for name, argument in arguments.items():
        if argument is not None and argument is not False and name not in _HARMLESS_ARGUMENTS:
            raise BlinkError(
                f"{where} passes `{name}` to attention, which blink::PagedAttention cannot carry"
            )


def _check_head_sizes(where: str, query: int, value: int) -> None:
    if value != query:
        raise BlinkError(
            f"{where} has heads of {query} for queries and {value} for values",
            hint="latent attention with unequal head sizes is not supported",
        )


_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


def run_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """One mixture of experts; the router stays in the graph."""
    where = type(module).__name__
    gate_is_plain = type(module)._apply_gate is moe._default_apply_gate
    odd = {
        "biases": module.has_bias,
        "no gate": not module.has_gate,
        "transposed weights": module.is_transposed,
        "interleaved gate and up": not module.is_concatenated,
        "a gate of its own": not gate_is_plain,
        "a norm after the experts": getattr(module, "has_post_expert_norm", False),  # 5.17 has none
    }
    for what, is_so in odd.items():
        if is_so:
            raise BlinkError(
                f"{where} has {what}, which blink::MoeExperts cannot carry",
                hint="experts must be plain gate, up and down projections without biases",
            )
    activation = _ACTIVATIONS.get(type(module.act_fn).__name__)
    if getattr(module.act_fn, "approximate", "none") == "tanh":
        activation = "gelu_tanh"
    if activation is None:
        raise BlinkError(
            f"{where} uses {type(module.act_fn).__name__}, which no experts kernel has"
        )
    return moe_experts(
        hidden_states,
        top_k_index,
        top_k_weights.to(hidden_states.dtype),
        module.gate_up_proj,
        module.down_proj,
        activation,
    )


@contextmanager
def interfaces() -> Iterator[None]:
    """Register our entries with transformers; masks are not looked into for packed sequences."""
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, mark_mask)
    moe.ExpertsInterface.register(IMPLEMENTATION, run_experts)
    # Rows of our batch axis are tokens of unrelated requests: there is nothing to detect.
    with (
        mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _ids: None),
        # It looks into the ids only to warn.
        mock.patch.object(
            PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None
        ),
    ):
        yield


@contextmanager
def tracing_positions(positions: torch.Tensor) -> Iterator[None]:
    """Tell the cut ops which tensor holds the positions `[T]`."""
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)
