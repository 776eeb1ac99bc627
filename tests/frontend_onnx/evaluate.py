"""Run a `DecoderGraph` the slow, obvious way: reference ops, attention over lists of keys.

A step is a list of (request, new token ids); tokens of all requests lie packed in one graph run, as
in the runtime. Requests keep their keys and values between steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from blinkc.frontend.decoder_graph import DecoderGraph
from blinkc.frontend.weights import read_weight


class DecoderRun:
    """Holds the weights and the cached keys and values of each request."""

    def __init__(self, graph: DecoderGraph) -> None:
        onnx.checker.check_model(_without_blink(graph.model))
        self.graph = graph
        self.weights = {name: read_weight(ref) for name, ref in graph.weights.items()}
        self.cache: dict[tuple[str, int], list[np.ndarray]] = {}
        self.lengths: dict[str, int] = {}
        self._step: list[tuple[str, int]] = []
        run = self

        class PagedAttention(OpRun):
            op_domain = "blink"

            def _run(self, q, k, v, positions, sinks=None, **attributes):  # type: ignore[no-untyped-def]
                return (run.attend(q, k, v, positions, sinks, attributes),)

        self._evaluator = ReferenceEvaluator(graph.model, new_ops=[PagedAttention])

    def step(self, requests: list[tuple[str, list[int]]]) -> dict[str, np.ndarray]:
        """Run one packed step and return each request's logits at all its new tokens."""
        self._step = [(name, len(ids)) for name, ids in requests]
        ids = np.array([i for _, new in requests for i in new], dtype=np.int64)
        positions = np.concatenate(
            [self.lengths.get(n, 0) + np.arange(len(new)) for n, new in requests]
        ).astype(np.int64)
        # Rows in reverse order: a graph that ignores `rows` cannot pass.
        rows = np.arange(len(ids), dtype=np.int64)[::-1].copy()
        feeds = {"input_ids": ids, "positions": positions, "rows": rows, **self.weights}
        logits = self._evaluator.run(None, feeds)[0][::-1]
        for name, new in requests:
            self.lengths[name] = self.lengths.get(name, 0) + len(new)
        edges = np.cumsum([0, *(len(new) for _, new in requests)])
        return {
            name: logits[start:stop]
            for (name, _), start, stop in zip(requests, edges, edges[1:], strict=False)
        }

    def attend(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        positions: np.ndarray,
        sinks: np.ndarray | None,
        attributes: dict[str, Any],
    ) -> np.ndarray:
        """Compute `blink::PagedAttention` for the current step."""
        out = np.empty(q.shape, dtype=np.float64)
        start = 0
        for name, count in self._step:
            new = slice(start, start + count)
            key = (name, attributes["layer"])
            old = self.cache.get(key, [np.zeros((0, *k.shape[1:])), np.zeros((0, *v.shape[1:]))])
            keys, values = np.concatenate([old[0], k[new]]), np.concatenate([old[1], v[new]])
            self.cache[key] = [keys, values]
            out[new] = attention(q[new], keys, values, positions[new], sinks, attributes)
            start += count
        return out.astype(q.dtype)


def attention(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    sinks: np.ndarray | None,
    attributes: dict[str, Any],
) -> np.ndarray:
    """Attend with a request's queries `[t, Hq, d]` to its keys `[n, Hkv, d]`, one by one."""
    out = np.zeros(q.shape, dtype=np.float64)
    group = q.shape[1] // keys.shape[1]
    for t, position in enumerate(positions):
        first = max(0, position + 1 - attributes["window"]) if attributes["window"] else 0
        for head in range(q.shape[1]):
            seen = slice(first, position + 1)
            scores = keys[seen, head // group].astype(np.float64) @ q[t, head].astype(np.float64)
            scores = scores * attributes["scale"]
            if attributes["softcap"]:
                scores = attributes["softcap"] * np.tanh(scores / attributes["softcap"])
            top = scores.max()
            weights = np.exp(scores - top)
            total = weights.sum()
            if sinks is not None:
                total += np.exp(float(sinks[head]) - top)
            out[t, head] = (weights / total) @ values[seen, head // group].astype(np.float64)
    return out


def _without_blink(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with cut ops replaced by something onnx's checker knows."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.domain == "blink":
            node.op_type, node.domain = "Identity", ""
            del node.input[1:], node.attribute[:]
    return copy
