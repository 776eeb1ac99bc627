"""The `host` placement's native loop over a CUDA driver that is none."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_native = pytest.importorskip("blink_runtime._native")
IDLE, LAUNCH, STOP = 0, 1, 2
EXECS = [100, 101, 102]


class Mailbox(ctypes.Structure):
    _fields_ = (("turn", ctypes.c_uint64), ("action", ctypes.c_uint32), ("key", ctypes.c_uint32))


class Script(ctypes.Structure):
    _fields_ = (
        ("mailbox", ctypes.POINTER(Mailbox)),
        ("actions", ctypes.POINTER(ctypes.c_uint32)),
        ("num_actions", ctypes.c_uint32),
        ("next", ctypes.c_uint32),
        ("launched", ctypes.c_uint32 * 16),
        ("num_launched", ctypes.c_uint32),
        ("errors_seen", ctypes.c_uint32 * 16),
        ("num_errors_seen", ctypes.c_uint32),
        ("fails_graph", ctypes.c_int),
        ("fails_sync", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not here")
    path = tmp_path_factory.mktemp("driver") / "libfakecuda.so"
    source = Path(__file__).with_name("fake_cuda.cpp")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, source], check=True)
    return path


class Run:
    """A loop over a script of (action, key) pairs."""

    def __init__(self, driver: Path, actions: list[tuple[int, int]], **settings: int) -> None:
        self.mailbox = Mailbox()
        flat = [word for pair in actions for word in pair]
        self._actions = (ctypes.c_uint32 * len(flat))(*flat)
        self.script = Script(ctypes.pointer(self.mailbox), self._actions, len(actions), **settings)
        ctypes.CDLL(str(driver)).fake_set_script(ctypes.byref(self.script))
        self.loop = _native.HostLoop(
            context=1,
            stream=2,
            step_function=3,
            state_address=4,
            mailbox_address=ctypes.addressof(self.mailbox),
            num_threads=256,
            execs=EXECS,
            library=str(driver),
        )

    def launched(self) -> list[int]:
        return list(self.script.launched[: self.script.num_launched])


@pytest.fixture
def stopped(driver: Path) -> Iterator[Run]:
    actions = [(IDLE, 0), (LAUNCH, 2), (LAUNCH, 0), (IDLE, 0), (LAUNCH, 2), (STOP, 0)]
    run = Run(driver, actions)
    run.loop.start()
    assert run.loop.join(120.0)
    yield run


def test_it_launches_what_the_mailbox_names(stopped: Run) -> None:
    assert stopped.launched() == [102, 100, 102]
    assert stopped.loop.num_steps == 3
    assert stopped.loop.error == 0
    assert stopped.loop.join(0.0)  # twice is once


def test_a_graph_that_fails_is_told_to_the_scheduler(driver: Path) -> None:
    """Guards that one bad launch fails its step's requests, and that the loop goes on."""
    run = Run(driver, [(LAUNCH, 1), (LAUNCH, 2), (STOP, 0)], fails_graph=719)
    run.loop.start()
    assert run.loop.join(120.0)
    assert list(run.script.errors_seen[: run.script.num_errors_seen]) == [719]
    assert run.launched() == [102]


def test_a_dead_gpu_ends_the_loop(driver: Path) -> None:
    """Guards against a loop that spins on a sticky error: it ends and says which."""
    run = Run(driver, [(IDLE, 0)])
    run.loop.start()
    assert not run.loop.join(0.05)
    run.script.fails_sync = 700
    assert run.loop.join(120.0)
    assert run.loop.error == 700


def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    with pytest.raises(_native.RingError, match="no CUDA driver"):
        _native.HostLoop(
            context=1, stream=1, step_function=1, state_address=1, mailbox_address=8,
            num_threads=256, execs=[], library=str(tmp_path / "libnone.so"),
        )  # fmt: skip
