"""The HTTP options that `run` and `serve-dpu` share: command line -> fields of ServeConfig."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_OPTIONS = (
    click.option("--api-key", "api_keys", multiple=True, help="Ask for this key; may be repeated."),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        help='File with a key, or "NAME KEY", in each line; read again on SIGHUP.',
    ),
    click.option(
        "--tls-cert",
        "tls_certificate",
        type=click.Path(path_type=Path),
        help="PEM, with its chain; read again on SIGHUP.",
    ),
    click.option("--tls-key", type=click.Path(path_type=Path), help="PEM, not encrypted."),
    click.option(
        "--cors-origin",
        "cors_origins",
        multiple=True,
        help="Origin whose pages may use the server, or *; may be repeated.",
    ),
    click.option(
        "--access-log", default="", help="File for a line of JSON a request; - is standard output."
    ),
    click.option("--max-connections", default=1024, show_default=True, help="Past it: 503."),
    click.option("--max-connections-per-address", default=0, help="0: no such limit."),
    click.option(
        "--request-timeout",
        "request_timeout_s",
        default=3600.0,
        show_default=True,
        help="Seconds for a whole request.",
    ),
    click.option(
        "--drain",
        "drain_s",
        default=10.0,
        show_default=True,
        help="Seconds for requests on SIGTERM.",
    ),
)
_FIELDS = (
    "api_keys", "api_key_file", "tls_certificate", "tls_key", "cors_origins", "access_log",
    "max_connections", "max_connections_per_address", "request_timeout_s", "drain_s",
)  # fmt: skip


def http_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command; it gets them in one dict, `http`."""

    @functools.wraps(command)
    def collected(**given: Any) -> Any:
        http = {name: given.pop(name) for name in _FIELDS}
        return command(**given, http=http)

    for option in reversed(_OPTIONS):
        collected = option(collected)
    return collected
