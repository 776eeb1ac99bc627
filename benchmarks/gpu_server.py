"""Serves a prepared model folder over HTTP on a GPU, random weights made there: for benchmarks.

`python -m benchmarks.gpu_server FOLDER --placement chained`. The folder is prepare_model.py's, with
`tokenizer.blob` (blinkc's compiled tokenizer) beside it. The same loader, ring and front end as
`blink-runtime run`; only files and weights come from elsewhere. Prints lines of JSON: `load` with
times and bytes, `ready` with the URL, and `end` when stdin closes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench_model import load, load_plan
from blink_runtime.cuda_driver import Context
from blink_runtime.gpu_ring import GpuRing

STOP_TIMEOUT_S = 10.0


def say(event: str, text: str = "", **facts: Any) -> None:
    """Print one event for the parent."""
    print(json.dumps({"event": event, "text": text, **facts}), flush=True)


def ring_sizes(plan: Any) -> Any:
    """Return the native ring sizes of a plan."""
    from blink_runtime import _native

    names = (
        "num_slots", "num_front_ends", "max_prompt_tokens", "max_output_tokens",
        "output_record_bytes", "max_seqlen", "max_batch", "vocab_size", "page_size_tokens",
        "num_kv_pages", "trace_capacity", "sampler_features",
    )  # fmt: skip
    return _native.RingSizes(**{name: getattr(plan, name) for name in names})


def serve(folder: Path, placement: str, port: int, counts_experts: bool) -> None:
    """Serve until stdin closes."""
    from blink_runtime import _native
    from blink_runtime.front_end import FrontEnd, FrontEndOptions
    from blink_runtime.serve import await_first_heartbeat

    started = time.monotonic()
    with ExitStack() as stack:
        context = stack.enter_context(Context())
        plan = load_plan(folder)
        sizes = ring_sizes(plan)
        gpu_ring = stack.enter_context(
            GpuRing(f"/blink-{os.getpid()}", sizes, partial(say, "notice"))
        )
        ring = gpu_ring.ring
        target = load(folder, placement, ring=gpu_ring, context=context)
        report = {name: getattr(target.report, name) for name in target.report.__slots__}
        # Kept so that the next start of the same model need not measure again.
        (folder / "algorithms.json").write_text(json.dumps(target.products.algorithms))
        target.start()
        say("load", placement=placement, total_s=time.monotonic() - started, **report)
        codec = _native.Tokenizer((folder / "tokenizer.blob").read_bytes())
        options = FrontEndOptions(port=port, model_name="model", max_connections=512)
        front_end = stack.enter_context(FrontEnd(ring, codec, None, options))
        await_first_heartbeat(front_end, threading.Event())
        say("ready", url=front_end.url, seconds=time.monotonic() - started, pid=os.getpid())
        counter = None
        if counts_experts:
            from benchmarks.count_experts import ExpertCounter

            counter = ExpertCounter(target)
            counter.start()
        sys.stdin.read()  # the parent closes it
        experts = counter.finish() if counter is not None else None
        front_end.close(1.0)
        counters = ring.counters()
        stop_started = time.monotonic()
        ring.request_stop()
        stopped = target.join(STOP_TIMEOUT_S)
        say(
            "end",
            stopped=stopped,
            stop_s=time.monotonic() - stop_started,
            launch_error=ring.header()["launch_error"],
            counters=counters,
            experts=experts,
        )
        if not stopped:
            os._exit(3)
        target.close()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--placement", default="chained")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--count-experts", action="store_true")
    options = parser.parse_args()
    serve(options.folder, options.placement, options.port, options.count_experts)


if __name__ == "__main__":
    main()
