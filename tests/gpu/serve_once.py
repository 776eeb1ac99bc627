"""Serve three prompts to a tiny model: `python -m tests.gpu.serve_once MODEL DTYPE PLACEMENT`.

For compute-sanitizer, which watches every kernel of a whole model this way.
"""

from __future__ import annotations

import sys

from blink_runtime.cuda_driver import Context
from tests.gpu.models import tiny_model
from tests.gpu.test_models import served

LENGTHS = (1, 40, 150)  # alone, packed, in two chunks
NUM_TOKENS = 4
TIMEOUT_S = 300.0  # racecheck makes a step a hundred times longer

if __name__ == "__main__":
    name, dtype, placement = sys.argv[1:]
    tokens, steps = served(
        tiny_model(name, dtype), Context(), placement, LENGTHS, NUM_TOKENS, TIMEOUT_S
    )
    print(f"{name} {dtype} {placement}: {len(steps)} steps, first tokens {[t[0] for t in tokens]}")
