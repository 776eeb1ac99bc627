"""Signals that end a command: SIGTERM, SIGHUP -> an exception, so that it cleans up first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NUMBERS = (signal.SIGTERM, signal.SIGHUP)


class EndedBySignal(BaseException):
    """Raised in the main thread; nobody catches it but to clean up, as with KeyboardInterrupt."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def signals_raise() -> Iterator[None]:
    """Have the first of these signals raise `EndedBySignal` within the block.

    Those that come later are ignored: `timeout` sends two. One that is ignored already (nohup)
    stays so; a server puts handlers of its own in the place of these.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_it(number: int, _frame: object) -> None:
        for other in taken:
            signal.signal(other, signal.SIG_IGN)
        raise EndedBySignal(number)

    taken = [number for number in NUMBERS if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, raise_it)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
