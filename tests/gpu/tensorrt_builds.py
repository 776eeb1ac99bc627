"""Builds that a machine with TensorRT finishes, made on one with the compiler and no GPU.

`python -m tests.gpu.tensorrt_builds CHECKPOINT [ENGINE TARGET]` (tensorrt, sm_90) cuts SmolLM2 from
its checkpoint folder, and an 8B shape without weights, into segments; compiles the kernels beside;
and asks transformers for greedy tokens. All of it goes to .cache/tensorrt_gpu. What is left for
`tests/gpu/test_tensorrt.py` needs TensorRT, cuda-bindings, numpy, onnx, onnx-graphsurgeon and
pytest, under any Python from 3.10: neither torch nor NVRTC.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from blinkc.capture.plan_capture import CaptureConfig
from blinkc.config import CompileConfig
from blinkc.engine.options import EngineOptions

ROOT = Path(
    os.environ.get("BLINK_TENSORRT_BUILDS") or Path(__file__).parents[2] / ".cache" / "tensorrt_gpu"
)
NUM_TOKENS = 48
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",  # no tie in the answer, nor in the next one's
    "The quick brown fox jumps over the lazy dog. " * 30,  # in several chunks
)
TIE_STD = 0.15  # of a row's logits: what rounding to 16 bits may move
_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A prompt and transformers' greedy answer in fp32, each token with its margin in std."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    margins: tuple[float, ...]
    sure_text: str  # of the tokens before the first tie

    def num_equal(self, tokens: Sequence[int]) -> int:
        """Return how many tokens are equal before a tie, where the answers may part.

        Raises:
            AssertionError: they part where there is no tie.
        """
        for place, (token, wanted) in enumerate(zip(tokens, self.output_token_ids, strict=True)):
            if token != wanted:
                margin = self.margins[place]
                assert margin <= TIE_STD, f"token {place} is {token}, not {wanted} ({margin:.2f})"
                return place
        return len(tokens)


def engine_and_target() -> tuple[str, str]:
    """Return what the builds were made for."""
    engine, target = json.loads((ROOT / "engine.json").read_text())
    return engine, target


def smollm2(engine: str, target: str) -> CompileConfig:
    """Return the configuration of SmolLM2; the checkpoint lies in the folder."""
    capture = CaptureConfig(
        target=target,
        shapes="prefill:1,4@64,256/decode:1,2,4,8@256,1024",
        max_batch=8,
        max_seqlen=1024,
        max_prefill_tokens=256,
        num_slots=16,
        num_kv_pages=512,
    )
    model = str(ROOT / "smollm2" / "checkpoint")
    return CompileConfig(model=model, target=target, engine=engine, dtype="fp16", capture=capture)


def llama_8b(engine: str, target: str, num_profiles: int) -> CompileConfig:
    """Return the configuration of an 8B shape."""
    capture = CaptureConfig(
        target=target,
        shapes="prefill:1,2,4@64..2048x2/decode:1,2,4,8,16,32,64@256..2048x2",
        max_batch=64,
        max_seqlen=2048,
        num_slots=64,
        num_kv_pages=1024,
    )
    return CompileConfig(
        model=str(ROOT / "llama8b" / "checkpoint"),
        target=target,
        engine=engine,
        dtype="fp16",
        capture=capture,
        random_weights_seed=1,
        engine_options=EngineOptions(num_profiles=num_profiles),
    )


def expected() -> list[Expected]:
    """Read the prompts and answers."""
    entries = json.loads((ROOT / "smollm2" / "expected.json").read_text())
    return [
        Expected(**{n: tuple(v) if isinstance(v, list) else v for n, v in entry.items()})
        for entry in entries
    ]


def prepare(checkpoint: Path, engine: str, target: str) -> None:
    """Write everything; what is there from an earlier run is taken up."""
    from blinkc.pipeline import compile_model
    from blinkc.progress import Progress

    ROOT.mkdir(parents=True, exist_ok=True)
    (ROOT / "engine.json").write_text(json.dumps([engine, target]))
    config = smollm2(engine, target)
    shutil.copytree(checkpoint, config.model, dirs_exist_ok=True)
    llama = llama_8b(engine, target, 1)
    Path(llama.model).mkdir(parents=True, exist_ok=True)
    (Path(llama.model) / "config.json").write_text(json.dumps(_LLAMA_8B))
    for name, item in (("smollm2", config), ("llama8b", llama)):
        build = ROOT / name / "build"
        compile_model(replace(item, until="segment"), build, progress=Progress(quiet=False))
    _keep_kernels(config, ROOT / "smollm2" / "build")
    answers = [_answer(Path(config.model), prompt) for prompt in PROMPTS]
    text = json.dumps([asdict(answer) for answer in answers], indent=1)
    (ROOT / "smollm2" / "expected.json").write_text(text)


def _keep_kernels(config: CompileConfig, path: Path) -> None:
    """Compile what codegen will want beside plans: attention, sampling, the scheduler; and, for
    `--engine auto`, every kernel."""
    from blinkc.artifacts import WeightFiles, load_segmented
    from blinkc.build_folder import BuildFolder
    from blinkc.capture.plan_capture import plan_capture
    from blinkc.codegen.compile_model import keep_cubins
    from blinkc.codegen.render_scheduler import render_scheduler
    from blinkc.engine.cuda import render_cuda_model
    from blinkc.engine.segment_engines import SegmentEngine, choose_narrowest
    from blinkc.engine.tensorrt_api import TABLE
    from blinkc.engine.tensorrt_model import engine_model
    from blinkc.engine.tensorrt_profiles import plan_ranges

    with BuildFolder(path) as build:
        segmented = load_segmented(build.stage_folder("segment"), WeightFiles(build))
    plan = plan_capture(segmented, config.capture)
    ranges = plan_ranges(plan.keys, 3)
    traits = next(traits for (engine, _), traits in TABLE.items() if engine == config.engine)
    for has_kernels in (False, True):
        engines = {}
        for number, segment in enumerate(segmented.segments):
            model = engine_model(segment, traits)
            engines[number] = SegmentEngine(
                segment=segment.name,
                plan="",
                activations=model.activations,
                weights=model.weights,
                outputs=model.outputs,
                ranges=ranges,
                choices=choose_narrowest(segment.name, ranges, plan.keys, has_kernels=has_kernels),
                has_kernels=has_kernels,
            )
        source = render_cuda_model(segmented, plan, engines).source
        keep_cubins(config.architecture, render_scheduler(plan, config.target), source, path)


def _answer(checkpoint: Path, prompt: str) -> Expected:
    import tokenizers

    from blinkc.bundle.cross_check import reference_completion

    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    tokens, margins, _ = reference_completion(checkpoint, ids, NUM_TOKENS)
    num_sure = next((n for n, margin in enumerate(margins) if margin <= TIE_STD), len(margins))
    return Expected(
        prompt=prompt,
        prompt_token_ids=tuple(ids),
        output_token_ids=tuple(tokens),
        margins=tuple(margins),
        sure_text=tokenizer.decode(tokens[:num_sure]),
    )


if __name__ == "__main__":
    source, *rest = sys.argv[1:]
    prepare(Path(source), *(rest or ("tensorrt", "sm_90")))
    print(ROOT)
