"""Checkpoints as they come: shards, tied heads, experts in pieces, GGUF, random, long rope."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blinkc.errors import BlinkError
from blinkc.frontend.hf import decoder_graph_from_hf
from blinkc.frontend.hf_checkpoint import list_tensors
from blinkc.frontend.hf_interfaces import interfaces
from blinkc.frontend.hf_model import HollowModel, hollow_model
from blinkc.frontend.hf_weights import (
    GraphWeights,
    random_references,
    references_from_checkpoint,
    unused_tensors,
)
from blinkc.frontend.weights import read_weight
from tests.frontend.hf_models import make_config, save_tiny_model


def _hollow(config: Any, max_seqlen: int = 64) -> HollowModel:
    with interfaces():
        return hollow_model(config, dtype="fp32", max_seqlen=max_seqlen)


def _all_weights(hollow: HollowModel) -> GraphWeights:
    state = hollow.model.state_dict()
    return {name: (tuple(tensor.shape), "fp32") for name, tensor in state.items()}


def _assert_equal_state(folder: Path, model: Any, hollow: HollowModel) -> None:
    references = references_from_checkpoint(_all_weights(hollow), hollow, list_tensors(folder))
    state = model.state_dict()
    assert set(references) == set(state)
    for name, reference in references.items():
        np.testing.assert_array_equal(read_weight(reference), state[name].numpy(), err_msg=name)


@pytest.mark.parametrize("name", ["llama-tied-bias", "qwen3-moe", "mixtral", "granite-moe"])
def test_references_lead_to_what_transformers_loads(name: str, tmp_path: Path) -> None:
    config = make_config(name)
    model = save_tiny_model(config, tmp_path)
    _assert_equal_state(tmp_path, model, _hollow(config))


def test_half_precision_keeps_in_fp32_what_transformers_keeps(tmp_path: Path) -> None:
    # Guards: a routing bias rounded to bf16 chooses other experts.
    from transformers import AutoModelForCausalLM

    config = make_config("glm4-moe")
    save_tiny_model(config, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with interfaces():
        hollow = hollow_model(config, dtype="bf16", max_seqlen=64)
    wanted = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in hollow.model.state_dict().items()} == wanted
    assert torch.float32 in wanted.values()


def test_experts_lie_in_pieces_on_disk(tmp_path: Path) -> None:
    # Guards the test above: were experts saved fused, it would prove nothing about joining them.
    save_tiny_model(make_config("qwen3-moe"), tmp_path)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in list_tensors(tmp_path)


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    config = make_config("llama")
    model = save_tiny_model(config, tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    _assert_equal_state(tmp_path / "shards", model, _hollow(config))
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(BlinkError, match="not there"):
        list_tensors(tmp_path / "shards")


def test_shard_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BlinkError, match="not there"):
        list_tensors(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    # Guards: the last one won, whichever the index names.
    from safetensors.numpy import save_file

    for name in ("a", "b"):
        save_file(
            {"w": np.zeros(1, np.float32), name: np.zeros(1)}, tmp_path / f"{name}.safetensors"
        )
    index = {"weight_map": {"w": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BlinkError, match="tensor w lies in"):
        list_tensors(tmp_path)


@pytest.mark.parametrize("weight_map", [{"w": 1}, {}, None, ["a.safetensors"]])
def test_index_without_names_of_files_is_refused(weight_map: object, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(BlinkError, match="is no index of shards"):
        list_tensors(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        '{"w": {"shape": [1], "data_offsets": [0, 0]}}',
        '{"w": {"dtype": "F32", "data_offsets": [0, 0]}}',
        '{"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 0]}}',
        '{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}',
        '{"w": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 0]}}',
        "[]",
        '"w"',
        "[" * 100_000,
    ],
    ids=range(8),
)
def test_damaged_header_is_refused(header: str, tmp_path: Path) -> None:
    data = len(header).to_bytes(8, "little") + header.encode()
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(BlinkError, match="not a whole safetensors file"):
        list_tensors(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float64, torch.int8, torch.int32])
def test_numbers_of_other_types_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    # Guards: it was said when the bundle was written, after the whole compilation; int32, which
    # holds packed weights, was taken for numbers.
    from safetensors.torch import load_file, save_file

    config = make_config("llama")
    save_tiny_model(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    hollow = _hollow(config)
    with pytest.raises(BlinkError, match=r"tensor lm_head\.weight .* has type"):
        references_from_checkpoint(_all_weights(hollow), hollow, list_tensors(tmp_path))


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied-bias", "qwen3-moe", "mixtral", "granite-moe"]
)
def test_all_tensors_of_a_checkpoint_are_used(name: str, tmp_path: Path) -> None:
    config = make_config(name)
    save_tiny_model(config, tmp_path)
    hollow, tensors = _hollow(config), list_tensors(tmp_path)
    references = references_from_checkpoint(_all_weights(hollow), hollow, tensors)
    assert unused_tensors(hollow, tensors, references) == []


def test_tensors_without_a_use_are_noted(tmp_path: Path) -> None:
    # Guards: a config with fewer layers than the checkpoint gave another model without a word.
    config = make_config("llama")
    save_tiny_model(config, tmp_path)
    config.num_hidden_layers -= 1
    config.save_pretrained(tmp_path)
    graph = decoder_graph_from_hf(str(tmp_path), dtype="fp32", max_seqlen=64)
    (note,) = graph.spec.notes
    assert f"model.layers.{config.num_hidden_layers}." in note


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    config = make_config("llama")
    save_tiny_model(config, tmp_path)
    hollow = _hollow(config)
    tensors = list_tensors(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(BlinkError, match=r"no tensor for weight model\.layers\.1\.mlp\.up_proj"):
        references_from_checkpoint(_all_weights(hollow), hollow, tensors)


def test_tied_config_over_untied_weights_is_refused(tmp_path: Path) -> None:
    # Guards: taking either of two different matrices for both uses would be a wrong answer.
    config = make_config("llama")
    save_tiny_model(config, tmp_path)
    config.tie_word_embeddings = True
    hollow = _hollow(config)
    with pytest.raises(BlinkError, match="ties"):
        references_from_checkpoint(_all_weights(hollow), hollow, list_tensors(tmp_path))


def test_random_weights_need_a_config_only_and_repeat() -> None:
    hollow = _hollow(make_config("qwen3-moe"))
    weights = _all_weights(hollow)
    first, again, other = (random_references(weights, hollow, seed) for seed in (1, 1, 2))
    assert first == again
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert first[name] != other[name]
    value = read_weight(first[name])
    assert value.shape == weights[name][0]
    assert not np.array_equal(value[0], value[1])  # each expert is drawn anew
    norm = read_weight(first["model.norm.weight"])
    assert abs(norm.mean() - 1) < 0.1


def _rope(config: Any, num_tokens: int) -> torch.Tensor:
    """What transformers uses for a request of `num_tokens`, by running its own module."""
    from transformers import AutoModelForCausalLM

    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    rotary(torch.zeros(1, num_tokens, 1), torch.arange(num_tokens)[None])
    return rotary.inv_freq


@pytest.mark.parametrize("max_seqlen", [24, 100])
def test_long_rope_is_fixed_by_max_seqlen(max_seqlen: int) -> None:
    config = make_config("phi3")
    quarter = config.hidden_size // config.num_attention_heads // 2
    config.max_position_embeddings = 128
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(quarter)],
        "long_factor": [2.0 + 0.5 * i for i in range(quarter)],
        "original_max_position_embeddings": 32,
    }
    hollow = _hollow(config, max_seqlen)
    got = hollow.buffers["model.rotary_emb.inv_freq"]
    np.testing.assert_allclose(got, _rope(config, max_seqlen).numpy(), rtol=1e-6)
    assert f"up to {max_seqlen} tokens" in hollow.notes[0]


@pytest.mark.parametrize("max_seqlen", [24, 100])
def test_dynamic_rope_is_fixed_by_max_seqlen(max_seqlen: int) -> None:
    config = make_config("llama")
    config.max_position_embeddings = 32
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    hollow = _hollow(config, max_seqlen)
    got = hollow.buffers["model.rotary_emb.inv_freq"]
    np.testing.assert_allclose(got, _rope(config, max_seqlen).numpy(), rtol=1e-6)


def test_gguf_goes_through_transformers(tmp_path: Path) -> None:
    config = make_config("llama")
    model = save_tiny_model(config, tmp_path / "plain")
    path = tmp_path / "tiny.gguf"
    _write_gguf(path, config, model)
    graph = decoder_graph_from_hf(
        str(path), dtype="fp32", max_seqlen=64, cache_dir=tmp_path / "cache"
    )
    state = model.state_dict()
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        np.testing.assert_allclose(read_weight(graph.weights[name]), state[name], atol=1e-6)


def _write_gguf(path: Path, config: Any, model: Any) -> None:
    """Write a Llama as llama.cpp's converter does: q and k permuted, names of its own."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for role, count in heads.items():
            if role in name:
                split = value.reshape(count, 2, -1, value.shape[-1])
                value = split.swapaxes(1, 2).reshape(value.shape)
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
