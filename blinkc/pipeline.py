"""The compiler's stages in order: model -> segments -> engines -> capture plan -> code, in BUILD.

A stage runs again only when what it follows from has changed: its options, the artifact before it,
the tools it uses, or the compiler's own source.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from blinkc import stages
from blinkc.artifacts import WeightFiles
from blinkc.build_folder import FORMAT_VERSION, BuildFolder, StageRecord, digest_of
from blinkc.command_text import COMMAND_NAME, compile_command
from blinkc.config import STAGES, CompileConfig
from blinkc.foresee import check_needs
from blinkc.model_source import find_model
from blinkc.progress import Progress
from blinkc.provenance import source_digest
from blinkc.stage_cache import default_cache


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOutcome:
    """What became of a stage: `cached` means that its artifact was current."""

    stage: str
    cached: bool
    digest: str


def compile_model(
    config: CompileConfig,
    build_path: Path,
    *,
    weights_from: Iterable[Path] = (),
    progress: Progress | None = None,
) -> list[StageOutcome]:
    """Run the stages up to `config.until`, each at most once for the same inputs.

    Raises:
        BlinkError: a stage cannot go on and says what it needs. Stages before it are kept.
    """
    progress = progress or Progress(quiet=True)
    find_model(config.model)  # one that is not there leaves no folder behind
    with BuildFolder(build_path) as build:
        check_needs(config, build)
        build.write_json(COMMAND_NAME, {"compile": compile_command(config)})
        run = _Run(config, build, WeightFiles(build, weights_from), progress)
        run.stage(
            "read",
            "reading the model",
            options=stages.read_options(config, run.files),
            make=lambda folder: stages.read_model(config, build, folder, run.files, progress),
        )
        run.stage(
            "segment",
            "cutting it into segments",
            options=stages.segment_options(config),
            make=lambda folder: stages.segment_model(config, build, folder, run.files),
        )
        run.stage(
            "engine",
            f"building {config.resolved_engine} engines",
            options=stages.engine_options(config),
            make=lambda folder: stages.build_engines(config, build, folder, run.files, progress),
        )
        run.stage(
            "capture",
            "planning graphs and memory",
            options=stages.capture_options(config),
            make=lambda folder: stages.plan_graphs(config, build, folder, run.files),
        )
        run.stage(
            "codegen",
            f"rendering and compiling for {config.architecture or 'cpu'}",
            options=stages.codegen_options(config),
            make=lambda folder: stages.generate_code(config, build, folder, run.files, progress),
        )
        if config.check:
            with progress.step("check", "comparing segments with onnxruntime"):
                stages.check_segments(config, build, run.files)
        return run.outcomes


class _Run:
    """One pass over the stages; knows whether `--until` has been reached."""

    def __init__(
        self, config: CompileConfig, build: BuildFolder, files: WeightFiles, progress: Progress
    ) -> None:
        self.files = files
        self.outcomes: list[StageOutcome] = []
        self._config = config
        self._build = build
        self._progress = progress
        self._previous = ""
        self._cache = default_cache()

    def stage(self, name: str, text: str, *, options: object, make: Callable[[Path], None]) -> None:
        """Run a stage unless its artifact is current or it lies past `--until`."""
        number = STAGES.index(name)
        if number > STAGES.index(self._config.until):
            return
        record = self._build.record(name)
        # Where a tool is missing the stage cannot run: what another machine made of other versions
        # stays.
        made_with, tools = record.tools if record else {}, stages.stage_tools(name, self._config)
        if set(made_with) - set(tools):
            tools = made_with
        # Of all stages before it: code is made from segments as well as from the plan, and a plan
        # may be the same for two models.
        earlier = [outcome.digest for outcome in self.outcomes]
        inputs = digest_of(FORMAT_VERSION, name, options, source_digest(name), earlier, tools)
        cached = record is not None and record.inputs_digest == inputs
        if not cached:
            record = self._fetch(name, inputs)
            cached = record is not None
        if cached:
            self._progress.note(f"{name:<8} unchanged")
        else:
            with (
                self._progress.step(name, text),
                self._build.write_stage(
                    name, inputs_digest=inputs, follows=self._previous, tools=tools
                ) as folder,
            ):
                make(folder)
            record = self._build.record(name)
            self._cache.store(inputs, self._build.stage_folder(name))
        assert record is not None, "a stage that was just written has a record"
        self._previous = record.outputs_digest
        self.outcomes.append(StageOutcome(stage=name, cached=cached, digest=record.outputs_digest))
        if self._config.debug_dir is not None:
            place = self._config.debug_dir / f"{number + 1}_{name}"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(self._build.stage_folder(name), place)

    def _fetch(self, name: str, inputs: str) -> StageRecord | None:
        """Take a stage from the user's cache; None when it is not there, or of no use here."""
        folder = self._build.stage_folder(name)
        if not self._cache.fetch(inputs, folder):
            return None
        record = self._build.record(name)
        is_right = record is not None and record.inputs_digest == inputs
        if is_right and self.files.knows_all_of(folder):
            return record
        self._cache.forget(inputs)
        return None
