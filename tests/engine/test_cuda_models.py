"""Row kernels of whole architectures compile for sm_90a in bf16, without GPU or nvcc."""

from __future__ import annotations

from pathlib import Path

import pytest

from blinkc.codegen.compile_cuda import compile_cuda
from blinkc.engine.cuda_rows import render_cuda_row_kernel
from blinkc.engine.lower_segment import lower_segment
from blinkc.engine.program import GemmKernel
from blinkc.frontend.hf import decoder_graph_from_hf
from blinkc.surgery import segment_decoder
from tests.frontend.hf_models import make_config

pytestmark = pytest.mark.slow
pytest.importorskip("cuda.bindings.nvrtc")

NAMES = (
    "llama-tied-bias", "gemma2", "qwen2-moe", "mixtral", "gpt2", "cohere", "phi4-partial-rope",
    "gptj", "glm4-moe", "stablelm",
)  # fmt: skip
HEAD = """#include "blink/device/kernels/row.cuh"
using namespace blink::kernels;
extern "C" {
"""


@pytest.mark.parametrize("name", NAMES)
def test_row_kernels_compile(name: str, tmp_path: Path) -> None:
    make_config(name).save_pretrained(tmp_path)
    graph = decoder_graph_from_hf(str(tmp_path), dtype="bf16", max_seqlen=64, random_weights_seed=1)
    sources = []
    for number, segment in enumerate(segment_decoder(graph).segments):
        program = lower_segment(segment)
        for place, kernel in enumerate(program.kernels):
            if not isinstance(kernel, GemmKernel):
                rendered = render_cuda_row_kernel(program, kernel, f"rows_{number}_{place}")
                sources.append(rendered.source)
    text = HEAD + "\n".join(sources) + "}\n"
    assert compile_cuda({"rows.cu": text}, "sm_90a", flags=("-default-device",))
