"""A decoder of one layer built by hand, small enough to read its rendering."""

from __future__ import annotations

import dataclasses

import numpy as np
from onnx import helper

from blinkc.frontend.decoder_graph import AttentionSpec, ModelSpec, WeightPart, WeightRef
from blinkc.surgery.segments import CutOpCall, SegmentCall, SegmentedModel, ValueSpec
from tests.engine.segment_runner import make_segment

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 24, 12, 2, 1, 8


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def tiny_decoder() -> SegmentedModel:
    """Return embedding, norm, q/k/v, attention, output product, residual and a tied head."""
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    tokens = {"hidden": HIDDEN, "q": HEADS * HEAD_DIM, "k": HEAD_DIM, "v": HEAD_DIM}
    node = helper.make_node
    first = make_segment(
        "segment0",
        [
            node("Gather", ["table", "ids"], ["hidden"], axis=0),
            node("RMSNormalization", ["hidden", "norm"], ["n"], axis=-1, epsilon=1e-6),
            node("Gemm", ["n", "qkv"], ["all"], transB=1),
            node("Split", ["all", "sizes"], ["q", "k", "v"], axis=1),
        ],
        {"ids": ("tokens", (), "int64")},
        {"table": (VOCAB, HIDDEN), "norm": (HIDDEN,), "qkv": (qkv, HIDDEN)},
        {name: ("tokens", (size,), "fp32") for name, size in tokens.items()},
        {"sizes": _ints(HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM)},
        opset=23,
    )
    last = make_segment(
        "segment1",
        [
            node("Gemm", ["attended", "out"], ["o"], transB=1),
            node("Add", ["hidden", "o"], ["h"]),
            node("Gather", ["h", "rows"], ["picked"], axis=0),
            node("Gemm", ["picked", "table"], ["logits"], transB=1),
        ],
        {
            "hidden": ("tokens", (HIDDEN,), "fp32"),
            "attended": ("tokens", (HEADS * HEAD_DIM,), "fp32"),
            "rows": ("samples", (), "int64"),
        },
        {"out": (HIDDEN, HEADS * HEAD_DIM), "table": (VOCAB, HIDDEN)},
        {"logits": ("samples", (VOCAB,), "fp32")},
    )
    attention = CutOpCall(
        op="PagedAttention",
        attributes={
            "layer": 0, "scale": HEAD_DIM**-0.5, "window": 0, "softcap": 0.0,
            "num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM,
        },
        activations=("q", "k", "v", "positions"),
        weights=(),
        outputs=("attended",),
    )  # fmt: skip
    calls = (
        SegmentCall(
            segment=0,
            activations=("input_ids",),
            weights=("table", "norm", "qkv"),
            outputs=tuple(tokens),
        ),
        attention,
        SegmentCall(
            segment=1,
            activations=("hidden", "attended", "rows"),
            weights=("out", "table"),
            outputs=("logits",),
        ),
        CutOpCall(op="Sample", attributes={}, activations=("logits",), weights=(), outputs=()),
    )
    shapes = {
        "table": (VOCAB, HIDDEN),
        "norm": (HIDDEN,),
        "qkv": (qkv, HIDDEN),
        "out": (HIDDEN, HEADS * HEAD_DIM),
    }
    values = {
        spec.name: spec for spec in (*first.activations, *first.outputs, *last.activations)
    } | {spec.name: spec for spec in last.outputs}
    for name, rows in (("input_ids", "tokens"), ("positions", "tokens"), ("rows", "samples")):
        values[name] = ValueSpec(name=name, rows=rows, shape=(), dtype="int64")
    values["attended"] = dataclasses.replace(values["q"], name="attended")
    return SegmentedModel(
        spec=ModelSpec(
            name="tiny",
            architecture="Tiny",
            dtype="fp32",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            max_position_embeddings=64,
            attention=(
                AttentionSpec(
                    layer=0,
                    num_q_heads=HEADS,
                    num_kv_heads=KV_HEADS,
                    head_dim=HEAD_DIM,
                    scale=HEAD_DIM**-0.5,
                ),
            ),
        ),
        segments=(first, last),
        calls=calls,
        values=values,
        weights={name: _random_reference(name, shape) for name, shape in shapes.items()},
    )


def _random_reference(name: str, shape: tuple[int, ...]) -> WeightRef:
    part = WeightPart(source="random", key=name, shape=shape, dtype="fp32", seed=len(name))
    return WeightRef(name=name, shape=shape, dtype="fp32", parts=(part,))


def reference_logits(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Compute the logits of every position in float64."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    hidden = w["table"][tokens]
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6) * w["norm"]
    q, k, v = np.split(normed @ w["qkv"].T, [HEADS * HEAD_DIM, (HEADS + 1) * HEAD_DIM], axis=1)
    attended = np.zeros_like(q)
    for t in range(len(tokens)):
        for head in range(HEADS):
            columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            scores = k[: t + 1] @ q[t, columns] * HEAD_DIM**-0.5
            p = np.exp(scores - scores.max())
            attended[t, columns] = p / p.sum() @ v[: t + 1]
    logits: np.ndarray = (hidden + attended @ w["out"].T) @ w["table"].T
    return logits
