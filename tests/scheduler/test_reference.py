"""The C++ policy takes the same steps as the slow one on random scripts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.scheduler import (
    COMPLETED,
    EMPTY,
    FAILED,
    Limits,
    ReferenceScheduler,
    Submit,
)
from tests.scheduler.build import build_program, run_program


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_program("scripted.cc", tmp_path_factory.mktemp("scripted"))


Pick = Callable[[int, int], int]  # a number between two, both included


def pick_limits(pick: Pick) -> Limits:
    num_front_ends = pick(1, 2)
    max_seqlen = pick(3, 16)
    max_batch = pick(1, 4)
    max_prefill_tokens = pick(1, 12)
    page_size = 1 << pick(0, 2)
    pages_per_lane = -(-max_seqlen // page_size)
    return Limits(
        num_slots=num_front_ends * pick(1, 4),
        num_front_ends=num_front_ends,
        max_prompt_tokens=max_seqlen,
        max_output_tokens=max_seqlen,
        max_seqlen=max_seqlen,
        max_batch=max_batch,
        vocab_size=7,
        page_size=page_size,
        num_pages=max(1, pages_per_lane + pick(0, pages_per_lane + 1) - pick(0, 1)),
        max_prefill_tokens=max_prefill_tokens,
        max_prefill_batch=pick(1, min(max_batch, max_prefill_tokens)),
    )


class Pair:
    """Writes the script for the C++ side while the reference takes it live."""

    def __init__(self, sizes: Limits) -> None:
        self.sizes = sizes
        self.reference = ReferenceScheduler(sizes)
        self.numbers = [0] * sizes.num_front_ends
        self.script = [
            "ring "
            + " ".join(
                str(value)
                for value in (
                    sizes.num_slots,
                    sizes.num_front_ends,
                    sizes.max_prompt_tokens,
                    sizes.max_output_tokens,
                    sizes.max_seqlen,
                    sizes.max_batch,
                    sizes.vocab_size,
                    sizes.page_size,
                    sizes.num_pages,
                    sizes.max_prefill_tokens,
                    sizes.max_prefill_batch,
                )
            )
        ]
        self.expected: list[str] = []
        self.saw_chunk = False
        for front_end in range(sizes.num_front_ends):
            self.attach(front_end, 1)

    def attach(self, front_end: int, epoch: int) -> None:
        self.reference.attach(front_end, epoch)
        self.script.append(f"attach {front_end} {epoch}")

    def submit(self, slot: int, sequence: int, payload: Submit) -> None:
        self.reference.submit(slot, sequence, payload)
        fields = [
            self.sizes.owner(slot),
            slot,
            sequence,
            payload.number,
            payload.epoch,
            payload.seed,
            payload.max_output_tokens,
            len(payload.stops),
            *payload.stops,
            len(payload.prompt),
            *payload.prompt,
        ]
        self.script.append("submit " + " ".join(map(str, fields)))

    def command(self, slot: int, sequence: int, verb: str) -> None:
        self.reference.command(slot, sequence, verb)
        self.script.append(f"{verb} {slot} {sequence}")

    def step(self, *, fails: bool = False) -> None:
        kind, rows = self.reference.step()
        self.expected.append(
            " ".join(
                [
                    kind,
                    *(f"{r.slot}:{r.first_position}:{r.num_tokens}:{int(r.samples)}" for r in rows),
                ]
            )
        )
        self.saw_chunk = self.saw_chunk or any(not row.samples for row in rows)
        if fails:
            self.script.append("fail")
        if fails and rows:
            self.reference.fail_launch()
        self.script.append("step")
        counters = self.reference.counters
        self.expected.append(
            "counters "
            + " ".join(str(value) for value in (*counters.values(), self.reference.free_pages))
        )
        for index, slot in enumerate(self.reference.slots):
            if slot.sequence == 0:
                continue
            fields = [index, slot.sequence, slot.state, len(slot.generated)]
            if slot.state in (COMPLETED, FAILED):
                fields += [slot.reason, slot.error]
            self.expected.append(" ".join(map(str, [*fields, *slot.generated])))
        self.expected.append(".")


def pick_submit(pick: Pick, pair: Pair, slot: int) -> None:
    sizes = pair.sizes
    front_end = sizes.owner(slot)
    pair.numbers[front_end] += 1
    length = pick(
        1, sizes.max_prompt_tokens if pick(0, 2) == 0 else min(4, sizes.max_prompt_tokens)
    )
    payload = Submit(
        number=pair.numbers[front_end],
        epoch=pair.reference.ring_epochs[front_end],
        seed=pick(0, 100),
        max_output_tokens=pick(1, sizes.max_output_tokens),
        stops=(pick(0, 6),) if pick(0, 3) == 3 else (),
        prompt=tuple(pick(0, 6) for _ in range(length)),
    )
    pair.submit(slot, pair.reference.slots[slot].sequence + 1, payload)


def pick_action(pick: Pick, pair: Pair) -> None:
    slot = pick(0, pair.sizes.num_slots - 1)
    state = pair.reference.slots[slot].state
    sequence = pair.reference.slots[slot].sequence
    verb = pick(0, 40)
    if verb <= 35 and state == EMPTY:
        pick_submit(pick, pair, slot)
    elif verb <= 35 and state in (COMPLETED, FAILED):
        pair.command(slot, sequence, "release")
    elif verb in (36, 37) and sequence > 0:
        pair.command(slot, sequence, "abort")
    elif verb in (38, 39) and sequence > 0:
        pair.command(slot, sequence - 1, "abort" if verb == 38 else "release")
    elif verb == 40:
        front_end = pair.sizes.owner(slot)
        pair.attach(front_end, pair.reference.ring_epochs[front_end] + 1)


def compare(scripted: Path, pick: Pick) -> Pair:
    """Build a script from `pick`, run it on both sides, and let them agree."""
    pair = Pair(pick_limits(pick))
    for _ in range(pick(5, 40)):
        for _ in range(pick(0, 3)):
            pick_action(pick, pair)
        pair.step(fails=pick(0, 60) == 60)
    for _ in range(30):
        pair.step()
    printed = run_program(scripted, text="\n".join(pair.script) + "\n")
    assert printed.splitlines() == pair.expected
    return pair


@settings(max_examples=60)
@given(data=st.data())
def test_the_policy_takes_the_references_steps(scripted: Path, data: st.DataObject) -> None:
    """Guards every rule of the policy; what hypothesis finds shrinks to a few lines of script."""
    compare(scripted, lambda low, high: data.draw(st.integers(low, high)))


def test_the_policy_agrees_where_it_matters(scripted: Path) -> None:
    """Guards the comparison itself: among uniform scripts there are pauses, resumes and chunks."""
    pairs = [compare(scripted, random.Random(seed).randint) for seed in range(150)]
    num_paused = sum(pair.reference.counters["paused"] > 0 for pair in pairs)
    num_resumed = sum(pair.reference.counters["resumed"] > 0 for pair in pairs)
    num_chunked = sum(pair.saw_chunk for pair in pairs)
    assert min(num_paused, num_resumed, num_chunked) >= 10
