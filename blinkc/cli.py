"""The command line of the compiler: `blinkc compile`, `bundle`, `plan`, `inspect`, `verify`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

import blinkc
from blinkc.capture.plan_capture import CaptureConfig
from blinkc.command_group import CommandGroup
from blinkc.config import (
    DTYPES,
    ENGINES,
    QUANTIZATIONS,
    STAGES,
    CompileConfig,
    bytes_from_text,
)
from blinkc.engine_commands import engine_options, rebuild_command, take_engine_options
from blinkc.progress import Progress

_Function = TypeVar("_Function", bound=Callable[..., Any])

SHAPES_HELP = """
\b
--shapes says which (batch, seqlen) sizes get a graph of their own:
  auto                                    from the limits and the memory budget
  decode:1..32@64..8192x2                 batches 1 to 32 at KV lengths 64, 128, ... 8192
  prefill:1,2,4@16..2048+16/decode:auto   prompts a step @ new tokens of the step, by 16
A range FIRST..LAST holds both ends; "+N" is its step (1 if not given), "xN" its factor. "max"
is the axis's limit, "2k" is 2048. Grids of several clauses of one kind are united.
"""


@click.group(cls=CommandGroup, program="blinkc")
@click.version_option(blinkc.__version__, prog_name="blinkc")
def main() -> None:
    """Compile decoder models into bundles that a GPU, or a CPU, serves by itself."""
    # Before torch is loaded. Its threads spin at barriers, which on a machine shared with other
    # work makes a model ten times slower: a thread spins while the one it waits for cannot run.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _model_options(function: _Function) -> _Function:
    """Add the options that `compile` and `plan` share."""
    options = (
        click.argument("model"),
        click.option("--shapes", default="auto", show_default=True, help="Graph sizes; see below."),
        click.option(
            "--target",
            default="cpu",
            show_default=True,
            help="cpu, sm_80, sm_90, sm_100, ...; several with commas.",
        ),
        click.option("--engine", type=click.Choice(ENGINES), default="auto", show_default=True),
        click.option(
            "--dtype", type=click.Choice(DTYPES), help="[default: fp32 on cpu, else bf16]"
        ),
        click.option(
            "--quantization",
            type=click.Choice(QUANTIZATIONS),
            help="Keep the weights of products in 8 or 4 bits; engines tensorrt (10 on) and "
            "tensorrt-rtx.",
        ),
        click.option("--max-batch", type=int, help="Lanes. [default: 8 on cpu, else 64]"),
        click.option(
            "--max-seqlen",
            type=int,
            help="Prompt + output tokens. [default: 2048 on cpu, else 8192]",
        ),
        click.option(
            "--max-prefill-tokens",
            type=int,
            help="New tokens of one prefill step; longer prompts go in chunks. "
            "[default: 256 on cpu, else 2048]",
        ),
        click.option(
            "--num-slots", type=int, help="Requests in the ring. [default: 64 on cpu, else 1024]"
        ),
        click.option(
            "--num-kv-pages", type=int, help="KV cache. [default: all lanes full, or what fits]"
        ),
        click.option(
            "--num-front-ends", type=int, default=1, show_default=True, help="Sharers of the ring."
        ),
        click.option(
            "--logprobs/--no-logprobs",
            default=None,
            help="Room for logprobs in the ring: 64 bytes a token instead of 8. "
            "[default: on cpu only]",
        ),
        click.option("--memory-budget", metavar="SIZE", help="Device memory to use, such as 80g."),
        click.option(
            "--tokenizer", type=click.Path(path_type=Path), help="Folder or tokenizer.json."
        ),
        click.option(
            "--random-weights",
            type=click.IntRange(0, (1 << 63) - 1),
            metavar="SEED",
            help="Draw weights instead of reading them.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _config_from_options(options: dict[str, Any]) -> CompileConfig:
    budget = options["memory_budget"]
    capture = CaptureConfig(
        target=options["target"],
        shapes=options["shapes"],
        max_batch=options["max_batch"],
        max_seqlen=options["max_seqlen"],
        max_prefill_tokens=options["max_prefill_tokens"],
        num_slots=options["num_slots"],
        num_kv_pages=options["num_kv_pages"],
        num_front_ends=options["num_front_ends"],
        memory_budget_bytes=bytes_from_text(budget) if budget else None,
        logprobs=options["logprobs"],
    )
    return CompileConfig(
        model=options["model"],
        target=options["target"],
        engine=options["engine"],
        dtype=options["dtype"],
        quantization=options["quantization"],
        capture=capture,
        engine_options=take_engine_options(options),
        tokenizer=options["tokenizer"],
        random_weights_seed=options["random_weights"],
        until=options.get("until") or STAGES[-1],
        check=options.get("check", False),
        debug_dir=options.get("debug_dir"),
    )


@main.command("compile", epilog=SHAPES_HELP)
@_model_options
@engine_options
@click.option("--until", type=click.Choice(STAGES), help="Stop after this stage.")
@click.option("--check", is_flag=True, help="Compare each engine with onnxruntime (Polygraphy).")
@click.option(
    "--debug-dir", type=click.Path(path_type=Path), help="Copy each stage's artifact here."
)
@click.option(
    "--weights-from",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    help="Where weights lie that have moved.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("build/model"),
    show_default=True,
    help="The BUILD folder; resumed if it is there.",
)
@click.option("--json", "as_json", is_flag=True, help="Report as JSON on stdout.")
def compile_command(
    output: Path, as_json: bool, weights_from: tuple[Path, ...], **options: Any
) -> None:
    """Compile MODEL, a checkpoint folder, hub id, .gguf or .onnx file, into a BUILD folder.

    A killed run goes on where it stopped, on another machine too; stages whose inputs have not
    changed are not run again.
    """
    config = _config_from_options(options)
    from blinkc.pipeline import compile_model

    outcomes = compile_model(
        config, output, weights_from=weights_from, progress=Progress(quiet=as_json)
    )
    if as_json:
        click.echo(json.dumps({"build": str(output), "stages": [asdict(o) for o in outcomes]}))
    elif config.until == STAGES[-1]:
        click.echo(f"{output} is ready; next: blinkc bundle {output} -o bundle/")
    else:
        click.echo(f"{output} is made up to stage {config.until}")


@main.command("plan", epilog=SHAPES_HELP)
@_model_options
@click.option("--json", "as_json", is_flag=True, help="Report as JSON on stdout.")
def plan_command(as_json: bool, **options: Any) -> None:
    """Say what compiling MODEL would make: graphs, memory, engines and time; nothing is built."""
    config = _config_from_options(options)
    from blinkc.plan_report import plan_model, print_plan, report_to_json

    with Progress(quiet=as_json).step("plan", "reading the model's facts"):
        report = plan_model(config)
    if as_json:
        click.echo(json.dumps(report_to_json(report), indent=1))
    else:
        print_plan(report)


@main.command("bundle")
@click.argument("build", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--archive", is_flag=True, help="Write one file instead of a folder.")
@click.option(
    "--weights",
    type=click.Choice(("embed", "reference")),
    default="embed",
    show_default=True,
    help="Copy the weights, or point at the checkpoint's files.",
)
@click.option(
    "--weights-from",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    help="Where weights lie that have moved.",
)
@click.option("--name", help="Model name that the API shows. [default: the checkpoint's]")
@click.option(
    "--tool-format",
    type=click.Choice(("auto", "none", "hermes", "llama3")),
    default="auto",
    show_default=True,
    help="How the model writes calls of tools: <tool_call> around JSON, or JSON alone.",
)
@click.option("--golden/--no-golden", default=True, help="Run a golden prompt (cpu target).")
@click.option(
    "--cross-check/--no-cross-check",
    default=True,
    help="Compare the golden tokens with transformers', where it is installed.",
)
@click.option("--json", "as_json", is_flag=True, help="Report as JSON on stdout.")
def bundle_command(
    build: Path,
    output: Path,
    archive: bool,
    weights: str,
    weights_from: tuple[Path, ...],
    name: str | None,
    tool_format: str,
    golden: bool,
    cross_check: bool,
    as_json: bool,
) -> None:
    """Write the bundle of a finished BUILD: the folder, or file, that blink-runtime serves."""
    from blinkc.bundle.write_bundle import BundleConfig, write_bundle

    config = BundleConfig(
        build=build,
        output=output,
        archive=archive,
        embed_weights=weights == "embed",
        weights_from=weights_from,
        model_name=name,
        tool_format=tool_format,
        golden=golden,
        cross_check=cross_check,
    )
    manifest = write_bundle(config, Progress(quiet=as_json))
    if as_json:
        total = sum(entry.bytes for entry in manifest.files)
        click.echo(json.dumps({"bundle": str(output), "bytes": total}))
    else:
        click.echo(f"{output} is ready; next: blink-runtime run {output}")


@main.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest's facts as JSON.")
def inspect_command(bundle: Path, as_json: bool) -> None:
    """Show what is in a bundle."""
    from blinkc.bundle.inspect_bundle import inspect_text
    from blinkc.bundle.reader import open_bundle

    with open_bundle(bundle, check_hashes=False) as opened:
        if as_json:
            data = opened.manifest.model_dump(mode="json", exclude={"weights"})
            data["num_weights"] = len(opened.manifest.weights)
            click.echo(json.dumps(data, indent=1))
        else:
            click.echo(inspect_text(opened))


@main.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--weights-from",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    help="Where referenced weights lie that have moved.",
)
@click.option("--golden/--no-golden", default=True, help="Run the golden prompt.")
@click.option("--json", "as_json", is_flag=True, help="Report as JSON on stdout.")
def verify_command(
    bundle: Path, weights_from: tuple[Path, ...], golden: bool, as_json: bool
) -> None:
    """Check a bundle: hashes, machine and versions, and that the golden prompt gives its tokens."""
    from blinkc.bundle.verify_bundle import verify_bundle

    report = verify_bundle(
        bundle, weights_from=weights_from, golden=golden, progress=Progress(quiet=as_json)
    )
    click.echo(json.dumps(asdict(report)) if as_json else f"{bundle}: {report.text()}")


@main.command("extract")
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def extract_command(archive: Path, output: Path) -> None:
    """Take an archive out into a bundle folder."""
    from blinkc.bundle.reader import extract_archive, open_bundle

    with open_bundle(archive) as opened:
        extract_archive(opened, output)
    click.echo(f"{output} is ready; next: blink-runtime run {output}")


main.add_command(rebuild_command)

if __name__ == "__main__":
    main()
