"""A server without a model: a ring, a fake owner that answers with the prompt, bytes as tokens."""

from __future__ import annotations

import codecs
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

_native = pytest.importorskip("blink_runtime._native", reason="the native module is not built")

from blink_runtime.chat_template import ChatTemplate  # noqa: E402
from blink_runtime.front_end import FrontEnd, FrontEndOptions  # noqa: E402

from .native_build import build_program  # noqa: E402

EOS, NAN, STALL = 256, 257, 258
VOCAB_SIZE = 300
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ m.content }}{{ suffix }}{% endfor %}"
)
_ring_numbers = itertools.count()


class ByteDecoder:
    """One token is one byte; a code point is held back until it is whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteCodec:
    """Token ids are UTF-8 bytes; "<nan>" and "<stall>" are the fake owner's mischief."""

    def encode(self, text: str, adds_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for part in re.split("(<nan>|<stall>)", text):
            ids.extend({"<nan>": [NAN], "<stall>": [STALL]}.get(part, part.encode()))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def make_decoder(self, skips_special_tokens: bool) -> ByteDecoder:
        return ByteDecoder()


@dataclass
class Server:
    """A front end under test."""

    front_end: FrontEnd
    ring: Any
    owner: subprocess.Popen[str]
    http: httpx.Client

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 100, **fields}
        return self.http.post("/v1/completions", json=body)

    def wait_until_empty(self) -> None:
        """Wait until every slot of the ring is empty again and no request is counted as running:
        then the front end may use each. The bug it guards: a leaked slot."""
        wait_for(lambda: not self.ring.slots(), "slots to be empty")
        self.wait_for_running(0)

    def wait_for_running(self, count: int) -> None:
        """Wait until so many requests have a slot, whether the ring's owner has seen them or not.

        With a frozen owner that is as long as one likes; the ring itself shows what the owner took.
        """
        running = "requests_running"
        wait_for(lambda: self.front_end.stats()[running] == count, f"{count} requests to run")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.005)


def make_servers(stack: ExitStack) -> Callable[..., Server]:
    """Return a function that starts a server, which ends with the stack."""

    def make(
        *,
        owner: dict[str, int] | None = None,
        sizes: dict[str, int] | None = None,
        chat_template: str | None = CHAT_TEMPLATE,
        codec: Any = None,
        waits: bool = True,
        **options: Any,
    ) -> Server:
        ring = _native.Ring.create(
            f"/blink-test-{os.getpid()}-{next(_ring_numbers)}", ring_sizes(**(sizes or {}))
        )
        process = start_owner(ring.name, owner or {})
        stack.callback(stop_owner, ring, process)
        # On a busy machine an owner is silent now and then, and no test but a few means that.
        options = {"stall_timeout_ms": 600_000, **options}
        front_end = FrontEnd(
            ring,
            codec or ByteCodec(),
            ChatTemplate(chat_template, {}) if chat_template else None,
            FrontEndOptions(port=0, model_name="fake", eos_token_ids=(EOS,), **options),
        )
        stack.enter_context(front_end)
        client = stack.enter_context(httpx.Client(base_url=front_end.url, timeout=300))
        if waits:
            wait_for(lambda: front_end.health == "serving", "the front end to be healthy")
        return Server(front_end, ring, process, client)

    return make


def ring_sizes(**changes: int) -> Any:
    sizes = {
        "num_slots": 32,
        "max_prompt_tokens": 2048,
        "max_output_tokens": 2048,
        "max_seqlen": 2048,
        "max_batch": 8,
        "vocab_size": VOCAB_SIZE,
        "page_size_tokens": 16,
        "num_kv_pages": 1024,
        "sampler_features": _native.SAMPLER_TOP_K | _native.SAMPLER_TOP_P,
    }
    return _native.RingSizes(**{**sizes, **changes})


def start_owner(ring_name: str, options: dict[str, int]) -> subprocess.Popen[str]:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    process = subprocess.Popen(
        [str(build_program("fake_owner")), ring_name, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@contextmanager
def frozen(owner: subprocess.Popen[str]) -> Iterator[None]:
    """Let the owner make no step meanwhile, however long that takes."""
    owner.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        owner.send_signal(signal.SIGCONT)


def stop_owner(ring: Any, process: subprocess.Popen[str]) -> None:
    ring.request_stop()
    process.wait(timeout=120)
