"""What a killed run was writing is removed by the next one, and nothing else is."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blinkc.staging import staging_folder

DIE_HALF_WAY = """
import os, signal, sys
from pathlib import Path
from blinkc.staging import staging_folder
with staging_folder(Path(sys.argv[1])) as staging:
    (staging / "weights").write_bytes(b"many gigabytes")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_killed_runs_go(tmp_path: Path) -> None:
    """The bug: each killed `blinkc bundle` left a copy of the weights beside its output."""
    output = tmp_path / "b"
    done = subprocess.run([sys.executable, "-c", DIE_HALF_WAY, str(output)], check=False)
    assert done.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    (tmp_path / ".b-mine").mkdir()
    (tmp_path / leftover.name.replace(".b.", ".b2.")).mkdir()
    kept = {path for path in tmp_path.iterdir() if path != leftover}
    with staging_folder(output) as staging:
        assert set(tmp_path.iterdir()) == {*kept, staging}
    assert set(tmp_path.iterdir()) == kept


def test_a_run_that_goes_on_keeps_its_own(tmp_path: Path) -> None:
    with staging_folder(tmp_path / "b") as first, staging_folder(tmp_path / "b") as second:
        assert first != second
        assert first.is_dir()


def test_write_without_a_name_names_the_output(tmp_path: Path) -> None:
    # Guards: "No space left on device" alone leaves open of two places which one is full.
    with pytest.raises(OSError, match="No space") as full, staging_folder(tmp_path / "b"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.filename == str(tmp_path / "b")
    assert not list(tmp_path.iterdir())
