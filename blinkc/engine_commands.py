"""The command line's words about engines: `compile`'s `--engine-*` options, and `rebuild`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from blinkc.config import bytes_from_text
from blinkc.engine.options import EngineOptions
from blinkc.progress import Progress

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NAMES = ("engine_level", "engine_seconds", "engine_profiles", "engine_workspace")


def engine_options(function: _Function) -> _Function:
    """Add the options about building TensorRT plans."""
    options = (
        click.option(
            "--engine-level",
            type=int,
            help="TensorRT's effort, 0 to 5. [default: 2; 3 for RTX; 0 for 8.6]",
        ),
        click.option(
            "--engine-seconds",
            type=float,
            default=0.0,
            help="Time for all plans; effort is lowered to keep it.",
        ),
        click.option(
            "--engine-profiles",
            type=int,
            help="Row ranges that each plan is tuned for, 1 to 8. [default: 3]",
        ),
        click.option(
            "--engine-workspace", metavar="SIZE", help="GPU memory for tactics. [default: 4g]"
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def take_engine_options(options: dict[str, Any]) -> EngineOptions:
    """Read what `engine_options` added."""
    level, seconds, profiles, workspace = (options.get(name) for name in _NAMES)
    return EngineOptions(
        level=level,
        budget_s=seconds or 0.0,
        num_profiles=profiles,
        max_workspace_bytes=bytes_from_text(workspace) if workspace else None,
    )


@click.command("rebuild")
@click.argument("bundle", type=click.Path(path_type=Path))
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Report as JSON on stdout.")
def rebuild_command(bundle: Path, as_json: bool, **options: Any) -> None:
    """Build a bundle's TensorRT plans again, for this machine's TensorRT, GPU and driver.

    Weights, kernels and graphs stay as they are. Needs TensorRT, none of the compiler's tools.
    """
    from blinkc.bundle.rebuild_engines import rebuild_engines

    report = rebuild_engines(bundle, take_engine_options(options), Progress(quiet=as_json))
    if as_json:
        click.echo(json.dumps(report))
    else:
        click.echo(
            f"{bundle}: {report['num_plans']} plans built with {report['title']} in "
            f"{report['seconds']:.1f} s"
        )
