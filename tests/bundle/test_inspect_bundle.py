"""What is said of a bundle: weights that no file holds, golden tokens that are not known yet."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from blinkc.bundle.inspect_bundle import inspect_text
from blinkc.bundle.manifest import (
    MANIFEST_NAME,
    Golden,
    Manifest,
    Target,
    WeightEntry,
    manifest_to_bytes,
)
from blinkc.bundle.reader import open_bundle
from blinkc.bundle.verify_bundle import verify_bundle
from blinkc.progress import Progress
from tests.bundle.small_bundle import write_small_bundle

QUIET = Progress(quiet=True)
SM_90 = Target(name="sm_90", architecture="sm_90a", machine=platform.machine(), engine="cuda")


def rewrite(folder: Path, manifest: Manifest, **changes: object) -> None:
    changed = Manifest.model_validate({**dict(manifest), **changes})
    (folder / MANIFEST_NAME).write_bytes(manifest_to_bytes(changed))


def inspected(folder: Path) -> dict[str, str]:
    with open_bundle(folder) as bundle:
        lines = inspect_text(bundle).splitlines()
    return {line[:10].strip(): line[11:] for line in lines}


def drawn(number: int) -> WeightEntry:
    return WeightEntry(name=f"drawn.{number}", shape=(4, 4), dtype="bf16", seed=number)


def test_weights_in_files_are_embedded_and_checked(tmp_path: Path) -> None:
    write_small_bundle(tmp_path / "b")
    assert inspected(tmp_path / "b")["weights"] == "3 tensors, embedded"
    text = verify_bundle(tmp_path / "b", progress=QUIET).text()
    assert "3 weights are right; golden prompt" in text


@pytest.mark.parametrize(
    ("num_kept", "text", "verdict"),
    [
        (3, "5 tensors, 2 drawn from seeds at each load, 3 embedded", "3 weights are right; 2 m"),
        (0, "2 tensors, 2 drawn from seeds at each load", "0 weights are right; 2 m"),
    ],
)
def test_drawn_weights_are_neither_embedded_nor_right(
    num_kept: int, text: str, verdict: str, tmp_path: Path
) -> None:
    """The bug: of a bundle of 1 MiB `inspect` said that all weights were embedded, and `verify`
    that all were right."""
    manifest = write_small_bundle(tmp_path / "b")
    weights = (*manifest.weights[:num_kept], drawn(1), drawn(2))
    rewrite(tmp_path / "b", manifest, target=SM_90, weights=weights)
    assert inspected(tmp_path / "b")["weights"] == text
    report = verify_bundle(tmp_path / "b", progress=QUIET)
    assert verdict in report.text()
    assert (report.num_weights, report.num_drawn_weights) == (num_kept, 2)


@pytest.mark.parametrize(
    ("target", "output", "text", "verdict"),
    [
        (SM_90, (), "2 -> what the first load gives", "the first load records it"),
        (SM_90, (5, 6, 7), "2 -> 3 tokens", "runs on sm_90 only"),
        (None, (), "none", "none in the bundle"),
    ],
)
def test_golden_tokens_that_are_not_known_yet(
    target: Target | None, output: tuple[int, ...], text: str, verdict: str, tmp_path: Path
) -> None:
    """The bug: they were "8 -> 0 tokens"."""
    manifest = write_small_bundle(tmp_path / "b")
    golden = Golden(prompt_token_ids=(1, 2), output_token_ids=output, made_by="")
    rewrite(tmp_path / "b", manifest, target=target or manifest.target, golden=golden)
    assert inspected(tmp_path / "b")["golden"] == text
    assert verify_bundle(tmp_path / "b", progress=QUIET).golden == verdict
