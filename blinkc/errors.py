"""The two error roots: `BlinkError` for what the user can fix, `InternalError` for our own bugs."""

from __future__ import annotations


class BlinkError(Exception):
    """Something the user can fix.

    Shown by the command line without a traceback.

    Args:
        message: what happened, and to which file, node or value.
        hint: what to do about it, as one sentence or command.
        log: the output of the tool that failed, if one did.
    """

    def __init__(self, message: str, *, hint: str = "", log: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log

    def __str__(self) -> str:
        parts = [self.message]
        if self.hint:
            parts.append(f"hint: {self.hint}")
        if self.log:
            parts.append(f"log:\n{self.log.rstrip()}")
        return "\n".join(parts)


class InternalError(Exception):
    """A broken promise inside blinkc or blink-runtime: please report it."""
