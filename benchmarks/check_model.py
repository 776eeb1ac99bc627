"""Holds a compiled model against transformers on the GPU: logits of each kind of step, tokens.

`PYTHONPATH=.:runtime python3 benchmarks/check_model.py FOLDER [BUNDLE PLACEMENT]`; FOLDER as for
bench_model.py. With a bundle, its served greedy tokens are compared instead.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_model import load, report, write_results
from blink_runtime.cuda_driver import Context, MappedBuffer
from blink_runtime.cuda_target import CudaTarget
from blink_runtime.manual_step import (
    read_logits,
    read_sampled,
    read_weight,
    run_step,
    write_pages,
)
from blink_runtime.ring_memory import RingMemory
from blinkc.capture.grid import GraphKey


def transformers_model(folder: Path, target: CudaTarget, dtype: Any) -> Any:
    """Build transformers' model of config.json, with the weights that lie on the GPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.eval()
    state = dict(model.named_parameters())
    seen = set()
    for number, entry in enumerate(target.launches["weights"]):
        if entry["dtype"] != "bf16":
            continue
        raw = torch.from_numpy(read_weight(target, number).reshape(-1)).cuda()
        flat, at = raw.view(torch.bfloat16), 0
        for name in entry["name"].split("+"):
            size = state[name].numel()
            state[name].data.copy_(flat[at : at + size].view(state[name].shape))
            seen.add(name)
            at += size
    missing = set(state) - seen - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    assert not missing, missing
    return model


def check_bundle(bundle_path: Path, folder: Path, placement: str) -> None:
    """Serve greedy requests from a bundle and hold their tokens against transformers in float32."""
    import torch

    from blink_runtime.cuda_bundle import load_cuda_target, read_plan
    from blinkc.bundle.reader import open_bundle

    torch.zeros(1, device="cuda")
    context = Context()
    with open_bundle(bundle_path) as bundle:
        ring = RingMemory(read_plan(bundle), lambda size: MappedBuffer(size, "the ring"))
        target = load_cuda_target(bundle, context, ring.memory, placement=placement, say=print)
    target.start()
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, target.plan.vocab_size, n).tolist() for n in (3, 40, 150, 600)]
    result = ring.run(prompts, 24, timeout_s=30.0)
    outputs = [ring.tokens(slot, 24) for slot in range(len(prompts))]
    ring.stop()
    assert target.join(5.0)
    model = transformers_model(folder, target, torch.float32)
    equal, worst = 0, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output[:-1]], device="cuda")).logits[0]
        logits = logits[len(prompt) - 1 :]
        chosen = logits[torch.arange(24), torch.tensor(output, device="cuda")]
        gaps = (logits.max(-1).values - chosen) / logits.std(-1)
        equal += int((gaps == 0).sum())
        worst = max(worst, float(gaps.max()))
    report(f"bundle {placement}", equal=equal, of=24 * len(prompts), worst_gap_std=worst, **result)
    assert worst < 0.15
    target.close()


def check_model(folder: Path) -> None:
    """Compare logits of prefill, chunked prefill and decode with transformers in float32."""
    import torch

    keys = (
        GraphKey("prefill", 1, 64),
        GraphKey("prefill", 4, 512),
        GraphKey("decode", 1, 256),
        GraphKey("decode", 4, 512),
        GraphKey("decode", 16, 512),
        GraphKey("decode", 32, 512),
    )
    torch.zeros(1, device="cuda")
    target = load(folder, "none", keys=keys)
    model = transformers_model(folder, target, torch.float32)
    half = transformers_model(folder, target, torch.bfloat16)  # the yardstick of rounding
    failures: list[Any] = []
    worst_usual: list[float] = []
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, target.plan.vocab_size, n).tolist() for n in (37, 200, 5, 64)]
    write_pages(target, 4, 64)

    def run(key: GraphKey, rows: list[tuple[list[int], int]]) -> tuple[np.ndarray, list[int]]:
        run_step(target, keys.index(key), rows, 7)
        return read_logits(target, len(rows)), read_sampled(target, len(rows))

    def compare(label: str, got: np.ndarray, ids: list[int], sequences: list[list[int]]) -> None:
        for row, sequence in enumerate(sequences):
            ids_tensor = torch.tensor([sequence], device="cuda")
            with torch.no_grad():
                want = model(ids_tensor).logits[0, -1].float().cpu().numpy()
                rounded = half(ids_tensor).logits[0, -1].float().cpu().numpy()
            error = float(np.linalg.norm(got[row] - want) / np.linalg.norm(want))
            usual = float(np.linalg.norm(rounded - want) / np.linalg.norm(want))
            gap = float(want.max() - want[ids[row]])
            spread = float(want.std())
            report(
                f"check {label} row {row}",
                error=error,
                transformers_bf16_error=usual,
                same=bool(want.argmax() == ids[row]),
                gap_std=gap / spread,
            )
            worst_usual.append(usual)
            if error > 2 * max(worst_usual) + 0.01:
                failures.append((label, row, error, usual))

    sequences = [list(p) for p in prompts]
    logits, ids = run(keys[1], [(p, 0) for p in prompts])
    compare("prefill 4 packed", logits, ids, sequences)
    for number in range(3):
        for sequence, token in zip(sequences, ids, strict=True):
            sequence.append(token)
        key = keys[3 + number]  # batch 4, 16, 32: our kernels, then cuBLASLt
        logits, ids = run(key, [([s[-1]], len(s) - 1) for s in sequences])
        compare(f"decode at batch {key.batch}", logits, ids, sequences)
    run(keys[1], [(sequences[1][:100], 0)])
    logits, ids = run(keys[1], [(sequences[1][100:], 100)])
    compare("second chunk", logits, ids, [sequences[1]])
    logits, ids = run(keys[0], [(prompts[0], 0)])
    compare("prefill 1", logits, ids, [prompts[0]])
    # The same request in another row, beside other rows and padding, at the same key: the same
    # bits.
    first, _ = run(keys[3], [([5], 0), ([9], 0), ([11], 0)])
    second, _ = run(keys[3], [([9], 0), ([77], 0), ([5], 0), ([3], 0)])
    report(
        "rows independent",
        same=bool((first[0] == second[2]).all() and (first[1] == second[0]).all()),
    )
    assert not failures, failures
    torch.cuda.empty_cache()
    target.close()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        check_model(Path(sys.argv[1]))
    else:
        check_bundle(Path(sys.argv[2]), Path(sys.argv[1]), sys.argv[3])
    write_results(Path(sys.argv[1]))
