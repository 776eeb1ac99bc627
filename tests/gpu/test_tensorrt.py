"""TensorRT on a GPU, end to end: plans built from segments made elsewhere, bundled and served.

`tests/gpu/tensorrt_builds.py` makes what this needs, on a machine with the compiler.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from blink_runtime.cublaslt import load_library
from blink_runtime.cuda_bundle import load_cuda_target, read_plan
from blink_runtime.cuda_driver import Context, MappedBuffer
from blink_runtime.ring_memory import RingMemory
from blinkc import stages
from blinkc.artifacts import WeightFiles
from blinkc.build_folder import BuildFolder
from blinkc.bundle.inspect_bundle import inspect_text
from blinkc.bundle.reader import open_bundle
from blinkc.bundle.rebuild_engines import rebuild_engines
from blinkc.bundle.write_bundle import BundleConfig, write_bundle
from blinkc.config import CompileConfig
from blinkc.engine.options import EngineOptions
from blinkc.engine.tensorrt_api import PACKAGES
from blinkc.errors import BlinkError
from blinkc.pipeline import StageOutcome, compile_model
from blinkc.progress import Progress
from tests.gpu import tensorrt_builds
from tests.gpu.serving import GpuServer
from tests.gpu.tensorrt_builds import NUM_TOKENS, ROOT, engine_and_target, expected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blink_runtime.cuda_target import CudaTarget

pytestmark = [pytest.mark.gpu, pytest.mark.trt]
LOUD = Progress(quiet=False)


@pytest.fixture(scope="module")
def kind() -> tuple[str, str]:
    """The engine and the target that the builds were made for."""
    if not (ROOT / "engine.json").is_file():
        pytest.skip(f"{ROOT} is not there: python -m tests.gpu.tensorrt_builds makes it")
    engine, target = engine_and_target()
    pytest.importorskip(PACKAGES[engine])
    return engine, target


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A build finished here and its bundle."""

    config: CompileConfig
    build: Path
    bundle: Path
    outcomes: list[StageOutcome]


def finish(config: CompileConfig, folder: Path) -> Finished:
    """Finish a copy of SmolLM2's build, plans and all, and bundle it."""
    build, bundle = folder / "build", folder / "bundle"
    shutil.copytree(ROOT / "smollm2" / "build", build)
    started = time.monotonic()
    outcomes = compile_model(config, build, weights_from=[Path(config.model)], progress=LOUD)
    print(f"\ncompiled with {config.engine} in {time.monotonic() - started:.1f} s")
    write_bundle(BundleConfig(build=build, output=bundle, weights_from=[Path(config.model)]), LOUD)
    with open_bundle(bundle) as opened:
        print(inspect_text(opened))
    return Finished(config=config, build=build, bundle=bundle, outcomes=outcomes)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Context]:
    with Context() as context:
        yield context


@pytest.fixture(scope="module")
def smollm2(kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finish(tensorrt_builds.smollm2(*kind), tmp_path_factory.mktemp("smollm2"))


@contextmanager
def loaded(bundle: Path, gpu: Context, placement: str) -> Iterator[tuple[CudaTarget, RingMemory]]:
    with open_bundle(bundle) as opened:
        ring = RingMemory(read_plan(opened), lambda size: MappedBuffer(size, "the ring"))
        target = load_cuda_target(opened, gpu, ring.memory, placement=placement, say=print)
    with target:
        target.start()
        try:
            yield target, ring
        finally:
            ring.stop()
    ring.memory.close()


def answers(ring: RingMemory, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return greedy tokens of prompts that are there at once."""
    slots = range(len(prompts))
    for slot, prompt in zip(slots, prompts, strict=True):
        ring.submit(slot, list(prompt), NUM_TOKENS)
    ring.wait(slots, timeout_s=60.0)
    return [ring.tokens(slot, NUM_TOKENS) for slot in slots]


def judge_all(bundle: Path, gpu: Context, placement: str) -> list[list[int]]:
    """Serve the prompts; every token must be transformers' own, up to the first tie."""
    wanted = expected()
    with loaded(bundle, gpu, placement) as (_, ring):
        tokens = answers(ring, [item.prompt_token_ids for item in wanted])
    equal = [item.num_equal(got) for item, got in zip(wanted, tokens, strict=True)]
    print(f"{placement}: equal tokens before a tie {equal} of {NUM_TOKENS} each")
    assert equal.count(NUM_TOKENS) >= 2
    return tokens


def test_what_another_machine_made_is_taken(smollm2: Finished) -> None:
    cached = {outcome.stage: outcome.cached for outcome in smollm2.outcomes}
    assert cached["read"] and not cached["engine"]


@pytest.mark.parametrize("placement", ["chained", "persistent"])
def test_tokens_are_those_of_transformers(smollm2: Finished, gpu: Context, placement: str) -> None:
    judge_all(smollm2.bundle, gpu, placement)


def test_it_serves_over_http(smollm2: Finished) -> None:
    """The whole server, where its native module is built for this Python."""
    pytest.importorskip("blink_runtime._native")
    with GpuServer(smollm2.bundle, "--drain", "0") as server:
        for item in expected():
            answer = server.complete(item.prompt, NUM_TOKENS)
            assert answer["usage"]["prompt_tokens"] == len(item.prompt_token_ids)
            assert answer["choices"][0]["text"].startswith(item.sure_text)


def test_every_graph_can_be_launched_by_the_gpu(smollm2: Finished, gpu: Context) -> None:
    """Loading instantiates for device launch, which refuses other nodes; every key runs plans."""
    with loaded(smollm2.bundle, gpu, "chained") as (target, _):
        assert target.engines is not None
        num_keys = len(target.plan.keys)
        assert target.report.num_graphs == len(target.execs) == num_keys
        for number in range(len(target.engines.engines)):
            assert all(target.engines.choice(number, key) >= 0 for key in range(num_keys))
        print(target.report, f"scratch {target.engines.scratch_bytes >> 20} MiB")


def test_segments_agree_with_onnxruntime(smollm2: Finished) -> None:
    """`blinkc compile --check`: squares of large activations too."""
    for name in ("onnxruntime", "polygraphy", "ml_dtypes"):
        pytest.importorskip(name)
    with BuildFolder(smollm2.build) as build:
        files = WeightFiles(build, [Path(smollm2.config.model)])
        stages.check_segments(smollm2.config, build, files)


def test_a_rebuilt_bundle_gives_the_same_tokens(
    smollm2: Finished, gpu: Context, tmp_path: Path
) -> None:
    """`blinkc rebuild` on the GPU it is for; ties may fall otherwise."""
    bundle = tmp_path / "bundle"
    shutil.copytree(smollm2.bundle, bundle)
    print(rebuild_engines(bundle, EngineOptions(), LOUD))
    judge_all(bundle, gpu, "chained")


def test_auto_mixes_plans_and_kernels_as_measured(
    kind: tuple[str, str], gpu: Context, tmp_path: Path
) -> None:
    engine, target = kind
    if engine != "tensorrt":
        pytest.skip("--engine auto measures TensorRT, not RTX")
    try:
        load_library()
    except BlinkError as error:
        pytest.skip(error.message)
    made = finish(replace(tensorrt_builds.smollm2(engine, target), engine="auto"), tmp_path)
    with open_bundle(made.bundle) as opened:
        entries = opened.manifest.target.engines
    assert entries and all(entry.timings_us for entry in entries)
    judge_all(made.bundle, gpu, "chained")


@pytest.mark.parametrize(("num_profiles", "most_bytes"), [(1, 5_000_000), (5, 20_000_000)])
def test_plans_of_an_8b_shape(
    num_profiles: int, most_bytes: int, kind: tuple[str, str], tmp_path: Path
) -> None:
    config = tensorrt_builds.llama_8b(*kind, num_profiles)
    shutil.copytree(ROOT / "llama8b" / "build", tmp_path / "build")
    started = time.monotonic()
    compile_model(replace(config, until="engine"), tmp_path / "build", progress=LOUD)
    seconds = time.monotonic() - started
    facts: dict[str, Any] = json.loads((tmp_path / "build/engine/engines.json").read_text())
    plans = facts["tensorrt"]["plans"]
    sizes = [(tmp_path / "build" / "engine" / plan["plan"]).stat().st_size for plan in plans]
    print(
        f"\n8B, {num_profiles} profiles, {facts['tensorrt']['title']}: {len(plans)} plans, "
        f"{sum(sizes) / 1e6:.2f} MB, {seconds:.1f} s: "
        + ", ".join(f"{p['segment']} {p['seconds']} s level {p['level']}" for p in plans)
    )
    assert len(plans) == 3 and sum(sizes) < most_bytes
