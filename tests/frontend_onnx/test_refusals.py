"""What cannot be served is refused by name: never a wrong answer, never a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from blinkc.errors import BlinkError
from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from tests.frontend_onnx.op_models import build_op_model

STANDARD = {"attention": "standard_flat", "is_causal": False, "rotary": "none"}


def refuse(path: Path, *words: str) -> None:
    """Compile `path` and require an error that says all of `words`."""
    with pytest.raises(BlinkError) as caught:
        decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=64)
    for word in words:
        assert word in str(caught.value)


def changed(path: Path, change: Callable[[onnx.GraphProto], None]) -> Path:
    """Change the graph in a file."""
    model = onnx.load(str(path))
    change(model.graph)
    onnx.save_model(model, str(path))
    return path


def node_of(graph: onnx.GraphProto, op: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == op)


def insert_before(graph: onnx.GraphProto, target: onnx.NodeProto, *nodes: onnx.NodeProto) -> None:
    index = list(graph.node).index(target)
    for offset, node in enumerate(nodes):
        graph.node.insert(index + offset, node)


def add_initializer(graph: onnx.GraphProto, name: str, values: np.ndarray) -> str:
    graph.initializer.append(numpy_helper.from_array(values, name))
    return name


def test_truncated_file(tmp_path: Path) -> None:
    path = build_op_model(tmp_path / "model.onnx")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    refuse(path, "model.onnx")


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not an onnx file at all"])
def test_no_onnx_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    refuse(path, "model.onnx")


def test_missing_file(tmp_path: Path) -> None:
    refuse(tmp_path / "nothing.onnx", "no such ONNX file")


@pytest.mark.parametrize(
    "location", ["../outside.data", "/etc/passwd", "a/../../outside.data", "", "a\0b"]
)
def test_external_data_leaves_the_folder(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = build_op_model(folder / "model.onnx", external_data=True)
    (tmp_path / "outside.data").write_bytes((folder / "model.onnx.data").read_bytes())
    model = onnx.load(str(path), load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.external_data)
    next(e for e in tensor.external_data if e.key == "location").value = location
    path.write_bytes(model.SerializeToString())
    refuse(path, "outside the model's folder", tensor.name)


def test_external_data_is_a_link_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = build_op_model(folder / "model.onnx", external_data=True)
    data = folder / "model.onnx.data"
    data.rename(tmp_path / "secret")
    data.symlink_to(tmp_path / "secret")
    refuse(path, "outside the model's folder")


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    """A hub snapshot links model and data into one blobs folder."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    build_op_model(blobs / "model.onnx", external_data=True)
    for name in ("model.onnx", "model.onnx.data"):
        (snapshot / name).symlink_to(blobs / name)
    assert decoder_graph_from_onnx(snapshot / "model.onnx", dtype="fp32", max_seqlen=64)


def test_external_data_is_short(tmp_path: Path) -> None:
    path = build_op_model(tmp_path / "model.onnx", external_data=True)
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-100])
    refuse(path, "truncated")


def test_external_data_is_missing(tmp_path: Path) -> None:
    path = build_op_model(tmp_path / "model.onnx", external_data=True)
    (tmp_path / "model.onnx.data").unlink()
    refuse(path, "missing")


def test_no_past(tmp_path: Path) -> None:
    def drop(graph: onnx.GraphProto) -> None:
        kept = [i for i in graph.input if "past" not in i.name]
        del graph.input[:]
        graph.input.extend(kept)
        for node in graph.node:
            if node.op_type == "GroupQueryAttention":
                node.input[3] = node.input[4] = ""

    refuse(changed(build_op_model(tmp_path / "model.onnx"), drop), "no past key/value inputs")


def test_encoder_decoder(tmp_path: Path) -> None:
    def add(graph: onnx.GraphProto) -> None:
        states = helper.make_tensor_value_info(
            "encoder_hidden_states", TensorProto.FLOAT, ["batch", "enc", 32]
        )
        graph.input.append(states)

    path = changed(build_op_model(tmp_path / "model.onnx"), add)
    refuse(path, "encoder_hidden_states", "cross attention")


def test_cross_attention_over_constant_keys(tmp_path: Path) -> None:
    """Keys that come from no cache: a second attention over the layer's own input."""

    def change(graph: onnx.GraphProto) -> None:
        node = [n for n in graph.node if n.op_type == "Attention"][1]
        node.input[4] = node.input[5] = ""
        del node.output[1:]
        kept = [i for i in graph.input if ".1." not in i.name]
        del graph.input[:]
        graph.input.extend(kept)
        outputs = [o for o in graph.output if ".1." not in o.name]
        del graph.output[:]
        graph.output.extend(outputs)

    path = changed(
        build_op_model(tmp_path / "model.onnx", **{**STANDARD, "is_causal": True}), change
    )
    refuse(path, "layers.1.attention", "cross attention")


def test_quantized_cache_input(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        for value in graph.input:
            if "past" in value.name:
                value.type.tensor_type.elem_type = TensorProto.INT8

    refuse(
        changed(build_op_model(tmp_path / "model.onnx"), change), "past_key_values.0.key", "int8"
    )


def test_quantized_cache_attribute(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        node = node_of(graph, "GroupQueryAttention")
        node.attribute.append(helper.make_attribute("k_quant_type", "PER_TENSOR"))

    path = changed(build_op_model(tmp_path / "model.onnx"), change)
    refuse(path, "k_quant_type", "layers.0.attention")


def test_unknown_attribute(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        node_of(graph, "GroupQueryAttention").attribute.append(helper.make_attribute("magic", 3))

    refuse(changed(build_op_model(tmp_path / "model.onnx"), change), "magic", "layers.0.attention")


def test_alibi(tmp_path: Path) -> None:
    """A bias that grows with distance, differently per head, is no mask."""

    def change(graph: onnx.GraphProto) -> None:
        attention = node_of(graph, "Attention")
        slopes = add_initializer(
            graph, "slopes", -(2.0 ** -np.arange(1, 5, dtype=np.float32)).reshape(1, 4, 1, 1)
        )
        insert_before(
            graph,
            attention,
            helper.make_node("Cast", ["m_distance"], ["distance"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["distance", slopes], ["alibi"]),
            helper.make_node("Add", ["m_mask_4d", "alibi"], ["biased_mask"]),
        )
        attention.input[3] = "biased_mask"

    path = changed(build_op_model(tmp_path / "model.onnx", **STANDARD), change)
    refuse(path, "layers.0.attention", "bias")


@pytest.mark.parametrize("kind", ["none", "prefix", "off_by_one"])
def test_other_masks(tmp_path: Path, kind: str) -> None:
    """No mask, one that shows four tokens to all, and one that shows the next token."""

    def change(graph: onnx.GraphProto) -> None:
        if kind == "none":
            for node in graph.node:
                if node.op_type == "Attention":
                    node.input[3] = ""
            return
        future = next(n for n in graph.node if "m_future" in n.output)
        if kind == "off_by_one":
            future.input[1] = add_initializer(graph, "minus_one", np.array(-1, dtype=np.int64))
            return
        future.output[0] = "m_future_all"
        four = add_initializer(graph, "four", np.array(4, dtype=np.int64))
        index = list(graph.node).index(future) + 1
        graph.node.insert(index, helper.make_node("GreaterOrEqual", ["m_keys", four], ["m_late"]))
        graph.node.insert(
            index + 1, helper.make_node("And", ["m_future_all", "m_late"], ["m_future"])
        )

    path = changed(build_op_model(tmp_path / "model.onnx", **STANDARD), change)
    refuse(path, "layers.0.attention", "causal")


def test_mask_from_tokens(tmp_path: Path) -> None:
    """A mask that depends on token ids cannot be known when compiling."""

    def change(graph: onnx.GraphProto) -> None:
        attention = node_of(graph, "Attention")
        seven = add_initializer(graph, "seven", np.array(7, dtype=np.int64))
        cast = helper.make_node("Cast", ["is_seven"], ["seven_bias"], to=TensorProto.FLOAT)
        axes = add_initializer(graph, "axes_13", np.array([1, 3], dtype=np.int64))
        insert_before(
            graph,
            attention,
            helper.make_node("Equal", ["input_ids", seven], ["is_seven"]),
            cast,
            helper.make_node("Unsqueeze", ["seven_bias", axes], ["seven_4d"]),
            helper.make_node("Add", ["m_mask_4d", "seven_4d"], ["token_mask"]),
        )
        attention.input[3] = "token_mask"

    path = changed(build_op_model(tmp_path / "model.onnx", **STANDARD), change)
    refuse(path, "layers.0.attention", "mask")


def test_unknown_custom_op(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        node = node_of(graph, "Sigmoid")
        node.op_type, node.domain, node.name = "FancyGate", "acme.ai", "gate_of_layer_0"

    refuse(changed(build_op_model(tmp_path / "model.onnx"), change), "gate_of_layer_0", "FancyGate")


@pytest.mark.parametrize("op", ["CumSum", "ReduceMean", "Softmax", "Shift"])
def test_mixing_tokens(tmp_path: Path, op: str) -> None:
    """Ops along the tokens' axis would leak one request into another."""

    def change(graph: onnx.GraphProto) -> None:
        embed = next(n for n in graph.node if "embed.out" in n.output)
        embed.output[0] = "embed.raw"
        one = add_initializer(graph, "axis_1", np.array([1], dtype=np.int64))
        if op == "CumSum":
            axis = add_initializer(graph, "axis_scalar", np.array(1, dtype=np.int64))
            nodes = [helper.make_node("CumSum", ["embed.raw", axis], ["embed.out"], name="mix")]
        elif op == "ReduceMean":
            nodes = [
                helper.make_node("ReduceMean", ["embed.raw", one], ["mean"], name="mix"),
                helper.make_node("Add", ["embed.raw", "mean"], ["embed.out"]),
            ]
        elif op == "Softmax":
            nodes = [helper.make_node("Softmax", ["embed.raw"], ["embed.out"], axis=1, name="mix")]
        else:  # token shift: each token sees its neighbour
            starts, ends = (
                add_initializer(graph, n, np.array([v], dtype=np.int64))
                for n, v in (("start", -1), ("end", 1 << 40))
            )
            nodes = [
                helper.make_node("Slice", ["embed.raw", starts, ends, one], ["last"], name="mix"),
                helper.make_node("Add", ["embed.raw", "last"], ["embed.out"]),
            ]
        index = list(graph.node).index(embed) + 1
        for offset, node in enumerate(nodes):
            graph.node.insert(index + offset, node)

    refuse(changed(build_op_model(tmp_path / "model.onnx"), change), "'mix'", "token")


def test_wrong_seqlens(tmp_path: Path) -> None:
    """GroupQueryAttention's seqlens_k without the minus one would read past the cache."""

    def change(graph: onnx.GraphProto) -> None:
        node_of(graph, "Sub").op_type = "Add"

    refuse(changed(build_op_model(tmp_path / "model.onnx"), change), "seqlens_k")


def test_fixed_batch(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        for value in graph.input:
            value.type.tensor_type.shape.dim[0].dim_value = 4

    refuse(changed(build_op_model(tmp_path / "model.onnx"), change), "dynamic batch")


def test_position_table_is_too_short(tmp_path: Path) -> None:
    """A learned position table shorter than the limit would be read past its end."""

    def change(graph: onnx.GraphProto) -> None:
        embed = next(n for n in graph.node if "embed.out" in n.output)
        embed.output[0] = "embed.raw"
        table = add_initializer(graph, "wpe", np.zeros((48, 32), dtype=np.float32))
        graph.input.append(
            helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch", "seq"])
        )
        index = list(graph.node).index(embed) + 1
        rows = helper.make_node("Gather", [table, "position_ids"], ["wpe.rows"], name="wpe_lookup")
        graph.node.insert(index, rows)
        graph.node.insert(
            index + 1, helper.make_node("Add", ["embed.raw", "wpe.rows"], ["embed.out"])
        )

    path = changed(build_op_model(tmp_path / "model.onnx", rotary="none"), change)
    refuse(path, "wpe_lookup", "48")


def test_permuted_int4(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        node = node_of(graph, "MatMulNBits")
        order = add_initializer(graph, "g_idx", np.zeros(32, dtype=np.int32))
        node.input.extend(["", order])

    path = changed(build_op_model(tmp_path / "model.onnx", bits=4), change)
    refuse(path, "g_idx", "layers.0.q.out")
