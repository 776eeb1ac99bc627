"""The three placements of the scheduler on a GPU, over a model of one kernel."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from blinkc import abi
from blinkc.capture.grid import GraphKey, build_grid
from blinkc.capture.plan import CapturePlan
from tests.gpu.fake_target import FakeTarget, expected_tokens, gpu_plan

pytestmark = pytest.mark.gpu
PLACEMENTS = ("host", "chained", "persistent")
DEADLINE_S = 60


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.0005)


def state_of(target: FakeTarget, slot: int) -> str:
    _, state, _ = target.ring.word(slot)
    names = abi.constants()
    return next(
        name for name, value in names.items() if name.startswith("BLINK_STATE_") and value == state
    )


def wait_for_end(target: FakeTarget, slot: int, deadline_s: float = DEADLINE_S) -> str:
    endings = ("BLINK_STATE_DECODE_COMPLETED", "BLINK_STATE_FAILED")
    wait_until(
        lambda: state_of(target, slot) in endings,
        f"slot {slot} does not end; {target.ring.summary()}",
        deadline_s,
    )
    return state_of(target, slot)


def submit_script(target: FakeTarget) -> list[tuple[list[int], int]]:
    """Twenty requests, all there before the first step: the steps that follow are determined."""
    requests = []
    for slot in range(20):
        prompt = [slot * 7 + i for i in range(1 + slot * 37 % 300)]
        count = 1 + slot * 13 % 40
        target.ring.submit(slot, prompt, count, seed=slot + 1)
        requests.append((prompt, count))
    return requests


def test_placements_take_the_same_steps(context: object) -> None:
    """Guards that placement changes when a step runs, never which."""
    histories = {}
    for placement in PLACEMENTS:
        # So few pages that lanes pause.
        with FakeTarget(gpu_plan(num_kv_pages=64), placement) as target:
            requests = submit_script(target)
            target.start()
            for slot, (prompt, count) in enumerate(requests):
                assert wait_for_end(target, slot) == "BLINK_STATE_DECODE_COMPLETED"
                expected = expected_tokens(slot + 1, prompt, count, target.plan.vocab_size)
                assert target.ring.tokens(slot, count) == expected
            target.stop()
            histories[placement] = target.ring.steps()
            assert target.ring.header.counters.max_wait_steps <= 1
    assert histories["chained"] == histories["host"]
    assert histories["persistent"] == histories["host"]


def big_prefill_plan() -> CapturePlan:
    """A plan whose largest prefill steps make the persistent block step aside."""
    prefill = tuple(GraphKey("prefill", 1, seqlen) for seqlen in (64, 512, 1024))
    decode = tuple(GraphKey("decode", batch, 1024) for batch in (1, 8))
    return gpu_plan(
        keys=prefill + decode,
        prefill=build_grid("prefill", prefill, 0),
        decode=build_grid("decode", decode, len(prefill)),
        max_prefill_tokens=1024,
        num_kv_pages=512,
    )


def test_the_persistent_block_yields(context: object) -> None:
    """Guards that stepping aside for a big graph changes no step, also when its window of 120
    launches ends between."""
    histories = {}
    for placement in ("host", "persistent"):
        with FakeTarget(big_prefill_plan(), placement) as target:
            for slot in range(12):
                length = (700, 30, 520, 900)[slot % 4]
                target.ring.submit(slot, list(range(length)), 90 + slot, seed=slot + 1)
            target.start()
            for slot in range(12):
                assert wait_for_end(target, slot) == "BLINK_STATE_DECODE_COMPLETED"
            target.stop()
            histories[placement] = target.ring.steps()
    assert histories["persistent"] == histories["host"]
    assert sum(target.plan.keys[key].seqlen >= 512 for _, key, _, _ in histories["host"]) >= 9


def test_six_chained_configurations_a_hundred_times(context: object) -> None:
    """Guards the chained placement against the run that once did not end: graphs of 1 to 200
    kernels, one and many lanes, loaded, served, idle and stopped again and again."""
    configurations = [
        (gpu_plan(), 0),
        (gpu_plan(), 3),
        (gpu_plan(), 40),
        (gpu_plan(), 200),
        (gpu_plan(num_kv_pages=64), 1),
        (gpu_plan(num_kv_pages=64), 20),
    ]
    for turn in range(100):
        for number, (plan, num_layers) in enumerate(configurations):
            with FakeTarget(plan, "chained", num_layers=num_layers) as target:
                target.start()
                if turn % 3 == 0:
                    wait_until(lambda: target.ring.header.heartbeat > 3, "no heartbeat")
                prompt = list(range(1 + (turn * 7 + number) % 200))
                for slot in range(3):
                    target.ring.submit(slot, prompt, 5 + turn % 11, seed=slot + 1)
                for slot in range(3):
                    where = f"turn {turn}, configuration {number}"
                    assert wait_for_end(target, slot) == "BLINK_STATE_DECODE_COMPLETED", where
                    want = expected_tokens(slot + 1, prompt, 5 + turn % 11, plan.vocab_size)
                    assert target.ring.tokens(slot, len(want)) == want, where


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("num_steps", [119, 120, 121, 240, 241, 1000])
def test_step_counts_around_the_launch_window(
    context: object, placement: str, num_steps: int
) -> None:
    """Guards the 120 fire-and-forget launches that one execution of a graph may make."""
    with FakeTarget(gpu_plan(max_seqlen=1024), placement) as target:
        target.ring.submit(0, [5], num_steps, seed=3)
        target.start()
        assert wait_for_end(target, 0) == "BLINK_STATE_DECODE_COMPLETED"
        assert target.ring.tokens(0, num_steps) == expected_tokens(3, [5], num_steps, 50000)
        assert target.ring.header.counters.steps == num_steps


@pytest.mark.parametrize("placement", ["chained", "persistent"])
def test_a_million_steps(context: object, placement: str) -> None:
    """Guards against whatever piles up with relaunches: handles, pools, counters that overflow."""
    count = 1_000_000
    plan = gpu_plan(max_batch=2, max_seqlen=count + 16, num_slots=2)
    with FakeTarget(plan, placement) as target:
        target.ring.submit(0, [5], count, seed=3)
        target.start()
        started = time.monotonic()
        assert wait_for_end(target, 0, 120) == "BLINK_STATE_DECODE_COMPLETED"
        print(f"{placement}: {(time.monotonic() - started) / count * 1e6:.2f} us a step")
        assert target.ring.tokens(0, count) == expected_tokens(3, [5], count, 50000)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stop_from_any_state(context: object, placement: str) -> None:
    """Guards that stop returns while idle, while decoding, at once after start, and twice."""
    with FakeTarget(gpu_plan(), placement) as target:
        target.start()
        wait_until(lambda: target.ring.header.heartbeat > 3, "no heartbeat while idle")
        target.stop()
        target.stop()
    with FakeTarget(gpu_plan(), placement) as target:
        target.ring.submit(0, [5], 1000)
        target.start()
        wait_until(lambda: target.ring.word(0)[2] > 2, "no token")
        target.stop()
    with FakeTarget(gpu_plan(), placement) as target:
        target.ring.stop()
        target.start()
        target.stop()


@pytest.mark.parametrize("placement", ["chained", "persistent"])
def test_a_failed_launch_fails_its_requests_alone(context: object, placement: str) -> None:
    """Guards that a launch that the GPU refuses is readable, and that serving goes on."""
    with FakeTarget(gpu_plan(), placement) as target:
        broken = next(i for i, k in enumerate(target.plan.keys) if k == ("prefill", 1, 256))
        target.break_key(broken)
        target.ring.submit(0, list(range(100)), 5)
        target.start()
        assert wait_for_end(target, 0) == "BLINK_STATE_FAILED"
        assert target.ring.header.launch_error != 0
        assert target.ring.header.launch_error_key == broken
        target.ring.submit(1, [7], 5, seed=2)
        assert wait_for_end(target, 1) == "BLINK_STATE_DECODE_COMPLETED"
        assert target.ring.tokens(1, 5) == expected_tokens(2, [7], 5, 50000)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_requests_come_while_it_runs(context: object, placement: str) -> None:
    """Guards wake-ups: requests written by the host at odd moments, slots used again and again."""
    with FakeTarget(gpu_plan(), placement) as target:
        target.start()
        for turn in range(30):
            slots = [turn % 5, 10 + turn % 7]
            for slot in slots:
                target.ring.submit(
                    slot, [turn + 1] * (1 + turn * 11 % 200), 1 + turn % 9, seed=turn
                )
                time.sleep(turn % 3 * 0.001)
            for slot in slots:
                assert wait_for_end(target, slot) == "BLINK_STATE_DECODE_COMPLETED"
                count = 1 + turn % 9
                expected = expected_tokens(turn, [turn + 1], count, target.plan.vocab_size)
                assert target.ring.tokens(slot, count) == expected
                target.release(slot)
            for slot in slots:
                wait_until(
                    lambda slot=slot: state_of(target, slot) == "BLINK_STATE_EMPTY",  # type: ignore[misc]
                    "a slot is not released",
                )
