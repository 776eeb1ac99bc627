"""Serve a bundle on this machine: bundle -> ring, scheduler and front end, until told to stop.

The main thread only waits: tokens flow between native threads and never touch Python.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from blink_runtime.codec import load_codec
from blink_runtime.cpu_target import CpuTarget
from blinkc.bundle.golden import RingProbe
from blinkc.bundle.manifest import Manifest
from blinkc.bundle.reader import Bundle, open_bundle
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blink_runtime import _native
    from blink_runtime.front_end import FrontEnd

EXIT_UNHEALTHY = 70  # EX_SOFTWARE: a supervisor restarts
WATCHDOG_INTERVAL_S = 0.25
STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """What the user of `blink-runtime run` chooses."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    num_threads: int = 0  # of the CPU target; 0: as many as this process may use
    checks_golden: bool = True
    drain_s: float = 10.0  # patience with running requests after SIGTERM
    weights_from: Sequence[Path] = field(default=())
    scheduler: str = "chained"  # placement on a GPU


def serve(path: Path, config: ServeConfig) -> int:
    """Serve until SIGINT, SIGTERM or the scheduler's end; return the exit status.

    Raises:
        BlinkError: the bundle is not for this machine, or fails its golden prompt.
    """
    stop = _stop_event()
    start = time.monotonic()
    with ExitStack() as stack:
        bundle = stack.enter_context(open_bundle(path))
        bundle.check_machine()
        _say(f"{bundle.manifest.model_name}: bundle checked")
        ring = start_target(stack, bundle, config)
        if config.checks_golden:
            _say(check_golden(ring, bundle.manifest))
        front_end = start_front_end(stack, bundle, ring, config)
        _say(f"ready after {time.monotonic() - start:.1f} s: {front_end.url}/  (ring {ring.name})")
        return _watch(front_end, ring, stop, config.drain_s)


def start_target(stack: ExitStack, bundle: Bundle, config: ServeConfig) -> _native.Ring:
    """Lay out the ring, load the weights and start the scheduler over it."""
    manifest = bundle.manifest
    if manifest.target.library is None:
        return _start_gpu_target(stack, bundle, config)
    ring = make_ring(manifest)
    weights = stack.enter_context(bundle.weights(search=config.weights_from))
    target = CpuTarget(
        library=bundle.file(manifest.target.library),
        weights=weights.addresses,
        ring_address=ring.address,
        ring_bytes=ring.num_bytes,
        num_kv_pages=manifest.limits.num_kv_pages + 1,
        num_threads=config.num_threads,
    )
    stack.enter_context(target)
    stack.callback(ring.request_stop)
    target.start()
    return ring


def _start_gpu_target(stack: ExitStack, bundle: Bundle, config: ServeConfig) -> _native.Ring:
    """Lay the ring out in pinned host memory and let the GPU schedule itself over it."""
    from blink_runtime import _native
    from blink_runtime.cuda_bundle import load_cuda_target
    from blink_runtime.cuda_driver import Context, MappedBuffer

    context = stack.enter_context(Context())
    sizes = ring_sizes(bundle.manifest)
    memory = MappedBuffer(sizes.ring_bytes, "the ring")
    stack.callback(memory.close)
    ring = _native.Ring.create_at(memory.host_address, memory.num_bytes, sizes)
    target = load_cuda_target(
        bundle,
        context,
        memory,
        placement=config.scheduler,
        weights_from=config.weights_from,
        say=_say,
    )
    stack.enter_context(target)
    stack.callback(ring.request_stop)
    target.start()
    return ring


def make_ring(manifest: Manifest) -> _native.Ring:
    """Make the ring in shared memory, with the sizes that the bundle was compiled for."""
    from blink_runtime import _native

    return _native.Ring.create(f"/blink-{os.getpid()}", ring_sizes(manifest))


def ring_sizes(manifest: Manifest) -> _native.RingSizes:
    """Return the sizes that the bundle was compiled for."""
    from blink_runtime import _native

    limits = manifest.limits
    return _native.RingSizes(
        num_slots=limits.num_slots,
        num_front_ends=limits.num_front_ends,
        max_prompt_tokens=limits.max_prompt_tokens,
        max_output_tokens=limits.max_output_tokens,
        output_record_bytes=limits.output_record_bytes,
        max_seqlen=limits.max_seqlen,
        max_batch=limits.max_batch,
        vocab_size=limits.vocab_size,
        page_size_tokens=limits.page_size_tokens,
        num_kv_pages=limits.num_kv_pages,
        trace_capacity=limits.trace_capacity,
        sampler_features=limits.sampler_features,
    )


def check_golden(ring: _native.Ring, manifest: Manifest) -> str:
    """Run the golden prompt through the live ring before any client may; say what came out.

    Raises:
        BlinkError: the tokens differ from the manifest's.
    """
    golden = manifest.golden
    if golden is None or not golden.output_token_ids:
        return "no golden prompt in this bundle: the output is unchecked"
    probe = RingProbe(manifest.limits, ring.address)
    found = probe.complete(golden.prompt_token_ids, len(golden.output_token_ids), 120.0)
    if tuple(found) != golden.output_token_ids:
        raise BlinkError(
            f"the golden prompt gives other tokens here: {found[:8]}... instead of "
            f"{list(golden.output_token_ids[:8])}...",
            hint=f"this machine or its software computes wrongly; rebuild: {manifest.rebuild}",
        )
    return f"golden prompt gives its {len(found)} tokens"


def start_front_end(
    stack: ExitStack, bundle: Bundle, ring: _native.Ring, config: ServeConfig
) -> FrontEnd:
    """Start HTTP over the ring."""
    from blink_runtime.chat_template import load_chat_template
    from blink_runtime.front_end import FrontEnd, FrontEndOptions

    manifest = bundle.manifest
    options = FrontEndOptions(
        host=config.host,
        port=config.port,
        model_name=manifest.model_name,
        api_keys=tuple(config.api_keys),
        eos_token_ids=manifest.tokenizer.eos_token_ids,
    )
    codec = load_codec(bundle, _say)
    return stack.enter_context(FrontEnd(ring, codec, load_chat_template(bundle), options))


def _watch(front_end: FrontEnd, ring: _native.Ring, stop: threading.Event, drain_s: float) -> int:
    """Wait for a signal; end with an error once the scheduler is found dead."""
    while not stop.wait(WATCHDOG_INTERVAL_S):
        if front_end.health in ("stalled", "stopped"):
            header = ring.header()
            error = f", CUDA error {header['launch_error']}" if header["launch_error"] else ""
            print(
                f"blink-runtime: the scheduler has {front_end.health} at step {header['step']}"
                f"{error}; ending so that a supervisor can restart",
                file=sys.stderr,
                flush=True,
            )
            return EXIT_UNHEALTHY
    _say("stopping")
    front_end.close(drain_s)
    return 0


def _stop_event() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set; a second signal ends the process at once."""
    event = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if event.is_set():
            os._exit(128 + number)
        event.set()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)
    return event


def _say(text: str) -> None:
    print(text, flush=True)
