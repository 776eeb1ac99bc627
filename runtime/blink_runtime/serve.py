"""Serve a bundle on this machine: bundle -> ring, scheduler and front end, until told to stop.

The main thread only waits: tokens flow between native threads and never touch Python.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from blink_runtime.cpu_target import CpuTarget
from blink_runtime.hash_check import HashCheck
from blink_runtime.load_cache import LoadCache
from blink_runtime.process_control import drain, process_age_s, say, stop_event
from blink_runtime.serve_config import DEFAULT_SCHEDULER, ServeConfig
from blink_runtime.serve_http import hold_entrance, load_text, start_front_end
from blink_runtime.shared_ring import create_ring
from blinkc.bundle.golden import (
    NUM_GOLDEN_TOKENS,
    HostBytes,
    RingBytes,
    RingProbe,
    compare_golden,
)
from blinkc.bundle.manifest import Manifest
from blinkc.bundle.reader import Bundle, open_bundle
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blink_runtime import _native
    from blink_runtime.cuda_driver import Context
    from blink_runtime.front_end import FrontEnd
    from blink_runtime.gpu_memory_ring import GpuMemoryRing
    from blink_runtime.gpu_ring import GpuRing

EXIT_UNHEALTHY = 70  # EX_SOFTWARE: a supervisor restarts
UNHEALTHY_GRACE_S = 2.0  # from the watchdog's verdict to the end: /health says 503 meanwhile
UNMEASURED_SILENCE_S = 30.0  # of a CPU that has made no step yet: its first may take seconds
GOLDEN_TIMEOUT_S = 120.0
FIRST_HEARTBEAT_INTERVAL_S = 0.002
FIRST_TOKEN_INTERVAL_S = 0.02
FIRST_TOKEN_PATIENCE_S = 60.0


def serve(path: Path, config: ServeConfig) -> int:
    """Serve until SIGINT, SIGTERM or the scheduler's end; return the exit status.

    Raises:
        BlinkError: the port is taken, a file cannot be used, or the bundle is not for this machine
            or fails its golden prompt.
    """
    stop = stop_event()
    with ExitStack() as stack:
        entrance = hold_entrance(stack, config)
        bundle = stack.enter_context(open_bundle(path, check_hashes=False))
        bundle.check_machine()
        check_options(bundle, config)
        hashes = HashCheck(bundle, config.weights_from)
        say(f"{bundle.manifest.model_name}: code checked")
        text = load_text(bundle)
        if bundle.manifest.target.library is not None:
            hashes.wait()  # the CPU target has no second reader to wait for
        ring = start_target(stack, bundle, config)
        if config.checks_golden:
            say(check_golden(HostBytes(ring.address), bundle, open_golden_cache(bundle)))
        # Closed in reverse: front end, watchdog, stop word, target.
        stack.callback(start_watchdog(ring, bundle.manifest, config).disarm)
        hashes.wait()
        ring.hold_range(0)  # no serve-dpu may take it away
        limit_s = silence_limit_s(ring, bundle.manifest, config)
        front_end = start_front_end(stack, bundle, ring, config, entrance, text, silence_s=limit_s)
        await_first_heartbeat(front_end, stop)
        say(f"ready after {process_age_s():.1f} s: {front_end.url}/  (ring {ring.name})")
        _wait(front_end, stop)
        say("stopping")
        drain(front_end, config.drain_s)
        return 0


def check_options(bundle: Bundle, config: ServeConfig) -> None:
    """Refuse what the user chose for another kind of target.

    Raises:
        BlinkError: names the option.
    """
    target = bundle.manifest.target
    if target.library is not None and config.scheduler != DEFAULT_SCHEDULER:
        raise BlinkError(
            f"--scheduler {config.scheduler}: on {target.name} a thread of this process schedules",
            hint="leave it out; it is for bundles of GPUs",
        )
    if target.library is None and config.num_threads:
        raise BlinkError(
            f"--threads {config.num_threads}: {target.name} computes with none of this machine's",
            hint="leave it out; it is for bundles of the cpu target",
        )


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
    """Lay the ring out in memory that the GPU has mapped, and let it schedule itself over it."""
    from blink_runtime.cuda_driver import Context
    from blink_runtime.gpu_ring import GpuRing

    context = stack.enter_context(Context())
    gpu_ring = GpuRing(f"/blink-{os.getpid()}", ring_sizes(bundle.manifest), say)
    stack.callback(gpu_ring.close)
    start_on_gpu(stack, bundle, config, context, gpu_ring, gpu_ring.ring.request_stop)
    return gpu_ring.ring


def start_on_gpu(
    stack: ExitStack,
    bundle: Bundle,
    config: ServeConfig,
    context: Context,
    ring: GpuRing | GpuMemoryRing,
    request_stop: Callable[[], None],
) -> None:
    """Load the bundle and start its scheduler; `stack` stops it."""
    from blink_runtime.cuda_bundle import load_cuda_target

    target = load_cuda_target(
        bundle,
        context,
        ring,
        placement=config.scheduler,
        weights_from=config.weights_from,
        say=say,
    )
    stack.enter_context(target)
    stack.callback(request_stop)
    target.start()


def make_ring(manifest: Manifest) -> _native.Ring:
    """Make the ring in shared memory, with the sizes that the bundle was compiled for."""
    return create_ring(f"/blink-{os.getpid()}", ring_sizes(manifest))


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


def open_golden_cache(bundle: Bundle) -> LoadCache | None:
    """Return where a GPU's golden tokens are kept; None for the CPU, whose bundle holds them."""
    if bundle.manifest.target.library is not None:
        return None
    from blink_runtime.cuda_bundle import open_cache
    from blink_runtime.cuda_driver import Context

    with Context() as context:
        return open_cache(bundle, context)


def check_golden(ring: RingBytes, bundle: Bundle, cache: LoadCache | None) -> str:
    """Run the golden prompt through the live ring before any client may; say what came out.

    Tokens that this very machine gave at its first load must come again exactly. At that load they
    are compared with the manifest's, which may be of another program, up to ties.

    Raises:
        BlinkError: the tokens differ.
    """
    manifest = bundle.manifest
    golden = manifest.golden
    recorded = cache.golden_tokens() if cache else ()
    if golden is None or (not golden.output_token_ids and cache is None):
        return "no golden prompt in this bundle: the output is unchecked"
    expected = golden.output_token_ids or recorded
    count = len(expected) or min(NUM_GOLDEN_TOKENS, manifest.limits.max_output_tokens)
    found = RingProbe(manifest.limits, ring).complete(
        golden.prompt_token_ids, count, GOLDEN_TIMEOUT_S
    )
    try:
        text = compare_golden(golden, expected, found)
        if recorded and tuple(found) != recorded:
            raise BlinkError(
                f"the golden prompt gives {list(found[:8])}... here; at the first load of this "
                f"bundle on this GPU it gave {list(recorded[:8])}..."
            )
    except BlinkError as error:
        raise BlinkError(
            error.message,
            hint="this machine or its software computes wrongly: run blink-runtime doctor; "
            f"or rebuild: {manifest.rebuild}",
        ) from None
    if cache is not None and not recorded:
        cache.update(golden=found)
        text += "" if expected else ", recorded: the next load must give them again"
    return text


def start_watchdog(ring: _native.Ring, manifest: Manifest, config: ServeConfig) -> _native.Watchdog:
    """Watch the scheduler from now on; the process ends with `EXIT_UNHEALTHY` when it dies."""
    from blink_runtime import _native

    return _native.Watchdog(
        ring, silence_limit_s(ring, manifest, config), UNHEALTHY_GRACE_S, EXIT_UNHEALTHY
    )


def silence_limit_s(
    ring: _native.Ring | _native.Link, manifest: Manifest, config: ServeConfig
) -> float:
    """Return how long the heartbeat may be silent: a step of the largest prefill may take longer
    than any that has run so far."""
    longest_s = ring.header()["longest_step_ns"] / 1e9
    if longest_s == 0 and manifest.target.library is not None:
        return max(config.silence_s, UNMEASURED_SILENCE_S)
    prompt = len(manifest.golden.prompt_token_ids) if manifest.golden else 1
    growth = max(manifest.limits.max_prefill_tokens / max(prompt, 1), 1.0)
    return max(config.silence_s, 4 * growth * longest_s)


def await_first_heartbeat(front_end: FrontEnd, stop: threading.Event) -> None:
    """Wait until the front end has seen the scheduler alive; before that it answers 503."""
    while front_end.health == "starting" and not stop.wait(FIRST_HEARTBEAT_INTERVAL_S):
        pass


def _wait(front_end: FrontEnd, stop: threading.Event) -> None:
    """Wait for a signal; say once when the first token has been served.

    After a minute without a request this thread only sleeps.
    """
    deadline = time.monotonic() + FIRST_TOKEN_PATIENCE_S
    while time.monotonic() < deadline:
        if stop.wait(FIRST_TOKEN_INTERVAL_S):
            return
        if front_end.stats()["output_tokens"] > 0:
            say(f"first token served {process_age_s():.1f} s after the start")
            break
    stop.wait()
