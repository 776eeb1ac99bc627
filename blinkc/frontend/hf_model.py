"""Config -> a model without weights: parameters on the meta device, computed buffers real."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from blinkc.errors import BlinkError
from blinkc.frontend.hf_interfaces import IMPLEMENTATION

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class HollowModel:
    """A model on the meta device with what is known about its tensors.

    `buffers` holds the real values of all buffers; `persistent` names those a checkpoint stores.
    `tied` maps every parameter name to the names that share it, itself included.
    """

    model: Any
    buffers: dict[str, np.ndarray]
    persistent: frozenset[str]
    tied: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]


def hollow_model(config: Any, *, dtype: str, max_seqlen: int) -> HollowModel:
    """Build the model of `config`; rope scaling that depends on length is fixed by `max_seqlen`.

    Raises:
        BlinkError: transformers has no causal language model for it, or it does not use the
        interfaces.
    """
    try:
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, dtype=TORCH_DTYPES[dtype], attn_implementation=IMPLEMENTATION
            )
    except BlinkError:
        raise
    except Exception as error:  # any model's own code, with any values of its config
        raise BlinkError(
            f"transformers cannot build a causal language model of type "
            f"`{getattr(config, 'model_type', '?')}` with attention of ours: {error}",
            hint="only decoders that go through transformers' attention interface can be compiled",
        ) from error
    model.eval()
    name = type(model).__name__
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise BlinkError(
            f"{name} takes no position_ids, so it cannot be told where the tokens of a step stand",
            hint="models with ALiBi or without positions (recurrent ones) cannot be compiled",
        )
    _use_our_experts(model)
    _keep_in_fp32(model, TORCH_DTYPES[dtype])
    notes = tuple(_fix_rope(model, max_seqlen))
    model.tie_weights()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = {name: tuple(group) for group in names.values() for name in group}
    persistent = set(model.state_dict()) - set(tied)
    buffers = {
        name: array_from_tensor(buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    _check_frequencies(buffers)
    model.to("meta")
    return HollowModel(
        model=model, buffers=buffers, persistent=frozenset(persistent), tied=tied, notes=notes
    )


def array_from_tensor(tensor: torch.Tensor) -> np.ndarray:
    """Copy a tensor to numpy; bf16 through ml_dtypes, which numpy lacks."""
    import ml_dtypes

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return np.array(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.array(tensor.numpy())


def _check_frequencies(buffers: dict[str, np.ndarray]) -> None:
    """Raise `BlinkError` where rope's parameters give no numbers; transformers warns at most."""
    for name, value in buffers.items():
        if name.endswith("inv_freq") and not np.isfinite(value).all():
            raise BlinkError(
                f"config.json: its rope parameters give frequencies that are no numbers ({name})",
                hint="see rope_parameters (rope_scaling, rope_theta): factors must be positive",
            )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Send each parameter to the meta device as a module registers it: no memory is touched."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = torch.nn.Parameter(parameter.data.to("meta"), requires_grad=False)
        register(module, name, parameter)

    with mock.patch.object(torch.nn.Module, "register_parameter", register_on_meta):
        yield


def _use_our_experts(model: Any) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_experts_implementation"):
            config._experts_implementation = IMPLEMENTATION


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Give the tensors that transformers keeps in fp32 in half-precision models that type."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    names, group_patterns, _ = build_glob_alternation(list(plan))
    for prefix, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                found = names.search(f"{prefix}.{name}") if tensor is not None else None
                if found and found.lastgroup:
                    tensor.data = tensor.data.to(plan[group_patterns[found.lastgroup]])


def _fix_rope(model: Any, max_seqlen: int) -> Iterator[str]:
    """Choose the frequencies for `max_seqlen` tokens where they depend on the length of a request.

    transformers would choose anew at each step (`dynamic_rope_update`), which a compiled model
    cannot.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if rope_type is None or not hasattr(module, "config"):
            continue
        per_layer = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        for layer_type, kind in per_layer.items():
            if "dynamic" not in kind and kind != "longrope":
                continue
            yield _fix_frequencies(module, layer_type, kind, max_seqlen)
        if isinstance(rope_type, dict):
            module.rope_type = dict.fromkeys(rope_type, "default")
        else:
            module.rope_type = "default"


def _fix_frequencies(module: Any, layer_type: str | None, kind: str, max_seqlen: int) -> str:
    prefix = f"{layer_type}_" if layer_type else ""
    parameters = module.config.rope_parameters
    parameters = parameters[layer_type] if layer_type else parameters
    if kind == "longrope":
        limit = parameters["original_max_position_embeddings"]
        seqlen = limit + 1 if max_seqlen > limit else limit
    else:
        limit = module.original_max_seq_len
        seqlen = max(max_seqlen, limit)
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, torch.device("cpu"), seq_len=seqlen, layer_type=layer_type
    )
    module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return (
        f"rope type `{kind}`: frequencies fixed for requests up to {max_seqlen} tokens "
        f"(scaling starts beyond {limit})"
    )
