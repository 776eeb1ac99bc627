"""The HTTP side of a server: address and files first, then text, then a front end over the ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blink_runtime.codec import load_codec
from blink_runtime.process_control import reload_on_signal, say
from blinkc.errors import BlinkError

if TYPE_CHECKING:
    from contextlib import ExitStack

    from blink_runtime import _native
    from blink_runtime.chat_template import ChatTemplate
    from blink_runtime.front_end import FrontEnd
    from blink_runtime.serve_config import ServeConfig
    from blinkc.bundle.reader import Bundle


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

    return Text(codec=load_codec(bundle, say), template=load_chat_template(bundle))


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
    silence_s: float,
    front_end_index: int = 0,
) -> FrontEnd:
    """Start HTTP over the ring, or over a link to it.

    `silence_s` without a heartbeat, and /health says 503.
    """
    from blink_runtime.front_end import FrontEnd, FrontEndOptions

    manifest = bundle.manifest
    options = FrontEndOptions(
        **http_options(config),
        model_name=manifest.model_name,
        eos_token_ids=manifest.tokenizer.eos_token_ids,
        tool_format=manifest.tokenizer.tool_format,
        target_name=manifest.target.name,
        front_end_index=front_end_index,
        stall_timeout_ms=round(silence_s * 1000),
    )
    try:
        front_end = FrontEnd(ring, text.codec, text.template, options, entrance)
    except (RuntimeError, ValueError) as error:  # the ring; the address, taken meanwhile
        raise BlinkError(str(error)) from error
    reload_on_signal(front_end)
    return stack.enter_context(front_end)
