"""A bundle for a GPU -> a running `CudaTarget` over a ring in pinned host memory (transport
`mapped`)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from blink_runtime.cuda_driver import Context, MappedBuffer, check, driver
from blink_runtime.cuda_target import CudaFiles, CudaTarget
from blinkc.capture.plan import CapturePlan, plan_from_json
from blinkc.engine.tensorrt_api import load_tensorrt
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    names = [entry["plan"] for entry in launches.get("engines", ())]
    return CudaFiles(
        kernels=bundle.read_bytes(target.cubins[f"kernels{suffix}"]),
        scheduler=bundle.read_bytes(target.cubins[f"scheduler{suffix}"]),
        launches=launches,
        algorithms=algorithms,
        plans={name: bundle.read_bytes(f"{_CODE}{name}") for name in names},
        tensorrt=load_tensorrt(target.engines[0].engine) if names else None,
    )


def check_plans(bundle: Bundle, context: Context) -> None:
    """Refuse plans that were built for another TensorRT, GPU or driver, before any is loaded.

    Raises:
        BlinkError: names both sides and the command that builds the plans again.
    """
    from blink_runtime.tensorrt_engines import found_builds

    wanted = bundle.manifest.target.builds
    if wanted:
        bundle.check_builds(found_builds(wanted, context.spec.compute_capability))


class AlgorithmCache:
    """Measured cuBLASLt algorithms on disk, one file for each GPU, library version and bundle."""

    def __init__(self, bundle: Bundle, gpu_name: str, version: int) -> None:
        root = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            / "blink"
            / "algorithms"
        )
        name = "".join(c if c.isalnum() else "-" for c in f"{gpu_name}-{version}")
        digest = next(
            (f.sha256[:16] for f in bundle.manifest.files if f.path == f"{_CODE}launches.json"),
            "none",
        )
        self._path = root / f"{name}-{digest}.json"

    def read(self) -> dict[str, list[int]]:
        """Return what is known; nothing where the file is missing or damaged."""
        try:
            return {
                str(k): list(map(int, v)) for k, v in json.loads(self._path.read_text()).items()
            }
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def write(self, algorithms: dict[str, list[int]]) -> None:
        """Remember; a folder that cannot be written costs the next start a few seconds, no more."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(algorithms))
            part.replace(self._path)
        except OSError:
            return


def load_cuda_target(
    bundle: Bundle,
    context: Context,
    ring: MappedBuffer,
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
    from blink_runtime.cublaslt import library_version

    architecture = bundle.check_gpu(*context.spec.compute_capability)
    check_plans(bundle, context)
    cache = AlgorithmCache(bundle, context.spec.name, library_version())

    def fill(target: CudaTarget) -> None:
        started, done = time.monotonic(), 0
        with bundle.weights(search=weights_from) as weights:
            pairs = zip(bundle.manifest.weights, weights.addresses, strict=True)
            for number, (entry, address) in enumerate(pairs):
                check(
                    driver().cuMemcpyHtoD(
                        target.addresses.weights[number], address, entry.num_bytes
                    ),
                    f"copying weight {entry.name}",
                )
                done += entry.num_bytes
        seconds = max(time.monotonic() - started, 1e-9)
        say(f"weights: {done / 1e9:.2f} GB in {seconds:.1f} s, {done / 1e6 / seconds:.0f} MB/s")

    target = CudaTarget(
        files=read_files(bundle, cache.read(), architecture),
        plan=read_plan(bundle),
        ring_address=ring.address,
        ring_bytes=ring.num_bytes,
        fill_weights=fill,
        placement=placement,
        context=context,
        progress=say,
    )
    cache.write(target.products.algorithms)
    report = target.report
    say(
        f"{report.num_graphs} graphs of {report.num_nodes // max(report.num_graphs, 1)} nodes in "
        f"{report.graphs_s:.1f} s, {report.graph_bytes >> 20} MiB; "
        f"{report.num_measured} products measured in {report.tune_s:.1f} s"
    )
    return target
