"""Serve a bundle in two processes: the ring's owner, and a front end in another place.

`serve_gpu`: model, scheduler and ring; answers front ends' bootstraps and otherwise sleeps.
`serve_dpu`: HTTP over a link to that ring; needs neither weights nor engines.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blink_runtime.hash_check import HashCheck
from blink_runtime.process_control import drain, process_age_s, say, stop_event
from blink_runtime.serve import (
    check_golden,
    check_options,
    open_golden_cache,
    ring_sizes,
    silence_limit_s,
    start_on_gpu,
    start_target,
    start_watchdog,
)
from blink_runtime.serve_config import ServeConfig
from blink_runtime.serve_http import hold_entrance, load_text, start_front_end
from blink_runtime.shared_ring import UnseenRing
from blinkc.bundle.front_end_copy import bundle_id, open_front_end_bundle
from blinkc.bundle.golden import HostBytes, RingBytes
from blinkc.bundle.reader import open_bundle
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from blink_runtime import _native
    from blink_runtime.front_end import FrontEnd
    from blinkc.bundle.reader import Bundle

STATUS_INTERVAL_S = 0.5
_RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkConfig:
    """Where a ring and its front ends meet.

    `address` is HOST:PORT over verbs, a name such as "/blink-main" over shm.
    """

    transport: str
    address: str
    device: str = ""  # RDMA device; empty: the one with the address, or any that is up
    gid_index: int = -1  # -1: the RoCE v2 one of an IPv4 address
    front_end_index: int = 0  # serve_dpu: whose slots
    wait_s: float = 300.0  # serve_dpu: for an owner that is not there yet
    ring_memory: str = "host"  # serve_gpu: or "gpu", which front ends reach over verbs alone

    def __post_init__(self) -> None:
        if self.transport not in ("verbs", "shm"):
            raise BlinkError(f"transport {self.transport!r}", hint="choose verbs or shm")
        if self.transport == "shm" and (
            not self.address.startswith("/") or "/" in self.address[1:] or len(self.address) < 2
        ):
            raise BlinkError(
                f"{self.address!r} names no shared memory", hint="give a name such as /blink-main"
            )
        if self.transport == "shm" and (self.device or self.gid_index >= 0):
            raise BlinkError(
                "--rdma-device and --gid-index choose a way over RDMA, and --transport shm is none",
                hint="leave them out, or --transport verbs",
            )
        if self.transport == "verbs":
            host_and_port(self.address)
        elif self.ring_memory == "gpu":
            raise BlinkError(
                "a ring in GPU memory cannot be shared with another process of this machine",
                hint="--transport verbs, or --ring-memory host",
            )


def host_and_port(address: str, example: str = "10.0.0.1:7471") -> tuple[str, int]:
    """Split HOST:PORT, [V6]:PORT or :PORT; `example` is what a hint shows.

    Raises:
        BlinkError: it is none of them.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and port.isascii() and port.isdigit()):
        raise BlinkError(f"{address!r} is no HOST:PORT", hint=f"for example {example}")
    if len(port) > 5 or int(port) > 65535:
        raise BlinkError(f"{address!r}: ports end at 65535", hint=f"for example {example}")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedRing:
    """A ring with a scheduler over it, as its owner's process may use it."""

    memory: RingBytes  # for the golden prompt
    follow_header: Callable[[], _native.Ring]  # from then on its header tells how it does
    open_link: Callable[..., _native.LinkOwner]  # takes a `LinkPlace`


def serve_gpu(path: Path, config: ServeConfig, link: LinkConfig) -> int:
    """Own the ring of a bundle until SIGINT, SIGTERM or the scheduler's end.

    Raises:
        BlinkError: the address is taken, there is no RDMA device, or the bundle is not for this
            machine or fails its golden prompt.
    """
    stop = stop_event()
    with ExitStack() as stack:
        place = hold_place(stack, link)
        bundle = stack.enter_context(open_bundle(path, check_hashes=False))
        bundle.check_machine()
        check_options(bundle, config)
        if link.ring_memory == "gpu" and bundle.manifest.target.library is not None:
            raise BlinkError(f"{path} is for the CPU", hint="--ring-memory host")
        hashes = HashCheck(bundle, config.weights_from)
        say(f"{bundle.manifest.model_name}: code checked")
        if bundle.manifest.target.library is not None:
            hashes.wait()
        start = start_in_gpu_memory if link.ring_memory == "gpu" else start_in_host_memory
        ring = start(stack, bundle, config)
        if config.checks_golden:
            say(check_golden(ring.memory, bundle, open_golden_cache(bundle)))
        header = ring.follow_header()
        stack.callback(start_watchdog(header, bundle.manifest, config).disarm)
        hashes.wait()
        owner = _open_ring(stack, ring, header, link, place)
        _wait(owner, stop)
        say("stopping")
        return 0


def start_in_host_memory(stack: ExitStack, bundle: Bundle, config: ServeConfig) -> OwnedRing:
    """Start the bundle's scheduler over a ring in memory that this process addresses."""
    from blink_runtime import _native

    say("ring in host memory")
    ring = start_target(stack, bundle, config)
    ring.bundle_id = bundle_id(bundle.manifest)
    return OwnedRing(
        memory=HostBytes(ring.address),
        follow_header=lambda: ring,
        open_link=partial(_native.LinkOwner, ring),
    )


def start_in_gpu_memory(stack: ExitStack, bundle: Bundle, config: ServeConfig) -> OwnedRing:
    """Start the bundle's scheduler over a ring that only the GPU and an RDMA card address."""
    from blink_runtime import _native
    from blink_runtime.cuda_driver import Context
    from blink_runtime.gpu_memory_ring import GpuMemoryRing

    context = stack.enter_context(Context())
    sizes = ring_sizes(bundle.manifest)
    ring = stack.enter_context(GpuMemoryRing(context, sizes, bundle_id(bundle.manifest), say))
    stack.enter_context(UnseenRing("it lies in GPU memory (--ring-memory gpu)"))
    say(
        f"ring in GPU memory: {ring.num_bytes >> 20} MiB exported as a dma-buf; `top` and `trace` "
        "cannot see it (this way never ran on hardware)"
    )
    start_on_gpu(stack, bundle, config, context, ring, ring.request_stop)
    return OwnedRing(
        memory=ring.memory,
        follow_header=ring.follow_header,
        open_link=partial(
            _native.LinkOwner,
            address=ring.address,
            num_bytes=ring.num_bytes,
            dmabuf_fd=ring.exported.fd,
            dmabuf_offset=ring.exported.offset,
            header=ring.header,
        ),
    )


def hold_place(stack: ExitStack, link: LinkConfig) -> _native.LinkPlace | None:
    """Take the address that front ends come to before anything is loaded; None for a name in shared
    memory, which is only looked up.

    Raises:
        BlinkError: another process has it, or there is no RDMA device.
    """
    from blink_runtime import _native

    with _told_of_links():
        if link.transport == "shm":
            _native.Ring.check_name(link.address)
            return None
        host, port = host_and_port(link.address)
        place = _native.LinkPlace(
            host=host, port=port, device=link.device, gid_index=link.gid_index
        )
    stack.callback(place.close)
    return place


@contextmanager
def _told_of_links() -> Iterator[None]:
    """Turn what the native module says of a link into a BlinkError."""
    from blink_runtime import _native

    try:
        yield
    except _native.RingError as error:
        hint = "is another serve-gpu there?"
        if "no RDMA device" in str(error):
            hint = "--transport shm for a front end on this machine"
        elif os.strerror(errno.EADDRNOTAVAIL) in str(error):
            hint = "--listen takes an address of this machine; `ip address` shows them"
        raise BlinkError(str(error), hint=hint) from error


def _open_ring(
    stack: ExitStack,
    ring: OwnedRing,
    header: _native.Ring,
    link: LinkConfig,
    place: _native.LinkPlace | None,
) -> _native.LinkOwner | None:
    """Let front ends come, now that the golden prompt is out of the ring."""
    with _told_of_links():
        if place is None:
            header.publish(link.address)
            say(f"ready after {process_age_s():.1f} s: ring {header.name}")
            return None
        owner = ring.open_link(place=place)
    stack.callback(owner.close)
    host, _ = host_and_port(link.address)
    say(f"ready after {process_age_s():.1f} s: ring at {host}:{owner.port} over {owner.device}")
    return owner


def _wait(owner: _native.LinkOwner | None, stop: threading.Event) -> None:
    """Sleep; say who comes and goes."""
    if owner is None:
        stop.wait()
        return
    known: set[tuple[int, str]] = set()
    while not stop.wait(STATUS_INTERVAL_S):
        here = set(owner.sessions())
        for index, peer in sorted(here - known):
            say(f"front end {index} connected from {peer}")
        for index, peer in sorted(known - here):
            say(f"front end {index} at {peer} is gone")
        known = here


def serve_dpu(path: Path, config: ServeConfig, link: LinkConfig) -> int:
    """Serve HTTP over a link until SIGINT or SIGTERM; 503 while the ring is away.

    Raises:
        BlinkError: the port is taken, a file is missing or cannot be used, there is no RDMA device,
            nobody is there in time, or the owner refuses.
    """
    stop = stop_event()
    with ExitStack() as stack:
        entrance = hold_entrance(stack, config)
        bundle = stack.enter_context(open_front_end_bundle(path))
        check_front_end_index(link.front_end_index, bundle.manifest.limits.num_front_ends)
        text = load_text(bundle)
        way = make_link(link, bundle_id(bundle.manifest))
        if not wait_for_ring(way, link.wait_s, stop):
            return 0
        front_end = start_front_end(
            stack,
            bundle,
            way,
            config,
            entrance,
            text,
            silence_s=silence_limit_s(way, bundle.manifest, config),
            front_end_index=link.front_end_index,
        )
        say(
            f"ready after {process_age_s():.1f} s: {front_end.url}/  "
            f"(over {link.transport} to {link.address})"
        )
        _report(front_end, way, stop)
        say("stopping")
        drain(front_end, config.drain_s)
        return 0


def check_front_end_index(index: int, num_front_ends: int) -> None:
    """Compare a front end's number with the ranges of slots that the bundle has.

    Raises:
        BlinkError: there is no such range.
    """
    if not 0 <= index < num_front_ends:
        raise BlinkError(
            f"--front-end {index}: the bundle's ring is for {num_front_ends}, counted from 0",
            hint="blinkc compile --num-front-ends N, then blinkc bundle, makes one for N",
        )


def wait_for_ring(way: _native.Link, wait_s: float, stop: threading.Event) -> bool:
    """Wait until the ring's owner answers; False: told to stop meanwhile.

    Raises:
        BlinkError: nobody is there in time, or the owner refuses, or this machine has no device.
    """
    from blink_runtime import _native

    deadline = time.monotonic() + wait_s
    said = ""
    while True:
        try:
            way.header()
            return True
        except _native.RingAbsent as error:
            if time.monotonic() >= deadline:
                raise BlinkError(str(error), hint="start blink-runtime serve-gpu there") from error
            if str(error) != said:
                said = str(error)
                say(f"waiting: {said}")
        except _native.RingError as error:
            raise BlinkError(str(error)) from error
        if stop.wait(_RETRY_S):
            return False


def make_link(link: LinkConfig, bundle: int) -> _native.Link:
    """Say where the ring is; nothing is connected yet."""
    from blink_runtime import _native

    if link.transport == "shm":
        return _native.Link.shm(
            name=link.address, front_end_index=link.front_end_index, bundle_id=bundle
        )
    host, port = host_and_port(link.address)
    return _native.Link.verbs(
        host=host,
        port=port,
        front_end_index=link.front_end_index,
        bundle_id=bundle,
        device=link.device,
        gid_index=link.gid_index,
    )


def _report(front_end: FrontEnd, way: _native.Link, stop: threading.Event) -> None:
    """Say when the ring goes away and comes back."""
    health = ""
    while not stop.wait(STATUS_INTERVAL_S):
        found = front_end.health
        if found == health:
            continue
        if found == "lost":
            say("the ring is lost: answering 503 and connecting again")
        elif found == "serving" and health:
            say(f"the ring is back (connection {way.num_connects})")
        elif found != "serving" and health:
            say(f"the scheduler is {found}")
        if found == "lost" and way.problem:
            say(way.problem)
        health = found
