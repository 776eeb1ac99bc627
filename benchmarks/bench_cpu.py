"""Compare the served CPU target with transformers fp32 on this machine, in one run.

Both generate greedily from the same prompts; the server is measured end to end, HTTP included.
Rounds interleave transformers, one request, and a batch of eight, and medians give the ratios, so
that a busy machine slows all alike.

    python benchmarks/bench_cpu.py MODEL BUNDLE [--tokens 64] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from openai import OpenAI

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how a bicycle stays upright, step by step.",
    "List the planets of the solar system and one fact about each.",
    "Describe the taste of an orange to somebody who never ate one.",
    "Why is the sky blue? Give the physics in simple words.",
    "Write a polite letter that asks for a refund of a train ticket.",
    "Tell me the history of the printing press in a few sentences.",
    "Give advice to a student who is learning to program.",
)


class Transformers:
    """The baseline: `generate` with a KV cache, fp32, all cores."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # as ignore_eos

    def tokens_per_s(self, prompt_token_ids: list[int], num_tokens: int) -> float:
        """Generate `num_tokens` tokens for one prompt and return the rate, prefill included."""
        ids = self._torch.tensor([prompt_token_ids])
        start = time.perf_counter()
        with self._torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        return (output.shape[1] - ids.shape[1]) / seconds


class Server:
    """`blink-runtime run` as its users start it."""

    def __init__(self, bundle: Path) -> None:
        command = [Path(sys.executable).parent / "blink-runtime", "run", bundle, "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "http://" in line:
                url = "http://" + line.split("http://")[1].split()[0].rstrip("/") + "/v1"
                self._client = OpenAI(base_url=url, api_key="none", max_retries=0)
                self._model = self._client.models.list().data[0].id
                return
        raise SystemExit("the server ended before it was ready")

    def tokens_per_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Complete all prompts at once and return their tokens per second together."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            total = sum(pool.map(lambda ids: self._complete(ids, num_tokens), prompts))
        return total / (time.perf_counter() - start)

    def _complete(self, prompt_token_ids: list[int], num_tokens: int) -> int:
        answer = self._client.completions.create(
            model=self._model,
            prompt=prompt_token_ids,
            max_tokens=num_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        self._process.wait(10)


def measure(model: Path, bundle: Path, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Return the medians of all rounds, in tokens per second, and their ratios."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts: list[list[int]] = [tokenizer(text)["input_ids"] for text in PROMPTS]
    baseline, server = Transformers(model), Server(bundle)
    rates: dict[str, list[float]] = {"transformers": [], "one_request": [], "batch_8": []}
    try:
        baseline.tokens_per_s(prompts[0], 8)
        server.tokens_per_s(prompts, 8)
        for index in range(rounds):
            prompt = prompts[index % len(prompts)]
            rates["transformers"].append(baseline.tokens_per_s(prompt, num_tokens))
            rates["one_request"].append(server.tokens_per_s([prompt], num_tokens))
            rates["batch_8"].append(server.tokens_per_s(prompts, num_tokens))
            print(
                f"round {index + 1}/{rounds}: "
                + ", ".join(f"{name} {values[-1]:.1f} tok/s" for name, values in rates.items()),
                flush=True,
            )
    finally:
        server.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "rates_tokens_per_s": rates,
        "median_tokens_per_s": medians,
        "one_request_over_transformers": medians["one_request"] / medians["transformers"],
        "batch_8_over_one_request": medians["batch_8"] / medians["one_request"],
    }


def main() -> None:
    """Measure, print the two ratios and write benchmarks/results/cpu.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "cpu.json"
    )
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.bundle, arguments.tokens, arguments.rounds)
    result |= {
        "date": date.today().isoformat(),
        "hardware": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "command": "make bench-cpu",
        "tokens": arguments.tokens,
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"one request: {result['one_request_over_transformers']:.2f} x transformers fp32")
    print(f"batch 8:     {result['batch_8_over_one_request']:.2f} x one request")


def cpu_name() -> str:
    """Return the processor's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
