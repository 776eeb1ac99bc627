"""The commands of the examples' READMEs run as they are written, in order.

They run in a folder of their own: what they write, such as a bundle, would replace what other tests
serve at that moment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = sorted((ROOT / "examples").glob("*/README.md"))
BLOCK = re.compile(r"^\s*```\n(.*?)^\s*```$", re.MULTILINE | re.DOTALL)


def commands(readme: Path) -> list[str]:
    """Return the lines of the code blocks without a language."""
    blocks = BLOCK.findall(readme.read_text(encoding="utf-8"))
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """What the commands take from the checkout, and a place for what they make."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".demo").mkdir()
    for model in (ROOT / ".demo").glob("*/config.json"):  # or each would be downloaded again
        (tmp_path / ".demo" / model.parent.name).symlink_to(model.parent)
    yield tmp_path
    shutil.rmtree(tmp_path / ".demo")  # half a gigabyte, which pytest would keep


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_commands_run(readme: Path, checkout: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    lines = commands(readme)
    assert len(lines) > 3
    for line in lines:
        result = subprocess.run(
            line,
            shell=True,
            cwd=checkout,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        if "ask.py" in line:
            assert "Paris" in result.stdout
