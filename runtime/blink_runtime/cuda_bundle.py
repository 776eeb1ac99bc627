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
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blinkc.bundle.reader import Bundle

_CODE = "code/"


def read_plan(bundle: Bundle) -> CapturePlan:
    """Return the bundle's capture plan."""
    return plan_from_json(json.loads(bundle.read_bytes(bundle.manifest.plan.plan)))


def read_files(bundle: Bundle, algorithms: dict[str, list[int]]) -> CudaFiles:
    """Return the compiled files of a bundle.

    Raises:
        BlinkError: a file is missing.
    """
    cubins = bundle.manifest.target.cubins
    for name in ("kernels", "scheduler"):
        if name not in cubins:
            raise BlinkError(
                f"{bundle.path} holds no {name} for the GPU", hint=bundle.manifest.rebuild
            )
    return CudaFiles(
        kernels=bundle.read_bytes(cubins["kernels"]),
        scheduler=bundle.read_bytes(cubins["scheduler"]),
        launches=json.loads(bundle.read_bytes(f"{_CODE}launches.json")),
        algorithms=algorithms,
    )


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

    bundle.check_gpu(*context.spec.compute_capability)
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
        files=read_files(bundle, cache.read()),
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
