"""Commands of the two-process form: serve-gpu, serve-dpu, slim."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from blink_runtime.cli_http import THREADS, Seconds, http_options

_Function = TypeVar("_Function", bound=Callable[..., Any])


def link_options(function: _Function) -> _Function:
    """Add what both ends of a link are told."""
    for option in (
        click.option(
            "--gid-index",
            default=-1,
            type=click.IntRange(-1, 255),
            help="-1: the RoCE v2 one of an IPv4 address.",
        ),
        click.option(
            "--rdma-device", default="", help="Such as mlx5_0; default: the one with the address."
        ),
        click.option(
            "--transport",
            type=click.Choice(["verbs", "shm"]),
            default="verbs",
            show_default=True,
            help="RDMA, or shared memory between two processes of one machine.",
        ),
    ):
        function = option(function)
    return function


@click.command("serve-gpu")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--listen",
    required=True,
    metavar="ADDRESS",
    help="HOST:PORT that front ends come to, on the link's own network; over shm a name: /blink-a.",
)
@link_options
@click.option("--threads", default=0, type=THREADS, help="Threads of the cpu target; 0: all.")
@click.option("--no-golden", is_flag=True, help="Skip the golden prompt at start.")
@click.option(
    "--weights-from",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with weight files that the bundle refers to; may be repeated.",
)
@click.option(
    "--scheduler", type=click.Choice(["chained", "persistent", "host"]), default="chained"
)
@click.option(
    "--ring-memory",
    type=click.Choice(["host", "gpu"]),
    default="host",
    show_default=True,
    help="gpu: exported as a dma-buf, for a card that reads and writes GPU memory itself; verbs "
    "only. Never run on hardware.",
)
def serve_gpu(
    bundle: Path,
    listen: str,
    transport: str,
    rdma_device: str,
    gid_index: int,
    threads: int,
    no_golden: bool,
    weights_from: tuple[Path, ...],
    scheduler: str,
    ring_memory: str,
) -> None:
    """Own BUNDLE's model and ring, for front ends elsewhere (serve-dpu), until SIGTERM."""
    from blink_runtime.serve_config import ServeConfig
    from blink_runtime.serve_roles import LinkConfig, serve_gpu

    config = ServeConfig(
        num_threads=threads,
        checks_golden=not no_golden,
        weights_from=weights_from,
        scheduler=scheduler,
    )
    link = LinkConfig(
        transport=transport,
        address=listen,
        device=rdma_device,
        gid_index=gid_index,
        ring_memory=ring_memory,
    )
    sys.exit(serve_gpu(bundle, config, link))


@click.command("serve-dpu")
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--connect",
    required=True,
    metavar="ADDRESS",
    help="What serve-gpu was given as --listen.",
)
@link_options
@click.option(
    "--front-end",
    default=0,
    type=click.IntRange(0, 15),
    help="Which of the ring's slot ranges to take; one process each.",
)
@click.option(
    "--wait",
    default=300.0,
    type=Seconds(min=0, max=86400),
    show_default=True,
    help="Seconds for an owner that is not there yet.",
)
@click.option(
    "--listen",
    default="127.0.0.1:8000",
    show_default=True,
    metavar="HOST:PORT",
    help="Where HTTP is served; port 0 takes any free one.",
)
@http_options
def serve_dpu(
    bundle: Path,
    connect: str,
    transport: str,
    rdma_device: str,
    gid_index: int,
    front_end: int,
    wait: float,
    listen: str,
    http: dict[str, Any],
) -> None:
    """Serve HTTP for a ring elsewhere (serve-gpu). Needs only BUNDLE's tokenizer and template."""
    from blink_runtime.serve_config import ServeConfig
    from blink_runtime.serve_roles import LinkConfig, host_and_port, serve_dpu

    host, port = host_and_port(listen, example="127.0.0.1:8000")
    config = ServeConfig(host=host or "0.0.0.0", port=port, **http)
    link = LinkConfig(
        transport=transport,
        address=connect,
        device=rdma_device,
        gid_index=gid_index,
        front_end_index=front_end,
        wait_s=wait,
    )
    sys.exit(serve_dpu(bundle, config, link))


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder.")
def slim(bundle: Path, output: Path) -> None:
    """Copy what serve-dpu needs of BUNDLE: manifest, tokenizer, chat template."""
    from blinkc.bundle.front_end_copy import copy_front_end

    num_bytes = copy_front_end(bundle, output)
    click.echo(f"{output}: {num_bytes / 1e6:.1f} MB, for serve-dpu")
