"""The rendered CPU model: golden text, and that it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from blinkc.capture.grid import GraphKey
from blinkc.engine.cpu import CpuModel, build_cpu_model, render_cpu_model
from tests.engine.step_driver import Request, StepDriver
from tests.engine.tiny_decoder import VOCAB, reference_logits, tiny_decoder


def _plan() -> Any:
    return SimpleNamespace(
        max_step_tokens=16,
        max_batch=2,
        max_pages_per_lane=4,
        page_size_tokens=4,
        keys=(GraphKey("prefill", 2, 16), GraphKey("decode", 2, 16)),
    )


def test_rendering_is_the_golden_one(compare_golden: Callable[[str, str], None]) -> None:
    compare_golden("segments_cpu/segments.cpp", render_cpu_model(tiny_decoder(), _plan()))


def test_rendering_computes_the_decoder(tmp_path: Path) -> None:
    build_cpu_model(tiny_decoder(), _plan(), tmp_path / "target.so")
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(reference.shape).astype(np.float32)
        for name, reference in tiny_decoder().weights.items()
    }
    with CpuModel(tmp_path / "target.so", list(weights.values()), num_kv_pages=9) as model:
        driver, request = StepDriver(model), Request([3, 17, 5], 1)
        for _ in range(9):
            driver.step([request])
            expected = reference_logits(weights, request.tokens[: request.done])[-1]
            np.testing.assert_allclose(model.logits(1, VOCAB)[0], expected, rtol=1e-4, atol=1e-5)
            assert request.tokens[-1] == expected.argmax()


def test_equal_models_render_equal_text() -> None:
    assert render_cpu_model(tiny_decoder(), _plan()) == render_cpu_model(tiny_decoder(), _plan())
