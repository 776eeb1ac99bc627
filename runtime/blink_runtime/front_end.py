"""Start the native front end over a ring: options, tokenizer and chat template -> HTTP server.

Python renders chat templates, once a request; nothing else on a token's path comes here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blink_runtime import _native
from blink_runtime.chat_template import ChatTemplate, refuse_chats
from blinkc.closing import Closing


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontEndOptions:
    """What a user or a bundle decides; names and units are those of `front_end_config.h`."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "model"
    api_keys: tuple[str, ...] = ()
    api_key_file: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    access_log: str = ""
    cors_origins: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    front_end_index: int = 0
    tool_format: str = "none"  # of the model's calls: none, hermes or llama3
    target_name: str = ""  # what the bundle runs on, for messages
    serves_chat_page: bool = True
    max_connections: int = 1024
    max_connections_per_address: int = 0
    max_requests: int = 4096
    max_headers: int = 100
    max_header_bytes: int = 16 * 1024
    max_body_bytes: int = 8 * 1024 * 1024
    max_total_body_bytes: int = 256 * 1024 * 1024
    max_buffered_bytes: int = 4 * 1024 * 1024
    header_timeout_ms: int = 10_000
    body_timeout_ms: int = 30_000
    idle_timeout_ms: int = 75_000
    write_timeout_ms: int = 30_000
    request_timeout_ms: int = 3_600_000
    num_prepare_threads: int = 1
    inline_chat_bytes: int = 2048
    inline_prompt_bytes: int = 16 * 1024
    min_poll_interval_us: int = 20
    max_poll_interval_us: int = 200
    max_polls_per_s: int = 10_000
    stall_timeout_ms: int = 2_000


def native_fields(options: FrontEndOptions) -> dict[str, Any]:
    """Return the options as the native module takes them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(options).items()
    }


def open_entrance(options: FrontEndOptions) -> _native.HttpEntrance:
    """Take the address and try keys, certificate and log, before there is a ring to serve.

    Raises:
        ValueError, RuntimeError: one of them cannot be used; the text says why and what to do.
    """
    return _native.HttpEntrance(native_fields(options))


class FrontEnd(Closing):
    """An OpenAI-compatible server over one ring.

    Args:
        ring: a `_native.Ring`, or a `_native.Link` to one elsewhere.
        codec: a `_native.Tokenizer`, or an object with `encode`, `token_bytes` and `make_decoder`
            (`blink_runtime.fallback_tokenizer`).
        chat_template: None refuses chats by name.
        options: see `FrontEndOptions`.
        entrance: what `open_entrance` gave for the same options; it is used up.

    Raises:
        _native.RingError: the ring cannot be attached to.
        RuntimeError: the address cannot be bound, or a file of keys, certificate or log is bad.
    """

    def __init__(
        self,
        ring: _native.Ring | _native.Link,
        codec: Any,
        chat_template: ChatTemplate | None,
        options: FrontEndOptions,
        entrance: _native.HttpEntrance | None = None,
    ) -> None:
        fields = native_fields(options)
        fields["has_chat_template"] = chat_template is not None
        if chat_template is None or not chat_template.takes_tools:
            fields["tool_format"] = "none"
        render: Callable[[str], str] = refuse_chats
        if chat_template is not None:
            render = chat_template
        self._options = options
        self._native = _native.FrontEnd(ring, codec, render, fields, entrance)

    def start(self) -> None:
        """Serve from now on, on threads of its own."""
        self._native.start()

    def close(self, patience_s: float = 0.0) -> None:
        """Take no more requests, let running ones end within `patience_s`, abort the rest."""
        self._native.stop(patience_s)

    def reload(self) -> None:
        """Read API keys and certificate again, and open the access log anew.

        Raises:
            RuntimeError: one of them cannot be used; the server goes on with what it has.
        """
        self._native.reload()

    @property
    def port(self) -> int:
        """The port that is bound, also when 0 was asked for."""
        return self._native.port

    @property
    def url(self) -> str:
        """Where to reach it."""
        host = self._options.host
        scheme = "https" if self._options.tls_certificate else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def health(self) -> str:
        """One of starting, serving, stalled, stopped, lost."""
        return self._native.health

    def stats(self) -> dict[str, int]:
        """Counts since the start, and the gauges of this moment."""
        return self._native.stats()

    def __enter__(self) -> FrontEnd:
        self.start()
        return self
