"""Run a SegmentedModel slowly: onnxruntime for segments, numpy for cut ops; fp32, fp16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from blinkc.frontend.weights import read_weight
from blinkc.surgery.segments import CutOpCall, SegmentCall, SegmentedModel

Array = np.ndarray


@dataclass
class Request:
    """The tokens a request has had so far, and its keys and values by layer, `[n, Hkv, d]`."""

    num_tokens: int = 0
    keys: dict[int, Array] = field(default_factory=dict)
    values: dict[int, Array] = field(default_factory=dict)


class ComposedModel:
    """Runs steps over any mix of requests, tokens packed without gaps."""

    def __init__(self, model: SegmentedModel) -> None:
        self._model = model
        self._weights = {name: read_weight(ref) for name, ref in model.weights.items()}
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self._sessions = [
            ort.InferenceSession(s.model.SerializeToString(), options, ["CPUExecutionProvider"])
            for s in model.segments
        ]

    def step(self, work: Sequence[tuple[Request, Sequence[int]]]) -> Array:
        """Run new tokens of some requests; return the logits of each one's last token, `[R, V]`."""
        ids, positions, rows, spans = [], [], [], []
        for request, tokens in work:
            spans.append((request, len(ids), len(ids) + len(tokens)))
            ids += list(tokens)
            positions += range(request.num_tokens, request.num_tokens + len(tokens))
            rows.append(len(ids) - 1)
        values: dict[str, Array] = {
            "input_ids": np.array(ids, dtype=np.int64),
            "positions": np.array(positions, dtype=np.int64),
            "rows": np.array(rows, dtype=np.int64),
        }
        for call in self._model.calls:
            if isinstance(call, SegmentCall):
                self._run_segment(call, values)
            elif call.op == "PagedAttention":
                values[call.outputs[0]] = self._attend(call, values, spans)
            elif call.op == "MoeExperts":
                values[call.outputs[0]] = self._run_experts(call, values)
        for request, begin, end in spans:
            request.num_tokens += end - begin
        return values["logits"]

    def _run_segment(self, call: SegmentCall, values: dict[str, Array]) -> None:
        segment = self._model.segments[call.segment]
        feeds = {
            s.name: values[n] for s, n in zip(segment.activations, call.activations, strict=True)
        }
        for spec, name in zip(segment.weights, call.weights, strict=True):
            feeds[spec.name] = self._weights[name]
        outputs = self._sessions[call.segment].run([s.name for s in segment.outputs], feeds)
        for name, spec, output in zip(call.outputs, segment.outputs, outputs, strict=True):
            assert output.shape[1:] == spec.shape, (name, output.shape, spec)
            assert self._model.values[name].shape == spec.shape
            values[name] = output

    def _attend(
        self, call: CutOpCall, values: dict[str, Array], spans: list[tuple[Request, int, int]]
    ) -> Array:
        attributes = call.attributes
        size = attributes["head_dim"]
        q, k, v = (
            values[name].reshape(len(values[name]), -1, size) for name in call.activations[:3]
        )
        sinks = self._weights[call.weights[0]] if call.weights else None
        out = np.empty_like(q)
        layer = attributes["layer"]
        for request, begin, end in spans:
            keys = np.concatenate([request.keys.get(layer, k[:0]), k[begin:end]])
            cached = np.concatenate([request.values.get(layer, v[:0]), v[begin:end]])
            request.keys[layer], request.values[layer] = keys, cached
            out[begin:end] = attend(
                q[begin:end], keys, cached, values["positions"][begin:end], attributes, sinks
            )
        return out.reshape(len(out), -1)

    def _run_experts(self, call: CutOpCall, values: dict[str, Array]) -> Array:
        x, ids, weights = (values[name] for name in call.activations)
        gate_up, down = (self._weights[name] for name in call.weights)
        act = ACTIVATIONS[call.attributes["activation"]]
        out = np.zeros_like(x)
        for token in range(len(x)):
            for expert, weight in zip(ids[token], weights[token], strict=True):
                gate, up = np.split(gate_up[expert] @ x[token], 2)
                out[token] += weight * (down[expert] @ (act(gate) * up))
        return out


def attend(
    q: Array,
    keys: Array,
    values: Array,
    positions: Array,
    attributes: dict[str, Any],
    sinks: Array | None,
) -> Array:
    """Causal attention of q `[t, Hq, d]` over a request's keys and values `[n, Hkv, d]`."""
    dtype, group = q.dtype, q.shape[1] // keys.shape[1]
    q, keys, values = (x.astype(np.float32) for x in (q, keys, values))
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("thd,nhd->htn", q, keys) * np.float32(attributes["scale"])
    if attributes["softcap"]:
        scores = np.tanh(scores / attributes["softcap"]) * attributes["softcap"]
    at = np.arange(len(keys))[None, :]
    hidden = at > positions[:, None]
    if attributes["window"]:
        hidden |= at <= positions[:, None] - attributes["window"]
    scores = np.where(hidden[None], -np.inf, scores)
    if sinks is not None:
        column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, column], axis=-1)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.einsum("htn,nhd->thd", scores[..., : len(keys)], values).astype(dtype)


def _erf(x: Array) -> Array:
    from math import erf

    return np.vectorize(erf)(x).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / np.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}
