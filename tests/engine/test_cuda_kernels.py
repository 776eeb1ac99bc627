"""The kernels' templates compile, with warpgroup products where the target has them."""

from __future__ import annotations

import pytest

from blinkc.engine.cuda_source import CudaNeeds, compile_kernels, render_cuda_source

pytest.importorskip("cuda.bindings.nvrtc")


@pytest.mark.parametrize(
    ("architecture", "has_warpgroup_products"),
    [("sm_90a", True), pytest.param("sm_100a", False, marks=pytest.mark.slow)],
)
def test_kernels_compile(architecture: str, has_warpgroup_products: bool) -> None:
    needs = CudaNeeds(dtype="fp16", heads=((80, 4),), logits_dtype="fp16", activation="gelu")
    image = compile_kernels(render_cuda_source(needs), architecture)
    # The loader reads by name what the whole program itself does not use.
    for name in (b"prefill_attention_80_threads", b"has_warpgroup_products", b"sample_rows"):
        assert name in image
    assert (b"narrow_64_2_1_4_shared_bytes" in image) == has_warpgroup_products
