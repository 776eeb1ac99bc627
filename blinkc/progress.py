"""Says what the compiler does, on stderr: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Progress:
    """Reports steps. `quiet` says nothing; `live` redraws one line (needs rich and a terminal)."""

    def __init__(
        self, *, quiet: bool = False, live: bool | None = None, out: TextIO | None = None
    ) -> None:
        self._quiet = quiet
        self._out = out or sys.stderr
        self._console = None if quiet else _console(self._out, live)
        self._status: Any = None
        self._step = ""

    @contextmanager
    def step(self, name: str, text: str) -> Iterator[None]:
        """Report a step while it runs, and its time when it is done."""
        start = time.monotonic()
        self._step = f"{name:<8} {text}"
        if self._console is not None:
            with self._console.status(_literal(self._step)) as status:
                self._status = status
                try:
                    yield
                finally:
                    self._status = None
        else:
            self._line(f"{self._step} ...")
            yield
        self._line(f"{name:<8} {text}: {time.monotonic() - start:.1f} s")

    def update(self, text: str) -> None:
        """Say more about the step that runs; shown on terminals only."""
        if self._status is not None:
            self._status.update(_literal(f"{self._step}: {text}"))

    def note(self, text: str) -> None:
        """Say something that stays."""
        self._line(text)

    def _line(self, text: str) -> None:
        if self._quiet:
            return
        if self._console is not None:  # it moves a live line out of the way
            self._console.print(text, markup=False)
        else:
            print(text, file=self._out, flush=True)


def _literal(text: str) -> Any:
    """Return text that rich shows as it is, brackets included."""
    from rich.text import Text

    return Text(text)


def _console(out: TextIO, live: bool | None) -> Any:
    """Return a rich console where a live line makes sense, else None."""
    forced = bool(live)
    if live is None:
        live = out.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
    if not live:
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=out, highlight=False, soft_wrap=True, force_terminal=forced or None)
