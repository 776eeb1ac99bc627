"""The command lines' outermost group: errors that a user can fix -> one message, no traceback."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from blinkc.errors import BlinkError, InternalError
from blinkc.signals import EndedBySignal, signals_raise

EXIT_USER_ERROR = 1
EXIT_INTERNAL_ERROR = 70  # EX_SOFTWARE


class CommandGroup(click.Group):
    """Shows errors without traceback, after the program's name, and sets the exit code.

    Args:
        program: the name that errors begin with.
    """

    def __init__(self, *args: Any, program: str, **kwargs: Any) -> None:
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        super().__init__(*args, context_settings=settings, **kwargs)
        self._program = program

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with signals_raise():
                return super().main(*args, **kwargs)
        except EndedBySignal as end:
            print(f"{self._program}: ended by {end}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), end.number)  # whoever waits for us sees by what we ended
        except BlinkError as error:
            self._fail(str(error), EXIT_USER_ERROR)
        except OSError as error:  # a full disk, a folder that may not be written
            if os.environ.get("BLINK_DEBUG"):
                raise
            self._fail(_text_of(error), EXIT_USER_ERROR)
        except InternalError as error:
            if os.environ.get("BLINK_DEBUG"):
                raise
            print(f"{self._program}: a bug of {self._program}: {error}", file=sys.stderr)
            print("please report it; BLINK_DEBUG=1 shows where", file=sys.stderr)
            sys.exit(EXIT_INTERNAL_ERROR)

    def _fail(self, text: str, code: int) -> None:
        print(f"{self._program}: {text}", file=sys.stderr)
        sys.exit(code)


def _text_of(error: OSError) -> str:
    """Return what the system said, after the file, or the two of a copy, where it names them."""
    if not error.strerror:
        return str(error)
    if error.filename2:  # either may be at fault: a full disk is the second one's
        return f"{error.filename} -> {error.filename2}: {error.strerror}"
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
