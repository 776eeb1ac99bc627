"""What changes logits before sampling, and logprobs, on any device: cases and their references."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blinkc import abi
from tests.gpu.harness import Harness, PagedStep
from tests.gpu.kernel_checks import params
from tests.reference.logits import adjusted, likeliest, log_softmax

if TYPE_CHECKING:
    from collections.abc import Sequence

PENALTIES, LOGIT_BIAS, MIN_TOKENS = 2, 4, 8  # BLINK_SAMPLE_* of step.h
NUM_FLOATS = 11  # of a row's logprobs: the chosen token's, five pairs of id and logprob
STEP_STATE_BYTES = 64
_HISTORY_OFFSET = 32  # of blink_step_state.history


@dataclass(frozen=True, kw_only=True)
class Row:
    """A request and what it has generated; the default changes nothing."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stops: Sequence[int] = ()
    num_logprobs: int = 0
    temperature: float = 0.0
    flags: int = 1 | PENALTIES | LOGIT_BIAS | MIN_TOKENS

    def exact(self, logits: Any) -> Any:
        """Return the logits that are sampled from, in float64."""
        if not self.flags & PENALTIES:
            return logits.astype(np.float64)
        names = ("presence", "frequency", "repetition", "bias", "min_tokens", "stops")
        changes = {name: getattr(self, name) for name in names}
        return adjusted(logits, self.prompt, self.output, **changes)


class _History(ctypes.Structure):
    """blink_sampling_history of step.h."""

    _fields_ = (
        ("requests", ctypes.c_uint64),
        ("prompts", ctypes.c_uint64),
        ("outputs", ctypes.c_uint64),
        ("output_stride_bytes", ctypes.c_uint64),
        ("output_record_bytes", ctypes.c_uint32),
        ("prompt_stride_tokens", ctypes.c_uint32),
    )


class Rows:
    """Rows as the scheduler lays them out, each in a slot of its own, in reverse order."""

    def __init__(self, harness: Harness, rows: Sequence[Row], record_bytes: int = 8) -> None:
        self.harness = harness
        self.rows = rows
        longest = max(1, *(len(row.prompt) for row in rows), *(len(row.output) for row in rows))
        request_type = abi.structs()["blink_slot_request"]
        requests = (request_type * len(rows))()
        prompts = np.full((len(rows), longest), 0xFFFFFFFF, np.uint32)
        # What is not an id must not be read as one.
        outputs = np.full((len(rows), longest, record_bytes // 4), 0xFFFFFFFF, np.uint32)
        settings = []
        for number, row in enumerate(rows):
            slot = len(rows) - 1 - number
            request = requests[slot]
            request.num_prompt_tokens = len(row.prompt)
            request.presence_penalty, request.frequency_penalty = row.presence, row.frequency
            request.repetition_penalty = row.repetition
            request.num_logit_bias, request.num_stop_token_ids = len(row.bias), len(row.stops)
            request.logit_bias_ids[: len(row.bias)] = [*row.bias]
            request.logit_bias_values[: len(row.bias)] = [*row.bias.values()]
            request.stop_token_ids[: len(row.stops)] = [*row.stops]
            request.min_output_tokens = row.min_tokens
            prompts[slot, : len(row.prompt)] = row.prompt
            outputs[slot, : len(row.output), 0] = row.output
            setting = params(row.temperature, seed=number, index=len(row.output))
            setting.flags, setting.slot = row.flags, slot
            setting.num_logprobs = row.num_logprobs
            settings.append(setting)
        self._requests = self._place(bytes(requests))
        self._prompts = self._place(prompts.tobytes())
        self._outputs = self._place(outputs.tobytes())
        history = _History(
            requests=self._requests.data_ptr(),
            prompts=self._prompts.data_ptr(),
            outputs=self._outputs.data_ptr(),
            output_stride_bytes=longest * record_bytes,
            output_record_bytes=record_bytes,
            prompt_stride_tokens=longest,
        )
        self._history = self._place(bytes(history))
        state = bytearray(STEP_STATE_BYTES)
        state[_HISTORY_OFFSET : _HISTORY_OFFSET + 8] = self._history.data_ptr().to_bytes(
            8, "little"
        )
        self._state = self._place(bytes(state))
        self._settings = self._place(b"".join(bytes(setting) for setting in settings))

    def _place(self, data: bytes) -> torch.Tensor:
        return self.harness.place(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def sample(self, logits: torch.Tensor) -> tuple[list[int], Any]:
        """Return the sampled ids and the logprobs [rows, NUM_FLOATS], NaN where none were written.

        Checks that no count stays behind.
        """
        harness, (count, vocab) = self.harness, logits.shape
        ids = harness.poisoned(count, dtype=torch.int32)
        logprobs = harness.poisoned(count, NUM_FLOATS, dtype=torch.float32)
        harness.of_previous(logits)
        counts = harness.of_previous(harness.place(torch.zeros(count, vocab, dtype=torch.int32)))
        step = replace(
            PagedStep(harness, [1], [1], 1, 64).addresses(
                self._settings.data_ptr(), ids.data_ptr()
            ),
            state=self._state.data_ptr(),
            sampled_logprobs=logprobs.data_ptr(),
        )
        harness.run(
            harness.kernels.sample(step, logits.data_ptr(), counts.data_ptr(), count, vocab)
        )
        assert not counts.any(), "counts of one step leak into the next"
        return ids.tolist(), logprobs.cpu().numpy()


def random_rows(random: np.random.Generator, vocab: int, count: int) -> list[Row]:
    """Requests with everything at once, some of it repeated, and bounds of the parts of a row."""
    edges = [0, vocab - 1, vocab // 2, min(255, vocab - 1), min(256, vocab - 1)]

    def ids(most: int) -> list[int]:
        drawn = random.integers(0, vocab, int(random.integers(0, most))).tolist()
        return [*drawn, *random.choice(edges, int(random.integers(0, 4))).tolist()]

    rows = []
    for number in range(count):
        output = ids(40)
        output += output[: int(random.integers(0, len(output) + 1))]
        rows.append(
            Row(
                prompt=ids(600),
                output=output,
                presence=float(random.uniform(-2, 2)),
                frequency=float(random.uniform(-2, 2)),
                repetition=float(random.choice([0.5, 1.0, 1.7])),
                bias={int(i): float(random.uniform(-8, 8)) for i in ids(28)},
                min_tokens=int(random.integers(0, 60)),
                stops=list({*ids(12)}),
                num_logprobs=number % 7,
            )
        )
    return rows


def check_changes_decide_what_is_sampled(
    harness: Harness, vocab: int, count: int, record_bytes: int
) -> None:
    """Guards order, counts, ownership of slots and rounding: greedy takes the largest changed one.

    Beside them: rows without flags, whose requests would change them, and rows that sample nothing.
    """
    random = np.random.default_rng(vocab + record_bytes)
    rows = random_rows(random, vocab, count)
    rows[1] = replace(rows[1], flags=1)
    rows[2] = replace(rows[2], flags=0)
    logits = harness.random(count, vocab, scale=2.0)
    values = logits.float().cpu().numpy()
    for number, row in enumerate(rows):  # what changes is what would win
        touched = [*row.prompt, *row.output, *row.bias, *row.stops]
        if touched:
            values[number, touched] += random.uniform(4, 9, len(touched))
    logits = harness.place(torch.from_numpy(values).to(logits.dtype))
    values = logits.float().cpu().numpy()
    ids, _ = Rows(harness, rows, record_bytes).sample(logits)
    unit = 2.0**-7 if logits.dtype == torch.bfloat16 else 2.0**-10
    num_changed = 0
    for number, row in enumerate(rows):
        if not row.flags & 1:
            assert ids[number] == 0
            continue
        exact = row.exact(values[number])
        top = exact.max()
        assert exact[ids[number]] >= top - unit * max(1.0, abs(top)), number
        num_changed += ids[number] != int(values[number].argmax())
    assert num_changed > count // 3
    # What the row holds is the model's own, still.
    assert np.array_equal(logits.float().cpu().numpy(), values)


A, B, STOP, OTHER = 3, 5, 9, 700
LONG = [OTHER] * 1490 + [A] * 10
# What the request is; the logits of A and B, above all others; who wins.
DUELS = {
    "presence, once": (Row(output=[A, A], presence=1.5), 5, 3, A),
    "presence, the first token": (Row(output=[A, OTHER], presence=3), 5, 3, B),
    "presence, the last token": (Row(output=[OTHER, A], presence=3), 5, 3, B),
    "presence heeds no prompt": (Row(prompt=[A], presence=3), 5, 3, A),
    "frequency, each time": (Row(output=[A, OTHER, A, A], frequency=1), 5, 3, B),
    "frequency, no more than that": (Row(output=[A, OTHER, A], frequency=1), 5.5, 3, A),
    "frequency heeds no prompt": (Row(prompt=[A, A, A], output=[A], frequency=1), 5, 3, A),
    "a long output, at least": (Row(output=LONG, frequency=0.5), 10, 5.5, B),
    "a long output, at most": (Row(output=LONG, frequency=0.5), 10, 4.5, A),
    "repetition of the output": (Row(output=[A], repetition=2), 4, 3, B),
    "repetition of the prompt": (Row(prompt=[OTHER, A], repetition=2), 4, 3, B),
    "repetition of a long prompt": (Row(prompt=LONG, repetition=2), 4, 3, B),
    "repetition, once": (Row(prompt=[A, A], output=[A, A], repetition=2), 8, 3, A),
    "repetition below zero": (Row(output=[A], repetition=2), -1, -1.5, B),
    "repetition below one": (Row(output=[A], repetition=0.5), 2, 3, A),
    "bias": (Row(bias={OTHER: 1.0, A: -3.0}), 5, 3, B),
    "bias follows penalties": (Row(prompt=[A], repetition=2, bias={A: 4.0}), 4, 5, A),
    "penalties of both kinds": (
        Row(prompt=[A], output=[A], repetition=2, presence=1, frequency=1), 8, 3, B
    ),
    "too short to stop": (Row(output=[OTHER], min_tokens=2, stops=[STOP, A]), 5, 3, B),
    "long enough": (Row(output=[OTHER] * 2, min_tokens=2, stops=[STOP, A]), 5, 3, A),
    "no bias makes it stop": (Row(min_tokens=1, stops=[A], bias={A: 50.0}), 5, 3, B),
    "the request is not asked": (
        Row(flags=1, output=[A], presence=9, bias={A: -9.0}, min_tokens=9, stops=[A]), 5, 3, A
    ),
}  # fmt: skip


def check_duels(harness: Harness, vocab: int) -> None:
    """Guards each rule alone: another reading of it lets the other token win."""
    logits = torch.full((len(DUELS), vocab), -50.0)
    for number, (_, a, b, _) in enumerate(DUELS.values()):
        logits[number, A], logits[number, B] = a, b
    placed = harness.place(logits.to(harness.dtype))
    ids, _ = Rows(harness, [row for row, *_ in DUELS.values()]).sample(placed)
    assert dict(zip(DUELS, ids, strict=True)) == {name: duel[3] for name, duel in DUELS.items()}


def check_what_is_forbidden_is_never_drawn(harness: Harness, vocab: int, count: int) -> None:
    """Guards min_tokens and strong biases with a temperature: draws find no way around them."""
    allowed = vocab // 3
    bias = {**dict.fromkeys((0, 1, vocab - 1), -100.0), allowed: 100.0}
    row = Row(
        temperature=0.5, bias=bias, min_tokens=3, stops=[2, vocab - 2], output=[5], prompt=[7]
    )
    logits = harness.place(torch.zeros(count, vocab).to(harness.dtype))
    logits[:, [0, 1, 2, allowed, vocab - 2, vocab - 1]] = 20.0
    ids, _ = Rows(harness, [row] * count).sample(logits)
    assert ids == [allowed] * count


def check_logprobs(
    harness: Harness, vocab: int, count: int, *, changes_logits: bool = True
) -> None:
    """Guards ties, chosen tokens that are not the likeliest, and rows that nobody asked of."""
    random = np.random.default_rng(vocab)
    rows = [
        Row(
            num_logprobs=number % 7,
            bias={int(random.integers(vocab)): 50.0} if changes_logits else {},
            flags=Row.flags if changes_logits else 1,
        )
        for number in range(count)
    ]
    rows[1] = replace(rows[1], flags=0)
    logits = harness.random(count, vocab, scale=3.0)
    logits[3] = torch.round(logits[3])  # ties
    if vocab > 6 * 1024:  # all of them in one thread's share
        logits[6, 7 : 6 * 1024 : 1024] = harness.random(6, scale=0.5) + 40
    logits[4] = 0.0
    logits[5, vocab // 2] = math.nan
    values = logits.float().cpu().numpy()
    ids, got = Rows(harness, rows, 64).sample(logits)
    for number, row in enumerate(rows):
        if not row.flags & 1 or row.num_logprobs == 0 or np.isnan(values[number]).any():
            assert np.isnan(got[number]).all()
            assert (ids[number] == -1) == np.isnan(values[number]).any()
            continue
        exact = log_softmax(values[number])
        num_top = row.num_logprobs - 1
        assert ids[number] == next(iter(row.bias), int(values[number].argmax()))
        assert math.isclose(got[number, 0], exact[ids[number]], rel_tol=1e-5, abs_tol=2e-5)
        pairs = got[number, 1 : 1 + 2 * num_top].reshape(-1, 2)
        assert np.isnan(got[number, 1 + 2 * num_top :]).all(), "written past what was asked for"
        wanted = likeliest(values[number], min(num_top, vocab))
        missing = num_top - len(wanted)
        assert pairs[:, 0].astype(int).tolist() == wanted + [0] * missing
        expected = [*exact[wanted], *[-math.inf] * missing]
        np.testing.assert_allclose(pairs[:, 1], expected, rtol=1e-5, atol=2e-5)


def check_logprobs_of_infinite_logits(harness: Harness, vocab: int) -> None:
    """Guards rows of which all but one token are impossible, or one is certain."""
    logits = harness.place(torch.full((2, vocab), -math.inf).to(harness.dtype))
    logits[0, 3] = 2.0
    logits[1] = 0.0
    logits[1, vocab - 1] = math.inf
    ids, got = Rows(harness, [Row(num_logprobs=3), Row(num_logprobs=2)]).sample(logits)
    assert ids == [3, vocab - 1]
    assert got[0, :5].tolist() == [0.0, 3.0, 0.0, 0.0, -math.inf]
    assert got[1, :3].tolist() == [0.0, vocab - 1.0, 0.0]
