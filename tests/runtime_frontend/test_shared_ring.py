"""Rings of living servers are found; what a dead one left is told from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from blink_runtime.top import run_top
from blinkc.errors import BlinkError

_native = pytest.importorskip("blink_runtime._native", reason="the native module is not built")

from blink_runtime import shared_ring  # noqa: E402
from blink_runtime.cli import main  # noqa: E402
from blink_runtime.shared_ring import (  # noqa: E402
    SHARED_MEMORY,
    UnseenRing,
    create_ring,
    has_living_maker,
    open_ring,
)

from .fake_server import ring_sizes  # noqa: E402

NAME = f"/test-shared-ring-{os.getpid()}"  # of a family that no server's start clears
DIE_WITH_A_RING = """
import os, signal, sys
from blink_runtime import _native
sizes = _native.RingSizes(num_slots=1, max_prompt_tokens=1, max_output_tokens=1, max_seqlen=2,
                          max_batch=1, vocab_size=2, page_size_tokens=1, num_kv_pages=2)
ring = _native.Ring.create(sys.argv[1], sizes)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_living_ring_is_opened() -> None:
    ring = create_ring(NAME, ring_sizes())
    assert has_living_maker(SHARED_MEMORY / NAME.lstrip("/"))
    assert open_ring(ring.name)[1] == NAME


def test_what_a_dead_server_left_is_no_ring_to_watch() -> None:
    """The bug: `top` and `trace` took it for one of several servers, or showed it as if it ran."""
    path = SHARED_MEMORY / NAME.lstrip("/")
    subprocess.run([sys.executable, "-c", DIE_WITH_A_RING, NAME], check=False, timeout=60)
    try:
        assert path.exists()
        assert not has_living_maker(path)
        done = CliRunner().invoke(main, ["top", "--once", "--ring", NAME])
        assert done.exit_code == 1
        assert "from a server that died" in done.output
    finally:
        path.unlink(missing_ok=True)


def test_a_view_into_a_pipe_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """The bug: without a terminal it was redrawn for ever."""
    ring = create_ring(NAME, ring_sizes())
    run_top(ring.name, once=False, interval_s=0.01)
    assert capsys.readouterr().out.count(f"ring {NAME}") == 1


def test_the_ring_of_another_user_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `top` from saying that no server is running here."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)
    assert has_living_maker(SHARED_MEMORY / "blink-1")


def test_a_ring_that_cannot_be_made_is_an_error_in_words() -> None:
    """The bug: a traceback of the native module's own error."""
    ring = create_ring(NAME, ring_sizes())
    with pytest.raises(BlinkError, match="cannot create"):
        create_ring(ring.name, ring_sizes())
    with pytest.raises(BlinkError, match="max_batch is 0"):
        create_ring(NAME, ring_sizes(max_batch=0))


@pytest.mark.parametrize("command", ["top", "trace"])
def test_a_ring_that_nobody_can_look_into_is_told(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: `top` and `trace` said that no server was running, beside a ring in GPU memory."""
    monkeypatch.setattr(shared_ring, "SHARED_MEMORY", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unseen-blink-1").write_text("of a server that was killed")
    with UnseenRing("it lies elsewhere"):
        done = CliRunner().invoke(main, [command])
        assert done.exit_code == 1
        assert f"process {os.getpid()} cannot be looked into: it lies elsewhere" in done.output
    assert "no server is running here" in CliRunner().invoke(main, [command]).output
    assert list(tmp_path.iterdir()) == []


def test_a_server_needs_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a server where shared memory may not be written."""
    monkeypatch.setattr(shared_ring, "SHARED_MEMORY", tmp_path / "missing")
    UnseenRing("it lies elsewhere").close()
