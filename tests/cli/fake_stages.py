"""Stages that write a line instead of compiling, to test the pipeline's own logic.

Run as a program (MODEL BUILD STAGE): compiles and dies by SIGKILL half-way through writing STAGE.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blinkc import pipeline, stages
from blinkc.capture.plan_capture import CaptureConfig
from blinkc.config import STAGES, CompileConfig

FUNCTIONS = {
    "read": "read_model",
    "segment": "segment_model",
    "engine": "build_engines",
    "capture": "plan_graphs",
    "codegen": "generate_code",
}


def fake_stages(die_at: str = "") -> dict[str, Callable[..., None]]:
    """Return a replacement for each stage function, by its name in blinkc.stages."""

    def make(stage: str) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            folder = next(a for a in arguments if isinstance(a, Path))
            (folder / "first.txt").write_text(f"{stage} 1\n")
            if stage == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            (folder / "sub").mkdir()
            (folder / "sub" / "second.txt").write_text(f"{stage} 2\n")

        return run

    return {function: make(stage) for stage, function in FUNCTIONS.items()}


def fake_source_digest(stage: str) -> str:
    """Stand in for the compiler's own source, which somebody may be editing during the tests."""
    return stage


def config_for(model: Path, **capture: Any) -> CompileConfig:
    """Return a config of the cpu target."""
    return CompileConfig(model=str(model), capture=CaptureConfig(**capture))


def make_model(folder: Path) -> Path:
    """Write a folder that looks like a checkpoint."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


if __name__ == "__main__":
    model, build, stage = sys.argv[1:]
    assert stage in STAGES
    for name, function in fake_stages(stage).items():
        setattr(stages, name, function)
    pipeline.source_digest = fake_source_digest
    pipeline.compile_model(config_for(Path(model)), Path(build))
