"""Progress: plain lines where nobody watches, one live line on a terminal, nothing when quiet."""

from __future__ import annotations

import io
import re

import pytest

from blinkc.progress import Progress


def report(progress: Progress) -> None:
    with progress.step("read", "reading [the] model"):
        progress.update("layer 3")
        progress.note("a note [that] stays")


def test_plain_lines_have_no_control_characters() -> None:
    out = io.StringIO()
    report(Progress(out=out))
    lines = out.getvalue().splitlines()
    assert lines[0] == "read     reading [the] model ..."
    assert lines[1] == "a note [that] stays"
    assert re.fullmatch(r"read     reading \[the\] model: \d+\.\d s", lines[2])
    assert "\x1b" not in out.getvalue()


def test_live_line_keeps_notes_and_the_last_word() -> None:
    pytest.importorskip("rich")
    out = io.StringIO()
    report(Progress(out=out, live=True))
    assert "\x1b[" in out.getvalue()
    assert "a note [that] stays" in out.getvalue()
    assert "reading [the] model: " in out.getvalue()


def test_quiet_says_nothing() -> None:
    out = io.StringIO()
    report(Progress(quiet=True, out=out))
    assert out.getvalue() == ""


def test_step_that_fails_says_no_time() -> None:
    out = io.StringIO()
    with pytest.raises(ValueError), Progress(out=out).step("read", "reading"):
        raise ValueError
    assert out.getvalue() == "read     reading ...\n"
