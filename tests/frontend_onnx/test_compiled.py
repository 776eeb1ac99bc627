"""Each dialect through the whole compiler to the CPU target: greedy tokens equal onnxruntime's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blinkc.codegen.compile_cpu import compile_cpu
from blinkc.engine.cpu import render_cpu_model
from blinkc.frontend.onnx_decoder import decoder_graph_from_onnx
from blinkc.frontend.weights import read_weight
from blinkc.surgery import segment_decoder
from tests.engine.step_driver import Request, StepDriver
from tests.engine.test_cpu_models import load, small_plan
from tests.frontend_onnx.exports import export_model
from tests.frontend_onnx.op_models import build_op_model
from tests.frontend_onnx.original import OriginalRun

PROMPTS = ([5, 9, 31, 7, 2, 11, 60, 3], [44, 1, 17])
NUM_TOKENS = 12
MODELS: dict[str, Callable[[Path], Path]] = {
    "group_query": lambda path: build_op_model(path, packed=True, qkv_bias=True, window=6),
    "standard": lambda path: build_op_model(
        path, attention="standard", rotary="node", fused_norm=False, interleaved=True
    ),
    "primitive": lambda path: export_model(path, "qwen3", dynamo=False),
}


def greedy(path: Path, prompt: list[int]) -> list[int]:
    """Generate with onnxruntime on the file."""
    original = OriginalRun(path)
    tokens = [int(original.step(prompt)[-1].argmax())]
    while len(tokens) < NUM_TOKENS:
        tokens.append(int(original.step(tokens[-1:])[-1].argmax()))
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(tmp_path: Path, name: str) -> None:
    path = MODELS[name](tmp_path / "model.onnx")
    segmented = segment_decoder(decoder_graph_from_onnx(path, dtype="fp32", max_seqlen=64))
    assert len(segmented.segments) == 3  # first, middle, last: layers must look alike
    source = render_cpu_model(segmented, small_plan())
    library = tmp_path / "target.so"
    compile_cpu({"segments.cpp": source}, out=library, flags={"segments.cpp": ["-O1"]})
    weights: list[np.ndarray] = [read_weight(ref) for ref in segmented.weights.values()]
    with load(library, weights) as model:
        driver = StepDriver(model)
        requests = [Request(list(prompt), lane) for lane, prompt in enumerate(PROMPTS)]
        for _ in range(NUM_TOKENS):
            driver.step(requests)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.tokens[request.num_prompt :] == greedy(path, prompt)
