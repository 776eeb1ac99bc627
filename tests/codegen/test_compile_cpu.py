"""The rendered CPU scheduler compiles, loads and serves a ring through its plain-C interface."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blinkc import abi
from blinkc.bundle.golden import HostBytes, RingProbe
from blinkc.codegen.compile_cpu import compile_cpu
from blinkc.codegen.render_scheduler import render_scheduler
from blinkc.errors import BlinkError
from tests.codegen.cpu_scheduler import DEADLINE_S, CpuScheduler
from tests.codegen.plans import make_plan
from tests.codegen.ring_in_memory import LAUNCH, RingInMemory, StepBuffers


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("scheduler") / "target.so"
    compile_cpu(render_scheduler(make_plan(), "cpu"), out=out)
    return ctypes.CDLL(str(out))


class Served(CpuScheduler):
    """A scheduler over a ring in memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.ring = RingInMemory(make_plan())
        super().__init__(library, self.ring.address, self.ring.num_bytes)

    def close(self) -> None:
        self.ring.header.stop = 1
        super().close()


@pytest.fixture
def served(library: ctypes.CDLL) -> Iterator[Served]:
    made = Served(library)
    yield made
    made.close()


def wait_for(ring: RingInMemory, slot: int, state: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while ring.state(slot) != state:
        assert time.monotonic() < deadline, f"slot {slot} stays in state {ring.state(slot)}"
        time.sleep(0.001)


def test_requests_are_served(served: Served) -> None:
    """Guards the loop from command word to last token, with more requests than lanes."""
    names = abi.constants()
    for slot in range(6):
        served.ring.submit(slot, prompt=[10 * slot + 1, 10 * slot + 2], max_output_tokens=5)
    for slot in range(6):
        wait_for(served.ring, slot, names["BLINK_STATE_DECODE_COMPLETED"])
        first = 10 * slot + 3  # the fake model counts on
        assert served.ring.output(slot) == list(range(first, first + 5))
        assert served.ring.status(slot).finish_reason == names["BLINK_FINISH_LENGTH"]
        served.ring.release(slot)
    for slot in range(6):
        wait_for(served.ring, slot, names["BLINK_STATE_EMPTY"])


def test_a_failed_launch_fails_its_requests(served: Served) -> None:
    """Guards the way from a launch's error code to the request and to the ring's header."""
    names = abi.constants()
    served.launch_error = 700
    served.ring.submit(0, prompt=[1], max_output_tokens=3)
    wait_for(served.ring, 0, names["BLINK_STATE_FAILED"])
    assert served.ring.status(0).error == names["BLINK_ERROR_LAUNCH"]
    assert served.ring.header.launch_error == 700
    key = make_plan().keys[served.ring.header.launch_error_key]
    assert (key.kind, key.batch) == ("prefill", 1)
    served.launch_error = 0
    served.ring.submit(1, prompt=[4], max_output_tokens=2)
    wait_for(served.ring, 1, names["BLINK_STATE_DECODE_COMPLETED"])
    assert served.ring.output(1) == [5, 6]


def test_a_launch_that_fails_is_found_by_the_golden_prompt(served: Served) -> None:
    """Guards the load: an engine that runs nothing is told before any client may ask."""
    plan: Any = make_plan()
    probe = RingProbe(plan, HostBytes(served.ring.address))
    served.launch_error = 700
    with pytest.raises(BlinkError, match="the golden prompt failed: launch"):
        probe.complete([1, 2, 3], 4, DEADLINE_S)


def test_a_foreign_ring_is_refused(library: ctypes.CDLL) -> None:
    """Guards against running on memory that is no ring of this version."""
    ring = RingInMemory(make_plan())
    step = StepBuffers(make_plan())
    ring.header.abi_version += 1
    error = ctypes.create_string_buffer(200)
    scheduler = ctypes.c_void_p()
    code = library.blink_cpu_scheduler_create(
        ctypes.c_void_p(ring.address),
        ctypes.c_uint64(ring.num_bytes),
        ctypes.byref(step.buffers),
        LAUNCH(lambda _, key: 0),
        None,
        ctypes.byref(scheduler),
        error,
        ctypes.c_uint32(len(error)),
    )
    assert code == 1
    assert b"version" in error.value


def test_a_compiler_error_carries_its_log(tmp_path: Path) -> None:
    """Guards the log in the error, and that no half-made library is left behind."""
    out = tmp_path / "target.so"
    with pytest.raises(BlinkError) as caught:
        compile_cpu({"broken.cpp": "int main() { return missing; }"}, out=out)
    assert "missing" in caught.value.log
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the message for a machine without a compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BlinkError, match="no-such-compiler"):
        compile_cpu({"a.cpp": ""}, out=tmp_path / "a.so")
