"""The `host` placement: a native thread launches the graph that the scheduler's kernel names, every
step.

The baseline that the other placements are measured against, and what a GPU without device launch
gets. The thread is C++ from end to end (`runtime/native/host_loop.cc`): no step takes the GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blink_runtime.cuda_driver import check, driver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blink_runtime.cuda_driver import MappedBuffer, Stream
    from blink_runtime.cuda_graphs import GraphExec, Launch


class HostPlacement:
    """One thread that alternates the scheduler's kernel and the graph it chose.

    Args:
        step: the launch of `blink_scheduler_host_step`; its first argument is the state's address.
        execs: by key index.
        mailbox: what the kernel writes its choice into.
    """

    def __init__(
        self, step: Launch, execs: Sequence[GraphExec], mailbox: MappedBuffer, stream: Stream
    ) -> None:
        from blink_runtime import _native

        self._loop = _native.HostLoop(
            context=int(check(driver().cuCtxGetCurrent(), "finding the context")),
            stream=int(stream.handle),
            step_function=int(step.function.handle),
            state_address=step.args[0].value,
            mailbox_address=mailbox.host_address,
            num_threads=step.block,
            execs=[int(item.handle) for item in execs],
        )

    @property
    def error(self) -> int:
        """Return the CUDA error that ended the thread; 0 for none."""
        return self._loop.error

    def start(self) -> None:
        """Start the thread."""
        self._loop.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; True if it did in time."""
        return self._loop.join(timeout_s)
