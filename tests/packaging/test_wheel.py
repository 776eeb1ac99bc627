"""The wheel serves from an empty environment, away from the checkout, and carries what it needs."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.e2e.server import DEMO_BUNDLE, ROOT, Server, run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the tools of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    result = subprocess.run([*command, "-w", folder, ROOT], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(folder.glob("*.whl"))


def test_carries_module_templates_and_headers(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(ROOT / "templates") for path in (ROOT / "templates").glob("*.jinja")
    }
    headers = {
        path.relative_to(ROOT / "runtime" / "include")
        for path in (ROOT / "runtime" / "include").rglob("*")
        if path.suffix in {".h", ".hpp", ".cuh"}
    }
    assert {f"blinkc/_resources/templates/{path}" for path in sources} <= names
    assert {f"blinkc/_resources/include/{path}" for path in headers} <= names
    assert any(name.startswith("blink_runtime/_native.") for name in names)
    assert not any(name.startswith("tests/") for name in names)


def test_serves_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Guards imports of anything that only a compiler's environment or the checkout has."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel)
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower()
    assert "torch" not in installed and "onnx" not in installed
    outside = ["env", "-C", tmp_path, tmp_path / "venv" / "bin" / "blink-runtime"]
    with Server(DEMO_BUNDLE, command=outside) as server:
        answer = server.client().chat.completions.create(
            model=server.model_name(),
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=16,
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        assert server.close() == 0
