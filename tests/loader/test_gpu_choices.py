"""What the GPU loader decides before anything is loaded, with a GPU that is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blink_runtime import cuda_bundle
from blinkc.bundle.manifest import MANIFEST_NAME, manifest_to_bytes
from blinkc.bundle.reader import open_bundle
from blinkc.errors import BlinkError
from tests.bundle.small_bundle import write_small_bundle


class FakeModule:
    """A module with the self-test's kernels."""

    num_open = 0

    def __init__(self, image: bytes, name: str) -> None:
        FakeModule.num_open += 1

    def close(self) -> None:
        FakeModule.num_open -= 1


@pytest.mark.parametrize("asked", ["chained", "persistent", "auto"])
def test_a_gpu_that_does_not_launch_takes_the_host_placement(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against zeros in silence: the notice names the failure, whatever was remembered."""

    def fails(module: FakeModule) -> None:
        raise BlinkError("device launch wrote nothing")

    monkeypatch.setattr(cuda_bundle, "Module", FakeModule)
    monkeypatch.setattr(cuda_bundle, "check_launches", fails)
    said: list[str] = []
    files: Any = SimpleNamespace(scheduler=b"")
    cache: Any = SimpleNamespace(placement=lambda: "chained", update=lambda **_: None)
    nothing: Any = None
    chosen = cuda_bundle.choose_placement(asked, files, nothing, nothing, cache, said.append)
    assert chosen == "host"
    assert len(said) == 1
    assert "notice" in said[0] and "device launch wrote nothing" in said[0]
    assert FakeModule.num_open == 0
    # The same GPU with a working launch: what was asked for, and nothing said.
    monkeypatch.setattr(cuda_bundle, "check_launches", lambda module: None)
    chosen = cuda_bundle.choose_placement(asked, files, nothing, nothing, cache, said.append)
    assert chosen == ("chained" if asked == "auto" else asked)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("capability", "driver", "words"),
    [((9, 0), 13000, r"sm_80.*9\.0"), ((8, 0), 12080, r"13\.0 or later.*12\.8")],
)
def test_another_gpu_or_driver_is_refused_before_anything_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    driver: int,
    words: str,
) -> None:
    folder = tmp_path / "bundle"
    manifest = write_small_bundle(folder)
    target = manifest.target.model_copy(
        update={"architecture": "sm_80", "requires": {"cuda driver": "13.0"}}
    )
    changed = manifest.model_copy(update={"target": target})
    (folder / MANIFEST_NAME).write_bytes(manifest_to_bytes(changed))
    loaded: list[str] = []
    for name in ("open_cache", "read_files", "read_plan", "choose_placement", "CudaTarget"):
        monkeypatch.setattr(cuda_bundle, name, lambda *_, name=name, **__: loaded.append(name))
    spec = SimpleNamespace(compute_capability=capability, driver_version=driver, name="a GPU")
    context: Any = SimpleNamespace(spec=spec)
    ring: Any = SimpleNamespace(address=0, num_bytes=0)
    with open_bundle(folder) as bundle, pytest.raises(BlinkError, match=words) as caught:
        cuda_bundle.load_cuda_target(bundle, context, ring)
    assert loaded == []
    assert caught.value.hint
