"""The slow, obvious definitions of what changes logits, and of logprobs; float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.floating]
Exact = npt.NDArray[np.float64]


def adjusted(
    logits: Logits,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
    bias: Mapping[int, float] | None = None,
    min_tokens: int = 0,
    stops: Collection[int] = (),
) -> Exact:
    """Return the logits that a row is sampled from: penalties, logit bias, minimum length."""
    result = logits.astype(np.float64)
    for token in {*prompt, *output}:
        x = result[token]
        result[token] = x / repetition if x > 0 else x * repetition
    for token, count in Counter(output).items():
        result[token] -= frequency * count + presence
    for token, value in (bias or {}).items():
        result[token] += value
    if len(output) < min_tokens:
        result[[*stops]] = -np.inf
    return result


def log_softmax(logits: Logits) -> Exact:
    """Return the log probability of every id; the row's largest logit is finite."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    return np.asarray(exact - np.log(np.exp(exact).sum()))


def likeliest(logits: Logits, count: int) -> list[int]:
    """Return the `count` ids of the largest logits, the lowest id first among equals."""
    ids = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))
    return [int(i) for i in ids[:count]]
