"""Run the original ONNX decoder with onnxruntime, one request at a time, as its users would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort


class OriginalRun:
    """One request: feeds mask, positions and past, keeps the presents."""

    def __init__(self, path: Path, head_dim: int = 16) -> None:
        """Open the file; `head_dim` stands in where it leaves the head size of its cache open."""
        ort.set_default_logger_severity(3)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {i.name: i for i in self.session.get_inputs()}
        self.outputs = [o.name for o in self.session.get_outputs()]
        self.past_names = [n for n in self.inputs if "past" in n or "cache_" in n]
        self.head_dim = head_dim
        self.length = 0
        self.past: dict[str, np.ndarray] = {}

    def step(self, ids: list[int]) -> np.ndarray:
        """Return the logits of the new tokens, `[t, V]` in fp32."""
        end = self.length + len(ids)
        feeds: dict[str, Any] = {"input_ids": self._typed("input_ids", [ids])}
        if "attention_mask" in self.inputs:
            feeds["attention_mask"] = self._typed("attention_mask", [[1] * end])
        if "position_ids" in self.inputs:
            feeds["position_ids"] = self._typed("position_ids", [list(range(self.length, end))])
        for name in self.past_names:
            info = self.inputs[name]
            shape = [d if isinstance(d, int) else 0 for d in info.shape]
            shape[0] = 1
            if isinstance(info.shape[3], str):
                shape[3] = self.head_dim
            feeds[name] = self.past.get(name, np.zeros(shape, dtype=_numpy_type(info.type)))
        results = dict(zip(self.outputs, self.session.run(None, feeds), strict=True))
        presents = [results[name] for name in self.outputs if name != "logits"]
        self.past = dict(zip(self.past_names, presents, strict=True))
        self.length = end
        return np.asarray(results["logits"][0], dtype=np.float32)

    def _typed(self, name: str, values: list[list[int]]) -> np.ndarray:
        return np.array(values, dtype=_numpy_type(self.inputs[name].type))


def _numpy_type(name: str) -> Any:
    return {
        "tensor(float)": np.float32,
        "tensor(float16)": np.float16,
        "tensor(int64)": np.int64,
        "tensor(int32)": np.int32,
    }[name]
