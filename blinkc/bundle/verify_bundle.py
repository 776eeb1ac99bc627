"""Checks a bundle as a server would, and more: bundle -> `VerifyReport`, or what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blinkc.bundle.external_files import find_external
from blinkc.bundle.reader import Bundle, open_bundle
from blinkc.errors import BlinkError
from blinkc.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was checked and found right."""

    num_files: int
    num_bytes: int
    num_weights: int  # that lie in files
    num_drawn_weights: int  # that the target draws when it loads: nothing to check
    golden: str  # "ran", "none" or why it was not run

    def text(self) -> str:
        """Return one line for people."""
        size = self.num_bytes / (1 << 20)
        drawn = f"{self.num_drawn_weights} more are drawn from seeds at each load; "
        return (
            f"{self.num_files} files ({size:.1f} MiB) and {self.num_weights} weights are right; "
            f"{drawn if self.num_drawn_weights else ''}golden prompt: {self.golden}"
        )


def verify_bundle(
    path: Path,
    *,
    weights_from: Sequence[Path] = (),
    golden: bool = True,
    progress: Progress,
) -> VerifyReport:
    """Check hashes, versions, machine and the golden prompt.

    Raises:
        BlinkError: the first thing that is wrong.
    """
    with open_bundle(path, check_hashes=False) as bundle:
        with progress.step("hashes", "reading every file"):
            bundle.check_hashes()
            for external in bundle.manifest.external_files:
                find_external(external, path, weights_from)
        bundle.check_machine()
        outcome = _check_golden(bundle, weights_from, progress) if golden else "not asked for"
        manifest = bundle.manifest
        num_drawn = sum(weight.is_drawn for weight in manifest.weights)
        return VerifyReport(
            num_files=len(manifest.files) + len(manifest.external_files),
            num_bytes=sum(f.bytes for f in manifest.files)
            + sum(f.bytes for f in manifest.external_files),
            num_weights=len(manifest.weights) - num_drawn,
            num_drawn_weights=num_drawn,
            golden=outcome,
        )


def _check_golden(bundle: Bundle, weights_from: Sequence[Path], progress: Progress) -> str:
    golden = bundle.manifest.golden
    if golden is None or not golden.output_token_ids:
        on_gpu = bundle.manifest.target.name != "cpu"
        return "the first load records it" if golden and on_gpu else "none in the bundle"
    if bundle.manifest.target.name != "cpu":
        return f"runs on {bundle.manifest.target.name} only"
    from blinkc.bundle.golden import run_golden

    with progress.step("golden", "running the golden prompt"):
        found = run_golden(
            bundle,
            golden.prompt_token_ids,
            len(golden.output_token_ids),
            weights_from=weights_from,
        )
    if tuple(found) != golden.output_token_ids:
        raise BlinkError(
            f"{bundle.path}: the golden prompt gives {list(found)}, the manifest says "
            f"{list(golden.output_token_ids)}",
            hint=f"do not serve it; make it again: {bundle.manifest.rebuild}",
        )
    return "gives its tokens"
