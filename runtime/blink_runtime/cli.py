"""The command line of the runtime: run, tokenize, top, trace, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from blink_runtime import __version__
from blink_runtime.cli_http import PORT, THREADS, Seconds, http_options
from blink_runtime.cli_roles import serve_dpu, serve_gpu, slim
from blinkc.command_group import CommandGroup


@click.group(cls=CommandGroup, program="blink-runtime")
@click.version_option(__version__)
def main() -> None:
    """Serve bundles made by blinkc."""


@main.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8000, type=PORT, show_default=True, help="Port; 0 takes any free one."
)
@http_options
@click.option(
    "--threads",
    default=0,
    type=THREADS,
    help="Threads of the cpu target; 0: all that this process may use.",
)
@click.option("--no-golden", is_flag=True, help="Skip the golden prompt at start.")
@click.option(
    "--weights-from",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with weight files that the bundle refers to; may be repeated.",
)
@click.option(
    "--scheduler",
    type=click.Choice(["chained", "persistent", "host", "auto"]),
    default="chained",
    show_default=True,
    help="Who launches the next graph on a GPU: the last node of each, a resident block, the host; "
    "auto measures once and remembers.",
)
def run(
    bundle: Path,
    host: str,
    port: int,
    threads: int,
    no_golden: bool,
    weights_from: tuple[Path, ...],
    scheduler: str,
    http: dict[str, Any],
) -> None:
    """Serve BUNDLE over HTTP until SIGTERM."""
    from blink_runtime.serve import serve
    from blink_runtime.serve_config import ServeConfig

    config = ServeConfig(
        host=host,
        port=port,
        num_threads=threads,
        checks_golden=not no_golden,
        weights_from=weights_from,
        scheduler=scheduler,
        **http,
    )
    sys.exit(serve(bundle, config))


@main.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.argument("text", required=False)
@click.option("--decode", is_flag=True, help="Read ids, write their text.")
@click.option("--pieces", is_flag=True, help="Show each id with its text.")
def tokenize(bundle: Path, text: str | None, decode: bool, pieces: bool) -> None:
    """Turn TEXT (or standard input) into the ids that BUNDLE's model sees."""
    from blink_runtime.tokenize import run_tokenize

    run_tokenize(bundle, text if text is not None else sys.stdin.read(), decode, pieces)


@main.command()
@click.option("--ring", "ring_name", help="Name of the ring; default: the only one running.")
@click.option("--once", is_flag=True, help="Print one view and end, as into a file or pipe.")
@click.option(
    "--interval",
    default=0.5,
    type=Seconds(min=0.01, max=3600),
    show_default=True,
    help="Seconds between two views.",
)
def top(ring_name: str | None, once: bool, interval: float) -> None:
    """Watch slots, lanes, pages and steps of a running server."""
    from blink_runtime.top import run_top

    run_top(ring_name, once=once, interval_s=interval)


@main.command()
@click.option("--ring", "ring_name", help="Name of the ring; default: the only one running.")
@click.option(
    "-o",
    "--output",
    default="trace.json",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "--seconds",
    default=5.0,
    type=Seconds(min=0, max=86400),
    show_default=True,
    help="How long to watch.",
)
def trace(ring_name: str | None, output: Path, seconds: float) -> None:
    """Record the steps and requests of a running server."""
    from blink_runtime.step_trace import run_trace

    run_trace(ring_name, output, seconds)


@main.command()
def doctor() -> None:
    """Say what this machine has of what a GPU target needs."""
    from blink_runtime.cuda_doctor import print_findings

    sys.exit(print_findings(click.echo))


for command in (serve_gpu, serve_dpu, slim):
    main.add_command(command)


if __name__ == "__main__":
    main()
