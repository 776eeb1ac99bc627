"""The scheduler's policy as slow, obvious Python: commands in, rows and slot states out."""

from __future__ import annotations

from dataclasses import dataclass, field

EMPTY, PENDING, PREFILL, DECODE, PAUSED, COMPLETED, FAILED = range(7)
NO_REASON, STOP, LENGTH, ABORT, ERROR = range(5)
NO_ERROR, CHECKSUM, BAD_REQUEST, NAN_LOGITS, LAUNCH, EPOCH, OUT_OF_PAGES = range(7)

_MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    """The finalizer of splitmix64, as in blink/abi.hpp."""
    x &= _MASK
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def next_token(
    seed: int, history: list[int], num_prompt_tokens: int, vocab_size: int
) -> int | None:
    """The fake model of tests/scheduler/fake_model.h; None where its logits are NaN."""
    if seed % 11 == 0 and len(history) - num_prompt_tokens == seed // 11 % 5:
        return None
    value = mix64(seed + 1)
    for token in history:
        value = mix64(value + token + 1)
    return value % vocab_size


@dataclass(frozen=True)
class Limits:
    """Sizes of ring, cache and steps."""

    num_slots: int
    num_front_ends: int
    max_prompt_tokens: int
    max_output_tokens: int
    max_seqlen: int
    max_batch: int
    vocab_size: int
    page_size: int
    num_pages: int
    max_prefill_tokens: int
    max_prefill_batch: int

    @property
    def usable_seqlen(self) -> int:
        """The longest sequence that the cache can hold."""
        return min(self.max_seqlen, self.num_pages * self.page_size)

    def owner(self, slot: int) -> int:
        """The front end whose range holds a slot."""
        return next(
            f
            for f in range(self.num_front_ends)
            if f * self.num_slots // self.num_front_ends
            <= slot
            < (f + 1) * self.num_slots // self.num_front_ends
        )


@dataclass(frozen=True)
class Submit:
    """The payload of a submit command."""

    number: int
    epoch: int
    seed: int
    max_output_tokens: int
    stops: tuple[int, ...]
    prompt: tuple[int, ...]


@dataclass
class Slot:
    """What the ring shows of a slot, and where its request stands."""

    sequence: int = 0
    state: int = EMPTY
    generated: list[int] = field(default_factory=list)
    reason: int = NO_REASON
    error: int = NO_ERROR
    payload: Submit | None = None
    cached: int = 0  # tokens whose keys and values are in the cache
    pages: int = 0
    age: int = 0
    prefilled: bool = False

    @property
    def request(self) -> Submit:
        """The payload of a slot that has one."""
        assert self.payload is not None
        return self.payload

    @property
    def history(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.request.prompt, *self.generated]


@dataclass(frozen=True)
class Row:
    """A slot's share of a step."""

    slot: int
    first_position: int
    num_tokens: int
    samples: bool


class ReferenceScheduler:
    """The policy of design: commit, receive, admit, choose; one method each."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.slots = [Slot() for _ in range(limits.num_slots)]
        self.commands: list[tuple[int, str] | None] = [None] * limits.num_slots
        self.seen: list[tuple[int, str] | None] = [None] * limits.num_slots
        self.payloads: list[Submit | None] = [None] * limits.num_slots
        self.ring_epochs = [0] * limits.num_front_ends
        self.epochs = [0] * limits.num_front_ends
        self.turn = 0
        self.next_age = 0
        self.rows: list[Row] = []
        self.kind = "idle"
        self.last_was_prefill = False
        self.counters = {
            "admitted": 0,
            "finished": 0,
            "aborted": 0,
            "failed": 0,
            "paused": 0,
            "resumed": 0,
            "late": 0,
            "output_tokens": 0,
            "prompt_tokens": 0,
        }

    # -- what the front ends do

    def attach(self, front_end: int, epoch: int) -> None:
        self.ring_epochs[front_end] = epoch

    def submit(self, slot: int, sequence: int, payload: Submit) -> None:
        self.payloads[slot] = payload
        self.commands[slot] = (sequence, "submit")

    def command(self, slot: int, sequence: int, verb: str) -> None:
        self.commands[slot] = (sequence, verb)

    # -- a step

    def step(self) -> tuple[str, list[Row]]:
        """Commit the last step and choose the next one."""
        self._commit()
        for front_end in range(self.limits.num_front_ends):
            self._receive(front_end)
        self._choose()
        return self.kind, self.rows

    def fail_launch(self) -> None:
        """The step just chosen could not be launched."""
        for row in self.rows:
            self._end(row.slot, FAILED, ERROR, LAUNCH)
        self.rows = []

    @property
    def free_pages(self) -> int:
        """Pages that nobody has."""
        return self.limits.num_pages - sum(slot.pages for slot in self.slots)

    def running(self) -> list[int]:
        """Slots with a lane, oldest first."""
        with_lane = [i for i, s in enumerate(self.slots) if s.state in (PREFILL, DECODE)]
        return sorted(with_lane, key=lambda i: self.slots[i].age)

    def _commit(self) -> None:
        if self.kind == "prefill":
            self.counters["prompt_tokens"] += sum(row.num_tokens for row in self.rows)
        endings = []
        for row in self.rows:
            slot = self.slots[row.slot]
            slot.cached += row.num_tokens
            if not row.samples:
                continue
            slot.prefilled = True
            request = slot.request
            token = next_token(
                request.seed, slot.history, len(request.prompt), self.limits.vocab_size
            )
            if token is None:
                endings.append((row.slot, FAILED, ERROR, NAN_LOGITS))
                continue
            slot.generated.append(token)
            self.counters["output_tokens"] += 1
            room = self.limits.usable_seqlen - len(request.prompt)
            if token in request.stops:
                endings.append((row.slot, COMPLETED, STOP, NO_ERROR))
            elif len(slot.generated) >= min(request.max_output_tokens, room):
                endings.append((row.slot, COMPLETED, LENGTH, NO_ERROR))
            else:
                slot.state = DECODE
        self.rows = []
        for ending in endings:
            self._end(*ending)

    def _end(self, index: int, state: int, reason: int, error: int) -> None:
        slot = self.slots[index]
        slot.state, slot.reason, slot.error = state, reason, error
        slot.cached = slot.pages = 0
        slot.prefilled = False
        if state == EMPTY:
            slot.generated = []
        name = {ABORT: "aborted", ERROR: "failed"}.get(reason, "finished")
        self.counters[name] += 1

    def _empty(self, index: int, error: int) -> None:
        slot = self.slots[index]
        if slot.state in (PENDING, PREFILL, DECODE, PAUSED):
            self._end(index, EMPTY, ABORT, error)
        slot.state = EMPTY
        slot.generated = []

    def _receive(self, front_end: int) -> None:
        mine = [i for i in range(self.limits.num_slots) if self.limits.owner(i) == front_end]
        if self.ring_epochs[front_end] != self.epochs[front_end]:
            for index in mine:
                self._empty(index, EPOCH)
            self.epochs[front_end] = self.ring_epochs[front_end]
        new = [i for i in mine if self.commands[i] != self.seen[i]]
        submits = []
        for index in new:
            command = self.commands[index]
            assert command is not None
            self.seen[index] = command
            if command[1] == "submit":
                payload = self.payloads[index]
                assert payload is not None
                submits.append((payload.number, index, command[0], payload))
            else:
                self._close(index, *command)
        for _, index, sequence, payload in sorted(submits, key=lambda entry: entry[:2]):
            self._claim(index, sequence, payload, front_end)

    def _close(self, index: int, sequence: int, verb: str) -> None:
        slot = self.slots[index]
        if sequence != slot.sequence:
            self.counters["late"] += 1
        elif verb == "release":
            self._empty(index, NO_ERROR)
        elif slot.state in (PENDING, PREFILL, DECODE, PAUSED):
            self._end(index, COMPLETED, ABORT, NO_ERROR)

    def _claim(self, index: int, sequence: int, payload: Submit, front_end: int) -> None:
        slot = self.slots[index]
        if slot.state != EMPTY or slot.sequence == sequence:
            self.counters["late"] += 1
            return
        if payload.epoch != self.epochs[front_end]:
            self.counters["late"] += 1
            return
        self.slots[index] = Slot(sequence=sequence, payload=payload)
        error = NO_ERROR
        if any(token >= self.limits.vocab_size for token in payload.prompt) or not (
            1 <= len(payload.prompt) < self.limits.max_seqlen
            and 1 <= payload.max_output_tokens <= self.limits.max_output_tokens
        ):
            error = BAD_REQUEST
        elif len(payload.prompt) >= self.limits.usable_seqlen:
            error = OUT_OF_PAGES
        if error:
            self._end(index, FAILED, ERROR, error)
        else:
            self.slots[index].state = PENDING

    # -- choice

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)

    def _candidate(self) -> int | None:
        paused = [i for i, s in enumerate(self.slots) if s.state == PAUSED]
        if paused:
            return min(paused, key=lambda i: self.slots[i].age)
        for offset in range(self.limits.num_front_ends):
            front_end = (self.turn + offset) % self.limits.num_front_ends
            pending = [
                i
                for i, s in enumerate(self.slots)
                if s.state == PENDING and self.limits.owner(i) == front_end
            ]
            if pending:
                return min(pending, key=lambda i: self.slots[i].request.number)
        return None

    def _admit(self, index: int) -> None:
        slot = self.slots[index]
        if slot.state == PAUSED:
            self.counters["resumed"] += 1
        else:
            self.counters["admitted"] += 1
            slot.age, self.next_age = self.next_age, self.next_age + 1
            self.turn = (self.limits.owner(index) + 1) % self.limits.num_front_ends
        slot.state = PREFILL
        slot.pages = self._pages_of(len(slot.history))

    def _add_prefill_row(self, index: int) -> None:
        slot = self.slots[index]
        left = self.limits.max_prefill_tokens - sum(row.num_tokens for row in self.rows)
        rest = len(slot.history) - slot.cached
        count = min(left, rest)
        self.rows.append(Row(index, slot.cached, count, count == rest))

    def _collect_prefill(self) -> None:
        def has_room() -> bool:
            tokens = sum(row.num_tokens for row in self.rows)
            return (
                len(self.rows) < self.limits.max_prefill_batch
                and tokens < self.limits.max_prefill_tokens
            )

        for index in self.running():
            if not self.slots[index].prefilled and has_room():
                self._add_prefill_row(index)
        while has_room():
            index_or_none = self._candidate()
            running = self.running()
            if index_or_none is None or len(running) >= self.limits.max_batch:
                return
            needed = self._pages_of(len(self.slots[index_or_none].history)) + len(running)
            if needed > self.free_pages:
                return
            self._admit(index_or_none)
            self._add_prefill_row(index_or_none)

    def _pause_youngest(self) -> None:
        slot = self.slots[self.running()[-1]]
        slot.state = PAUSED
        slot.cached = slot.pages = 0
        slot.prefilled = False
        self.counters["paused"] += 1

    def _collect_decode(self) -> None:
        for index in self.running():  # oldest first
            slot = self.slots[index]
            if slot.state == PAUSED or not slot.prefilled:
                continue
            if slot.cached < slot.pages * self.limits.page_size:
                continue
            while slot.state != PAUSED and self.free_pages == 0:
                self._pause_youngest()
            if slot.state != PAUSED:
                slot.pages += 1
        self.rows = [
            Row(index, self.slots[index].cached, 1, True)
            for index in self.running()
            if self.slots[index].prefilled
        ]

    def _choose(self) -> None:
        self.rows = []
        decoding = [i for i in self.running() if self.slots[i].prefilled]
        self.kind = "prefill"
        if not (self.last_was_prefill and decoding):
            self._collect_prefill()
        if not self.rows:
            self.kind = "decode"
            self._collect_decode()
        if not self.rows:
            self.kind = "prefill"
            self._collect_prefill()
        if not self.rows:
            self.kind = "idle"
            return
        self.last_was_prefill = self.kind == "prefill"
