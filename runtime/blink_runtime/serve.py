"""Serve a bundle on this machine: bundle -> ring, scheduler and front end, until told to stop.

The main thread only waits: tokens flow between native threads and never touch Python.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blink_runtime.codec import load_codec
from blink_runtime.cpu_target import CpuTarget
from blink_runtime.hash_check import HashCheck
from blink_runtime.load_cache import LoadCache
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
    from blink_runtime.chat_template import ChatTemplate
    from blink_runtime.cuda_driver import Context
    from blink_runtime.front_end import FrontEnd
    from blink_runtime.gpu_memory_ring import GpuMemoryRing
    from blink_runtime.gpu_ring import GpuRing

EXIT_UNHEALTHY = 70  # EX_SOFTWARE: a supervisor restarts
UNHEALTHY_GRACE_S = 2.0  # from the watchdog's verdict to the end: /health says 503 meanwhile
UNMEASURED_SILENCE_S = 30.0  # of a CPU that has made no step yet: its first may take seconds
GOLDEN_TIMEOUT_S = 120.0
DEFAULT_SCHEDULER = "chained"
FIRST_TOKEN_INTERVAL_S = 0.02
FIRST_TOKEN_PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """What the user of `blink-runtime run` chooses."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Sequence[str] = ()
    api_key_file: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    cors_origins: Sequence[str] = ()
    access_log: str = ""  # file, or - for standard output; empty: none
    max_connections: int = 1024
    max_connections_per_address: int = 0  # 0: no such limit
    request_timeout_s: float = 3600.0
    num_threads: int = 0  # of the CPU target; 0: as many as this process may use
    checks_golden: bool = True
    drain_s: float = 10.0  # patience with running requests after SIGTERM
    weights_from: Sequence[Path] = field(default=())
    scheduler: str = DEFAULT_SCHEDULER  # placement on a GPU
    silence_s: float = 2.0  # without a heartbeat: unhealthy, unless four steps take longer

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise BlinkError("--tls-cert and --tls-key need each other", hint="give both or none")


def serve(path: Path, config: ServeConfig) -> int:
    """Serve until SIGINT, SIGTERM or the scheduler's end; return the exit status.

    Raises:
        BlinkError: the port is taken, a file cannot be used, or the bundle is not for this machine
            or fails its golden prompt.
    """
    stop = _stop_event()
    with ExitStack() as stack:
        entrance = hold_entrance(stack, config)
        bundle = stack.enter_context(open_bundle(path, check_hashes=False))
        bundle.check_machine()
        check_options(bundle, config)
        hashes = HashCheck(bundle, config.weights_from)
        _say(f"{bundle.manifest.model_name}: code checked")
        text = load_text(bundle)
        if bundle.manifest.target.library is not None:
            hashes.wait()  # the CPU target has no second reader to wait for
        ring = start_target(stack, bundle, config)
        if config.checks_golden:
            _say(check_golden(HostBytes(ring.address), bundle, open_golden_cache(bundle)))
        # Closed in reverse: front end, watchdog, stop word, target.
        stack.callback(start_watchdog(ring, bundle.manifest, config).disarm)
        hashes.wait()
        ring.hold_range(0)  # no serve-dpu may take it away
        front_end = start_front_end(stack, bundle, ring, config, entrance, text)
        _say(f"ready after {process_age_s():.1f} s: {front_end.url}/  (ring {ring.name})")
        _wait(front_end, stop)
        _say("stopping")
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
    gpu_ring = GpuRing(f"/blink-{os.getpid()}", ring_sizes(bundle.manifest), _say)
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
        say=_say,
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
        ring, _silence_s(ring, manifest, config), UNHEALTHY_GRACE_S, EXIT_UNHEALTHY
    )


def _silence_s(ring: _native.Ring | _native.Link, manifest: Manifest, config: ServeConfig) -> float:
    """Return how long the heartbeat may be silent: a step of the largest prefill may take longer
    than any that has run so far."""
    longest_s = ring.header()["longest_step_ns"] / 1e9
    if longest_s == 0 and manifest.target.library is not None:
        return max(config.silence_s, UNMEASURED_SILENCE_S)
    prompt = len(manifest.golden.prompt_token_ids) if manifest.golden else 1
    growth = max(manifest.limits.max_prefill_tokens / max(prompt, 1), 1.0)
    return max(config.silence_s, 4 * growth * longest_s)


def hold_entrance(stack: ExitStack, config: ServeConfig) -> _native.HttpEntrance:
    """Take the address and try the files that HTTP needs, before anything is loaded.

    Raises:
        BlinkError: one of them cannot be used.
    """
    from blink_runtime.front_end import FrontEndOptions, open_entrance

    try:
        entrance = open_entrance(FrontEndOptions(**http_options(config)))
    except (RuntimeError, ValueError) as error:
        raise BlinkError(str(error)) from error
    stack.callback(entrance.close)
    return entrance


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """What turns requests into token ids, and these into answers."""

    codec: Any
    template: ChatTemplate | None


def load_text(bundle: Bundle) -> Text:
    """Load tokenizer and chat template, before anything that takes long.

    Raises:
        BlinkError: the bundle has no tokenizer, or wants a library that is not here.
    """
    from blink_runtime.chat_template import load_chat_template

    return Text(codec=load_codec(bundle, _say), template=load_chat_template(bundle))


def http_options(config: ServeConfig) -> dict[str, Any]:
    """Return those of `FrontEndOptions` that the user chooses."""
    return {
        "host": config.host,
        "port": config.port,
        "api_keys": tuple(config.api_keys),
        "api_key_file": str(config.api_key_file or ""),
        "tls_certificate": str(config.tls_certificate or ""),
        "tls_key": str(config.tls_key or ""),
        "cors_origins": tuple(config.cors_origins),
        "access_log": config.access_log,
        "max_connections": config.max_connections,
        "max_connections_per_address": config.max_connections_per_address,
        "request_timeout_ms": round(config.request_timeout_s * 1000),
    }


def start_front_end(
    stack: ExitStack,
    bundle: Bundle,
    ring: _native.Ring | _native.Link,
    config: ServeConfig,
    entrance: _native.HttpEntrance,
    text: Text,
    *,
    front_end_index: int = 0,
) -> FrontEnd:
    """Start HTTP over the ring, or over a link to it."""
    from blink_runtime.front_end import FrontEnd, FrontEndOptions

    manifest = bundle.manifest
    options = FrontEndOptions(
        **http_options(config),
        model_name=manifest.model_name,
        eos_token_ids=manifest.tokenizer.eos_token_ids,
        tool_format=manifest.tokenizer.tool_format,
        target_name=manifest.target.name,
        front_end_index=front_end_index,
        stall_timeout_ms=round(_silence_s(ring, manifest, config) * 1000),
    )
    try:
        front_end = FrontEnd(ring, text.codec, text.template, options, entrance)
    except (RuntimeError, ValueError) as error:  # the ring; the address, taken meanwhile
        raise BlinkError(str(error)) from error
    reload_on_signal(front_end)
    return stack.enter_context(front_end)


def reload_on_signal(front_end: FrontEnd) -> None:
    """On SIGHUP read keys and certificate again and open the access log anew; at once, if one came
    since `_stop_event`."""

    def on_signal(_number: int, _frame: object) -> None:
        try:
            front_end.reload()
            _say("keys and certificate read again, access log opened anew")
        except RuntimeError as error:
            _say(f"not reloaded, the old ones stay: {error}")

    if threading.current_thread() is threading.main_thread():
        earlier = signal.signal(signal.SIGHUP, on_signal)
        if isinstance(earlier, _HangUpLater) and earlier.was_sent:
            os.kill(os.getpid(), signal.SIGHUP)


def _wait(front_end: FrontEnd, stop: threading.Event) -> None:
    """Wait for a signal; say once when the first token has been served.

    After a minute without a request this thread only sleeps.
    """
    deadline = time.monotonic() + FIRST_TOKEN_PATIENCE_S
    while time.monotonic() < deadline:
        if stop.wait(FIRST_TOKEN_INTERVAL_S):
            return
        if front_end.stats()["output_tokens"] > 0:
            _say(f"first token served {process_age_s():.1f} s after the start")
            break
    stop.wait()


def drain(front_end: FrontEnd, patience_s: float) -> None:
    """Close the front end; a second signal still ends the process at once.

    A thread of its own waits inside the native code, where no handler of Python's runs.
    """
    closing = threading.Thread(
        target=front_end.close, args=(patience_s,), name="blink-drain", daemon=True
    )
    closing.start()
    closing.join()


def process_age_s() -> float:
    """Return the seconds since this process began, the interpreter's start included."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class _HangUpLater:
    """A handler of SIGHUP for as long as there is nothing to reload."""

    was_sent = False

    def __call__(self, _number: int, _frame: object) -> None:
        self.was_sent = True


def _stop_event() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set; a second signal ends the process at once.

    SIGHUP, which would end the process too, is kept for `reload_on_signal`.
    """
    event = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if event.is_set():
            os._exit(128 + number)
        event.set()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGHUP, _HangUpLater())
    return event


def _say(text: str) -> None:
    """Tell the operator; a full disk, or a pipe that nobody reads any more, ends no server."""
    with suppress(OSError):
        print(text, flush=True)
