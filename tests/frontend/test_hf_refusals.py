"""What cannot work is refused by name, never compiled into a wrong answer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from blinkc.errors import BlinkError
from blinkc.frontend.hf import decoder_graph_from_hf
from blinkc.frontend.hf_interfaces import MaskMarker, attend, interfaces, mark_mask
from blinkc.model_source import find_model
from tests.frontend.hf_models import make_config

_TINY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_DEEPSEEK = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
}

_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder-decoder": ("t5", {}, "is an encoder-decoder"),
    "alibi": ("bloom", {}, "takes no position_ids"),
    "own attention": ("falcon", {}, "cannot build a causal language model"),
    "state space": ("mamba", {}, "takes no position_ids"),
    "hybrid": ("jamba", {"num_experts": 2, "use_mamba_kernels": False}, "mixes tokens outside"),
    "convolution": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "op convolution mixes"),
    "latent attention": ("deepseek_v2", _DEEPSEEK, "16 for queries and 8 for values"),
    "expert biases": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4}, "has biases"),
}


def _compile(folder: Path) -> None:
    decoder_graph_from_hf(str(folder), dtype="fp32", max_seqlen=64, random_weights_seed=0)


@pytest.mark.parametrize("name", _REFUSED)
def test_model_is_refused_by_name(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    model_type, settings, reason = _REFUSED[name]
    AutoConfig.for_model(model_type, **{**_TINY, **settings}).save_pretrained(tmp_path)
    with pytest.raises(BlinkError) as refusal:
        _compile(tmp_path)
    assert reason in refusal.value.message
    assert refusal.value.hint


def test_unknown_model_type_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(BlinkError, match=r"config\.json"):
        _compile(tmp_path)


def test_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    config = make_config("llama").to_dict() | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BlinkError, match="quantized"):
        _compile(tmp_path)


_ODD: dict[str, dict[str, Any] | str] = {
    "size of heads": {"head_dim": 0},
    "number of heads": {"num_attention_heads": 0},
    "text for a number": {"num_hidden_layers": "2"},
    "null for a number": {"rms_norm_eps": None},
    "list for an object": {"rope_parameters": [1]},
    "text for an id": {"eos_token_id": "</s>"},
    "no object": "null",
    "nested deeply": "[" * 100_000,
}


@pytest.mark.parametrize("name", _ODD)
def test_odd_config_is_refused_by_name(name: str, tmp_path: Path) -> None:
    # Guards: each model checks its config by code of its own, which raises whatever it likes.
    odd = _ODD[name]
    text = odd if isinstance(odd, str) else json.dumps(make_config("llama").to_dict() | odd)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BlinkError) as refusal:
        _compile(tmp_path)
    assert refusal.value.hint


def test_config_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    # Guards: whether it scales rope is asked before transformers reads it.
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xe9", "rope_type": "longrope"}')
    assert find_model(str(tmp_path)).depends_on_seqlen()
    with pytest.raises(BlinkError, match=r"config\.json"):
        _compile(tmp_path)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "default", "rope_theta": 0.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_without_numbers_is_refused(rope: dict[str, Any], tmp_path: Path) -> None:
    # Guards: transformers warns at most; that all logits are nan showed after the compilation.
    config = make_config("llama").to_dict()
    config["rope_parameters"] = {"rope_theta": 10000.0} | rope
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BlinkError, match="inv_freq"):
        _compile(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"eos_token_id": "a"}', '{"eos_token_id": [true]}'])
def test_damaged_generation_config_is_named(text: str, tmp_path: Path) -> None:
    make_config("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(BlinkError, match=r"generation_config\.json"):
        _compile(tmp_path)


def test_negative_id_ends_nothing(tmp_path: Path) -> None:
    # Guards: -1, which some configs have for none, became an id that no manifest takes.
    from blinkc.frontend.hf_checkpoint import Checkpoint, eos_token_ids

    checkpoint = Checkpoint(name="m", folder=tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [-1, 3]}')
    assert eos_token_ids(checkpoint, make_config("llama")) == (3,)


def test_pickled_weights_are_refused_with_a_way_out(tmp_path: Path) -> None:
    from blinkc.frontend.hf_checkpoint import list_tensors

    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BlinkError, match="pickle") as refusal:
        list_tensors(tmp_path)
    assert "safetensors" in refusal.value.hint


def test_missing_path_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(BlinkError, match="no checkpoint at"):
        _compile(tmp_path / "absent")


class _Layer(torch.nn.Module):
    layer_idx = 3
    is_causal = True


def _heads(heads: int, size: int = 8) -> torch.Tensor:
    return torch.zeros(5, heads, 1, size, device="meta")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "`position_bias`"),
        ({"some_new_argument": 1.0}, "`some_new_argument`"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"sliding_window": 4}, "window 4"),
    ],
)
def test_lost_attention_arguments_are_refused(changed: dict[str, Any], reason: str) -> None:
    # Guards: an argument the interface swallows changes the answer and nobody notices.
    with pytest.raises(BlinkError, match="layer 3") as refusal:
        attend(_Layer(), _heads(4), _heads(2), _heads(2), MaskMarker(window=0), **changed)
    assert reason in refusal.value.message


def test_attention_without_its_mask_is_refused() -> None:
    with pytest.raises(BlinkError, match="without the causal mask"):
        attend(_Layer(), _heads(4), _heads(2), _heads(2), None)


def test_changed_mask_is_refused() -> None:
    # Guards: a bias added to the mask (ALiBi) would be lost.
    with pytest.raises(BlinkError, match="changes its attention mask"):
        MaskMarker(window=0) + torch.zeros(1)
    with pytest.raises(BlinkError, match="changes its attention mask"):
        MaskMarker(window=0)[:, :, :, :3]


def test_masks_are_recognized_by_what_they_do() -> None:
    from transformers import masking_utils as masks

    assert mark_mask(mask_function=masks.causal_mask_function).window == 0
    sliding = masks.sliding_window_causal_mask_function(7)
    assert mark_mask(mask_function=sliding).window == 7
    with pytest.raises(BlinkError, match="neither causal"):
        mark_mask(mask_function=lambda b, h, q, kv: kv >= 0)
    with pytest.raises(BlinkError, match="neither causal"):
        chunked = masks.chunked_overlay(4, torch.zeros(1, dtype=torch.int64))
        mark_mask(mask_function=masks.and_masks(chunked, masks.causal_mask_function))


def test_guard_names_the_module_that_mixes_tokens() -> None:
    from blinkc.frontend.hf_guard import check_token_independence
    from blinkc.frontend.hf_model import hollow_model

    class Shift(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.cumsum(x, dim=1)

    with interfaces():
        model = hollow_model(make_config("llama"), dtype="fp32", max_seqlen=64).model
        check_token_independence(model)
        model.model.layers[1].mlp.act_fn = Shift()
        with pytest.raises(BlinkError, match=r"layers\.1\.mlp\.act_fn: op cumsum"):
            check_token_independence(model)


def test_weights_that_are_no_regular_file_are_refused(tmp_path: Path) -> None:
    # Guards: the compiler waited for whoever would write to the pipe.
    (tmp_path / "config.json").write_text(json.dumps(make_config("llama").to_dict()))
    os.mkfifo(tmp_path / "model.safetensors")
    writer = os.open(tmp_path / "model.safetensors", os.O_RDWR)
    os.write(writer, bytes(8))  # so that whoever reads it does not wait
    with pytest.raises(BlinkError, match=r"model\.safetensors is no regular file"):
        find_model(str(tmp_path))
    os.close(writer)


def test_pipe_beside_an_onnx_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    (tmp_path / "model.onnx_cache").mkdir()
    source = find_model(str(tmp_path / "model.onnx"))
    assert source.weight_files() == [tmp_path / "model.onnx"]
    os.mkfifo(tmp_path / "model.onnx.data")
    with pytest.raises(BlinkError, match=r"model\.onnx\.data is no regular file"):
        source.weight_files()
