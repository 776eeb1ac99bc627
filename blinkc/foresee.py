"""What a compile will want at its end, looked for at its beginning: config, BUILD -> an error?

Reading a model takes minutes; a compiler that is missing after them could be missed before.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from blinkc.build_folder import BuildFolder
from blinkc.config import STAGES, CompileConfig
from blinkc.engine.tensorrt_api import PACKAGES
from blinkc.errors import BlinkError


def check_needs(config: CompileConfig, build: BuildFolder) -> None:
    """Look for the tools of the stages that BUILD does not have yet, of which another machine may
    have made some, and for what `--check` and `--debug-dir` want.

    Raises:
        BlinkError: one of them is missing, or `--check` asks for what the engine does not.
    """
    last = STAGES.index(config.until)
    missing = {stage for stage in STAGES[: last + 1] if build.record(stage) is None}
    if config.debug_dir is not None:
        config.debug_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(config.debug_dir, os.W_OK | os.X_OK):
            raise BlinkError(f"--debug-dir {config.debug_dir} cannot be written")
    if "engine" in missing and config.engine in PACKAGES:
        from blinkc.engine.build_engines import tensorrt_of

        tensorrt_of(config)
    if config.check:
        _check_comparison(config, is_made="engine" not in missing)
    if "codegen" in missing and config.on_gpu:
        from blinkc.codegen.compile_cuda import check_tools

        check_tools()
    elif "codegen" in missing:
        from blinkc.codegen.compile_cpu import find_compiler

        find_compiler()


def _check_comparison(config: CompileConfig, *, is_made: bool) -> None:
    if STAGES.index(config.until) < STAGES.index("engine"):
        raise BlinkError(
            f"--check compares engines, which --until {config.until} does not make",
            hint="--until engine",
        )
    if config.on_gpu and not is_made:
        from blinkc.engine.build_engines import tensorrt_of

        if tensorrt_of(config) is None:
            raise check_refusal(config.resolved_engine)
    for name in ("onnxruntime", "polygraphy"):
        if find_spec(name) is None:
            raise BlinkError(f"--check wants {name}", hint=f"pip install {name}")


def check_refusal(engine: str) -> BlinkError:
    """Return what to say where an engine cannot be compared."""
    return BlinkError(
        f"--check runs segments one by one, which engine {engine} does not",
        hint="check the same model with --target cpu",
    )
