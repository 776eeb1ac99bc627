"""A bundle for a GPU -> a `CudaTarget` over a ring in memory that the GPU addresses."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from blink_runtime.cuda_driver import Context, MappedBuffer, Module
from blink_runtime.cuda_target import PLACEMENTS, CudaFiles, CudaTarget, fill_random
from blink_runtime.device_launch import check_launches
from blink_runtime.load_cache import LoadCache
from blink_runtime.weight_upload import WeightUpload
from blinkc.capture.plan import CapturePlan, plan_from_json
from blinkc.engine.tensorrt_api import PACKAGES, load_tensorrt
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from blink_runtime.gpu_memory_ring import GpuMemoryRing
    from blink_runtime.gpu_ring import GpuRing
    from blinkc.bundle.reader import Bundle

_CODE = "code/"


def read_plan(bundle: Bundle) -> CapturePlan:
    """Return the bundle's capture plan."""
    return plan_from_json(json.loads(bundle.read_bytes(bundle.manifest.plan.plan)))


def read_files(
    bundle: Bundle, algorithms: dict[str, list[int]], architecture: str = ""
) -> CudaFiles:
    """Return the compiled files of a bundle.

    Args:
        architecture: the one to take of a bundle for several.

    Raises:
        BlinkError: a file is missing, or the plans' TensorRT is.
    """
    target = bundle.manifest.target
    suffix = f".{architecture}" if "," in target.architecture else ""
    for name in (f"kernels{suffix}", f"scheduler{suffix}"):
        if name not in target.cubins:
            raise BlinkError(
                f"{bundle.path} holds no {name} for the GPU", hint=bundle.manifest.rebuild
            )
    launches = json.loads(bundle.read_bytes(f"{_CODE}launches.json"))
    # By segment: `blinkc rebuild` gives plans new names in the manifest alone.
    plans = {entry.segment: entry.plan for entry in target.engines}
    names = {e["plan"]: plans[e["segment"]] for e in launches.get("engines", ())}
    return CudaFiles(
        kernels=bundle.read_bytes(target.cubins[f"kernels{suffix}"]),
        scheduler=bundle.read_bytes(target.cubins[f"scheduler{suffix}"]),
        launches=launches,
        algorithms=algorithms,
        plans={name: bundle.read_bytes(place) for name, place in names.items()},
        tensorrt=load_tensorrt(target.engines[0].engine) if names else None,
    )


def check_versions(bundle: Bundle, context: Context) -> None:
    """Refuse a driver that is too old, and plans that were built for another TensorRT, GPU or
    driver, before anything is loaded.

    Raises:
        BlinkError: names both sides and what to do.
    """
    version = context.spec.driver_version
    found = {"cuda driver": f"{version // 1000}.{version % 1000 // 10}"}
    wanted = bundle.manifest.target.builds
    if wanted:
        from blink_runtime.tensorrt_engines import found_builds

        found |= found_builds(wanted, context.spec.compute_capability)
    bundle.check_builds(found)


def open_cache(bundle: Bundle, context: Context) -> LoadCache:
    """Open what this machine has learned of the bundle."""
    from blink_runtime.cublaslt import library_version

    spec = context.spec
    has_products = bundle.manifest.target.engine not in PACKAGES  # else plans do them
    version = library_version() if has_products else 0
    return LoadCache(bundle.manifest, spec.name, spec.driver_version, version)


def choose_placement(
    asked: str, files: CudaFiles, plan: CapturePlan, context: Context, cache: LoadCache,
    say: Callable[[str], None],
) -> str:  # fmt: skip
    """Return the placement to take: what was asked for, or `host` where the GPU cannot launch.

    `auto` is what was fastest when it was first asked for on this machine.
    """
    if asked == "host":
        return asked
    if not _can_launch(files.scheduler, say):
        return "host"
    if asked != "auto":
        return asked
    chosen = cache.placement()
    if chosen not in PLACEMENTS:
        from blink_runtime.choose_scheduler import choose_scheduler

        chosen = choose_scheduler(files, plan, context, say)
        cache.update(placement=chosen)
    return chosen


def _can_launch(scheduler: bytes, say: Callable[[str], None]) -> bool:
    """Run the self-test, whose kernels the scheduler's cubin holds; say so where it fails."""
    module = Module(scheduler, "the launch self-test")
    try:
        check_launches(module)
    except BlinkError as error:
        say(
            f"notice: this GPU does not launch graphs by itself ({error.message}); "
            "taking the host placement: slower, and it needs a host core"
        )
        return False
    finally:
        module.close()
    return True


def load_cuda_target(
    bundle: Bundle,
    context: Context,
    ring: MappedBuffer | GpuRing | GpuMemoryRing,
    *,
    placement: str = "chained",
    weights_from: Sequence[Path] = (),
    say: Callable[[str], None] = lambda text: None,
) -> CudaTarget:
    """Load a bundle and bring its scheduler up to just before its start.

    Args:
        ring: the ring, laid out and with its header written.

    Raises:
        BlinkError: the GPU is not the bundle's, or something does not fit.
    """
    architecture = bundle.check_gpu(*context.spec.compute_capability)
    check_versions(bundle, context)
    cache = open_cache(bundle, context)
    files = read_files(bundle, cache.algorithms(), architecture)
    plan = read_plan(bundle)
    target = CudaTarget(
        files=files,
        plan=plan,
        ring_address=ring.address,
        ring_bytes=ring.num_bytes,
        fill_weights=partial(fill_weights, bundle, weights_from, say),
        placement=choose_placement(placement, files, plan, context, cache, say),
        context=context,
        progress=say,
    )
    cache.update(algorithms=target.products.algorithms if target.products else {})
    report = target.report
    say(
        f"{report.num_graphs} graphs of {report.num_nodes // max(report.num_graphs, 1)} nodes in "
        f"{report.graphs_s:.1f} s, {report.graph_bytes >> 20} MiB; "
        f"{report.num_measured} products measured in {report.tune_s:.1f} s"
    )
    return target


def fill_weights(
    bundle: Bundle, weights_from: Sequence[Path], say: Callable[[str], None], target: CudaTarget
) -> None:
    """Upload the weights that lie in files, draw the others.

    Referenced files are compared by size here; whoever serves compares their content beside.
    """
    weights = bundle.manifest.weights
    spans = bundle.weight_spans(search=weights_from, check_content=False)
    WeightUpload(target.context, weights, spans, target.addresses.weights, say).run()
    drawn = [number for number, weight in enumerate(weights) if weight.seed is not None]
    for number in drawn:
        entry, seed = target.launches["weights"][number], weights[number].seed
        assert seed is not None
        fill_random(target, number, entry, seed)
    if drawn:
        say(f"{len(drawn)} weights drawn at random on the GPU")
