"""Whole steps of tiny models on the emulated device against transformers in fp32: row kernels as
they are rendered, products, attention, experts and sampling, in the order of the launch list."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from blinkc.capture.grid import GraphKey
from blinkc.engine.cuda import render_cuda_model
from blinkc.frontend.hf import decoder_graph_from_hf
from blinkc.surgery import segment_decoder
from tests.emulation.harness import EmulatedHarness
from tests.emulation.module import EmulatedModule
from tests.emulation.step_driver import Request, StepDriver
from tests.gpu.models import CASES, VOCAB_SIZE, save_checkpoint
from tests.gpu.router_margins import ROUTER_TIE_STD, router_margins

torch = pytest.importorskip("torch")

QUICK = (("llama-tied-bias", "bf16"), ("qwen3-moe", "fp16"))
MATRIX = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
KEYS = (
    GraphKey("prefill", 3, 48),
    GraphKey("prefill", 1, 16),
    GraphKey("decode", 1, 64),
    GraphKey("decode", 3, 64),
)
# Of a row's logits, in their standard deviations: rounding to 16 bits in every layer.
TOLERANCE = {"bf16": 0.12, "fp16": 0.02}
# A choice of experts this close, anywhere in the sequence, falls to rounding (router_margins.py).
# In transformers' own fp32 the other choice moved the rows that differ here as far: 0.127, 0.484.
# Ties may excuse a row, not a model.
ROUTER_TIE = {"bf16": ROUTER_TIE_STD, "fp16": ROUTER_TIE_STD / 8}
FEWEST_RIGHT = 4


@pytest.mark.parametrize(("name", "dtype"), MATRIX)
def test_logits_are_those_of_transformers(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed and lone prefill, decode at two batches, a row of padding in each."""
    from transformers import AutoModelForCausalLM

    save_checkpoint(name, dtype, tmp_path)
    graph = decoder_graph_from_hf(str(tmp_path), dtype=dtype, max_seqlen=64)
    segmented = segment_decoder(graph)
    spec = segmented.spec
    plan = SimpleNamespace(
        max_step_tokens=48,
        max_batch=3,
        max_pages_per_lane=4,
        page_size_tokens=16,
        keys=KEYS,
        kv_layers=spec.attention,
    )
    model = render_cuda_model(segmented, plan)
    kernels = EmulatedHarness(
        EmulatedModule(model.source),
        dtype,
        num_multiprocessors=6,
        seed=zlib.crc32(name.encode()),
    )
    driver = StepDriver(kernels, model, segmented, plan, monkeypatch)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(3)
    first, second = (
        Request(torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist(), lane)
        for n, lane in ((25, 2), (18, 0))
    )

    right: list[bool] = []

    def check(requests: list[Request], sampled: list[int]) -> None:
        got = driver.logits(len(requests))
        for row, request in enumerate(requests):
            with torch.no_grad(), router_margins(reference) as margins:
                ids = torch.tensor([request.tokens])
                want = reference(ids, use_cache=False).logits[0, -1].float()
            closest = min((float(m.min()) for m in margins), default=math.inf)
            error = float((got[row] - want).abs().max() / want.std())
            print(f"{name} {dtype}: {error:.4f}, closest choice of experts {closest:.4f}")
            right.append(error < TOLERANCE[dtype])
            assert right[-1] or closest < ROUTER_TIE[dtype]
            assert sampled[row] == int(got[row].argmax())
            request.tokens.append(sampled[row])

    both = [second, first]
    check(both, driver.run(KEYS[0], both))
    check(both, driver.run(KEYS[3], both))
    check([first], driver.run(KEYS[2], [first]))
    third = Request(first.tokens[3:12], 1)
    check([third], driver.run(KEYS[1], [third]))
    assert sum(right) >= FEWEST_RIGHT
    assert any(kernel.startswith("rows_") for kernel in driver.names)
    assert any(kernel.startswith("narrow_") for kernel in driver.names)
    assert any(kernel.startswith("gemv_") for kernel in driver.names)
