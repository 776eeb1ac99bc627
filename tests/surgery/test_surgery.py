"""Surgery on graphs written by hand: what is merged, shared, cut, folded, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from blinkc.errors import BlinkError
from blinkc.frontend.weights import read_weight
from blinkc.surgery import segment_decoder
from blinkc.surgery.fold_shapes import array_from_dims, fold_node
from blinkc.surgery.segments import CutOpCall, SegmentCall
from tests.reference.compose_segments import ComposedModel, Request, attend
from tests.surgery.small_graphs import HEADS, HIDDEN, SIZE, GraphWriter, small_decoder


def test_equal_layers_share_one_segment() -> None:
    model = segment_decoder(small_decoder(5))
    calls = [call.segment for call in model.calls if isinstance(call, SegmentCall)]
    assert calls == [0, 1, 1, 1, 1, 2]
    ops = [call.op for call in model.calls if isinstance(call, CutOpCall)]
    assert ops == ["PagedAttention"] * 5 + ["Sample"]
    layers = [call.attributes.get("layer") for call in model.calls if isinstance(call, CutOpCall)]
    assert layers == [0, 1, 2, 3, 4, None]


def test_surgery_is_deterministic() -> None:
    # Guards: engines are cached by digest; a digest that wanders rebuilds everything.
    first, second = (segment_decoder(small_decoder(2)) for _ in range(2))
    assert [s.digest for s in first.segments] == [s.digest for s in second.segments]
    assert first.calls == second.calls


def test_products_with_one_input_are_joined_in_order() -> None:
    model = segment_decoder(small_decoder(1))
    call = model.calls[0]
    assert isinstance(call, SegmentCall)
    joined = "layer0.q+layer0.k+layer0.v"
    assert joined in call.weights
    reference = model.weights[joined]
    assert reference.shape == (3 * HIDDEN, HIDDEN)
    parts = [read_weight(small_decoder(1).weights[f"layer0.{r}"]) for r in "qkv"]
    np.testing.assert_array_equal(read_weight(reference), np.concatenate(parts))


def test_segments_keep_rows_in_front_and_carry_no_weights() -> None:
    model = segment_decoder(small_decoder(3))
    for segment in model.segments:
        onnx.checker.check_model(segment.model)
        graph = segment.model.graph
        assert all(len(i.raw_data) <= 64 for i in graph.initializer)
        names = [*segment.activations, *segment.weights]
        assert [value.name for value in graph.input] == [spec.name for spec in names]
        assert not {"Shape", "Concat", "Expand"} & {node.op_type for node in graph.node}
        for value in (*graph.value_info, *graph.output):
            dims = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            assert dims[0] in ("T", "R") and not any(isinstance(dim, str) for dim in dims[1:])


def test_composed_segments_compute_the_graph() -> None:
    graph = small_decoder(2)
    composed = ComposedModel(segment_decoder(graph))
    ids = [3, 1, 4, 1, 5]
    request = Request()
    got = [composed.step([(request, ids[:2])]), composed.step([(request, ids[2:])])]
    weights = {name: read_weight(ref) for name, ref in graph.weights.items()}
    x = weights["embed"][ids]
    for layer in range(2):
        q, k, v = (
            (x @ weights[f"layer{layer}.{r}"].T).reshape(-1, HEADS, SIZE) for r in ("q", "k", "v")
        )
        attributes = {"scale": 0.5, "softcap": 0.0, "window": 0}
        x = x + attend(q, k, v, np.arange(5), attributes, None).reshape(-1, HIDDEN)
    logits = x @ weights["head"].T
    np.testing.assert_allclose(got[0][0], logits[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1][0], logits[4], rtol=1e-5, atol=1e-6)


def test_rows_are_picked_where_the_last_piece_begins() -> None:
    # Guards: a prefill of 2048 tokens would run the last layer's products over all of them.
    model = segment_decoder(small_decoder(3))
    last = [call for call in model.calls if isinstance(call, SegmentCall)][-1]
    assert "rows" in last.activations
    segment = model.segments[last.segment]
    inputs = {spec.name for spec in segment.activations}
    picks = [node for node in segment.model.graph.node if node.op_type == "Gather"]
    assert len(picks) == 2  # the residual and what attention returns
    assert all(name in inputs for node in picks for name in node.input)
    others = [node for node in segment.model.graph.node if node.op_type != "Gather"]
    assert not any(name in inputs for node in others for name in node.input)


def _with_op_on_embedding(*nodes: tuple[str, dict[str, object], object]) -> GraphWriter:
    writer = GraphWriter()
    x = writer.embed()
    for op, attributes, constant in nodes:
        extra = [] if constant is None else [writer.constant(constant)]
        x = writer.add(op, x, *extra, **attributes)
    writer.last = x  # type: ignore[attr-defined]
    return writer


@pytest.mark.parametrize(
    ("op", "attributes", "constant", "reason"),
    [
        ("CumSum", {}, 0, "works across tokens"),
        ("ReduceMean", {"keepdims": 1}, [0], "reduces over tokens"),
        ("Softmax", {"axis": 0}, None, "works across tokens"),
        ("Transpose", {"perm": [1, 0, 2]}, None, "tokens must stay on axis 0"),
        ("Reshape", {}, [1, -1, HIDDEN], "tokens must stay on axis 0"),
        ("Reshape", {}, [-1, 2], "merges tokens"),
        ("Gather", {"axis": 0}, [0], "picks tokens"),
        ("Einsum", {"equation": "tbh->tbh"}, None, "has no rule"),
    ],
)
def test_ops_that_mix_tokens_are_refused_by_node(
    op: str, attributes: dict[str, object], constant: object, reason: str
) -> None:
    # Guards: a graph that mixes requests of one step would be wrong only in batches.
    writer = _with_op_on_embedding((op, attributes, constant))
    x = writer.last  # type: ignore[attr-defined]
    graph = writer.finish(writer.attend(x, "layer0"))
    with pytest.raises(BlinkError, match=reason) as refusal:
        segment_decoder(graph)
    assert f"node_{op.lower()}" in refusal.value.message


def test_shifted_tokens_are_refused() -> None:
    writer = GraphWriter()
    x = writer.embed()
    begin, end, axis = (writer.constant([n]) for n in (1, 1 << 40, 0))
    graph = writer.finish(writer.attend(writer.add("Slice", x, begin, end, axis), "layer0"))
    with pytest.raises(BlinkError, match="slices tokens"):
        segment_decoder(graph)


def test_tokens_picked_by_position_are_refused() -> None:
    # Guards: positions are those of a request, axis 0 is that of the step.
    writer = GraphWriter()
    x = writer.embed()
    graph = writer.finish(writer.attend(writer.add("Gather", x, "positions"), "layer0"))
    with pytest.raises(BlinkError, match="picks tokens"):
        segment_decoder(graph)


def test_one_table_for_all_tokens_becomes_a_look_up() -> None:
    # Guards: GatherElements on a table without rows has no meaning once tokens are packed.
    writer = GraphWriter()
    x = writer.embed()
    at = writer.add("Unsqueeze", "positions", writer.constant([1]))
    looked_up = writer.add("GatherElements", writer.weight("table", 1, 64), at, axis=1)
    bias = writer.add("Unsqueeze", looked_up, writer.constant([2]))
    model = segment_decoder(writer.finish(writer.attend(writer.add("Add", x, bias), "layer0")))
    assert all(n.op_type != "GatherElements" for n in model.segments[0].model.graph.node)
    logits = ComposedModel(model).step([(Request(), [1, 2, 3])])
    assert logits.shape == (1, 12)


def test_a_model_without_attention_is_refused() -> None:
    writer = GraphWriter()
    with pytest.raises(BlinkError, match="no attention layer"):
        segment_decoder(writer.finish(writer.embed()))


def test_clip_with_one_bound_keeps_it_where_it_belongs() -> None:
    # Guards: an absent optional input must not turn an upper bound into a lower one.
    writer = GraphWriter()
    x = writer.embed()
    x = writer.add("Clip", x, "", writer.constant(0.25, np.float32))
    model = segment_decoder(writer.finish(writer.attend(x, "layer0")))
    assert [n.op_type for n in model.segments[0].model.graph.node].count("Min") == 1
    assert all(n.op_type != "Max" for n in model.segments[0].model.graph.node)


def test_weight_arithmetic_is_made_where_it_is_read() -> None:
    # Guards Gemma's `1 + w`: a tensor without rows cannot cross a cut.
    writer = GraphWriter()
    x = writer.embed()
    norm = writer.add("Add", writer.weight("norm", HIDDEN), writer.constant(1.0, np.float32))
    x = writer.add("Mul", x, norm)
    x = writer.add("Mul", writer.attend(x, "layer0"), norm)
    model = segment_decoder(writer.finish(x))
    readers = [c for c in model.calls if isinstance(c, SegmentCall) and "norm" in c.weights]
    assert len(readers) == 2
    assert all(spec.rows in ("tokens", "samples") for spec in model.values.values())


def test_shape_arithmetic_with_unknown_rows_folds() -> None:
    rows = array_from_dims(["T", 1, 8])
    assert fold_node("Gather", {"axis": 0}, [rows, np.array([0, 2])])[0].tolist() == ["T", 8]  # type: ignore[index]
    assert fold_node("Mul", {}, [array_from_dims(["T"]), np.array([1])])[0].tolist() == ["T"]  # type: ignore[index]
    assert fold_node("Equal", {}, [rows, np.array([-1, -1, 8])])[0].tolist() == [0, 0, 1]  # type: ignore[index]
    # How many rows there are is known to no compiler.
    assert fold_node("Mul", {}, [array_from_dims(["T"]), np.array([2])]) is None
    assert fold_node("Equal", {}, [array_from_dims(["T"]), np.array([4])]) is None
