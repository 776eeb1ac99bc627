"""The HTTP options that `run` and `serve-dpu` share: command line -> fields of ServeConfig."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

PORT = click.IntRange(0, 65535)
THREADS = click.IntRange(0, 1024)
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


class Seconds(click.FloatRange):
    """A number of seconds; the range alone takes "nan", which no comparison holds of."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number, or fail as click does."""
        seconds = float(super().convert(value, param, ctx))
        if seconds != seconds:
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


def _checked_origins(
    _ctx: click.Context, _param: click.Parameter, origins: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse what no browser sends as an origin, and what therefore never matches."""
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise click.BadParameter(
                f"{origin!r} is no origin: write * or https://HOST[:PORT], in small letters and "
                "without a path"
            )
    return origins


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
        callback=_checked_origins,
        help="Origin whose pages may use the server, or *; may be repeated.",
    ),
    click.option(
        "--access-log", default="", help="File for a line of JSON a request; - is standard output."
    ),
    click.option(
        "--max-connections",
        default=1024,
        type=click.IntRange(1, 1 << 20),
        show_default=True,
        help="Past it: 503.",
    ),
    click.option(
        "--max-connections-per-address",
        default=0,
        type=click.IntRange(0, 1 << 20),
        help="0: no such limit.",
    ),
    click.option(
        "--request-timeout",
        "request_timeout_s",
        default=3600.0,
        type=Seconds(min=0.001, max=7 * 86400),
        show_default=True,
        help="Seconds for a whole request.",
    ),
    click.option(
        "--drain",
        "drain_s",
        default=10.0,
        type=Seconds(min=0, max=86400),
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
