"""The command that makes a build again: pasted into a shell it gives the same config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blinkc import cli
from blinkc.command_text import compile_command
from blinkc.config import CompileConfig
from tests.cli.fake_stages import make_model

NOT_OF_THE_BUILD = {"output", "as_json", "weights_from"}


def config_of(*words: str) -> CompileConfig:
    """Return what `blinkc compile` would make of these words."""
    with cli.compile_command.make_context("compile", list(words)) as context:
        options: dict[str, Any] = dict(context.params)
    return cli._config_from_options(
        {name: value for name, value in options.items() if name not in NOT_OF_THE_BUILD}
    )


def paste(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell whose `blinkc` prints its arguments as JSON."""
    program = folder / "bin" / "blinkc"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    return subprocess.run(
        ["sh", "-c", command], env={"PATH": path, **variables}, capture_output=True, text=True
    )


MANY = (
    "--target sm_90,sm_100 --engine tensorrt-rtx --shapes decode:1..32@64..8192x2/prefill:auto "
    "--dtype fp16 --quantization int4 --max-batch 32 --max-seqlen 4096 --max-prefill-tokens 512 "
    "--num-slots 77 --num-kv-pages 999 --num-front-ends 2 --no-logprobs --memory-budget 40g "
    "--random-weights 5 --engine-level 1 --engine-seconds 2.5 --engine-profiles 2 "
    "--engine-workspace 1g"
)


@pytest.mark.parametrize("options", ["", "--logprobs", MANY])
def test_a_pasted_command_gives_the_same_config(options: str, tmp_path: Path) -> None:
    """The bug: the model's folder, and half of the options, were left out."""
    model = make_model(tmp_path / "a model")
    tokenizer = model / "tokenizer.json"
    config = config_of(str(model), "--tokenizer", str(tokenizer), *options.split())
    command = compile_command(config)
    assert str(tmp_path) not in command  # it travels with the bundle
    done = paste(command, tmp_path, MODEL=str(model), TOKENIZER=str(tokenizer))
    name, *words = json.loads(done.stdout)
    assert name == "compile" and words[-2:] == ["-o", "BUILD"]
    assert config_of(*words) == config


def test_every_option_of_compile_is_known_here() -> None:
    """Guards a new option that the command would leave out."""
    names = {name for option in cli.compile_command.params for name in option.opts}
    said = set(MANY.split()) | {"model", "--logprobs", "--tokenizer"}
    assert {name for name in names if name not in said} == {
        "--until", "--check", "--debug-dir", "--weights-from", "-o", "--output", "--json"
    }  # fmt: skip


def test_a_model_that_is_not_named_is_asked_for(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a model; $(touch x)")
    done = paste(compile_command(config_of(str(model))), tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    assert "MODEL: set it to where a model touch x lies" in done.stderr


def test_a_hub_id_is_whole(tmp_path: Path) -> None:
    """The bug: "owner/name" came without its owner."""
    done = paste(compile_command(config_of("owner/name")), tmp_path)
    assert json.loads(done.stdout)[:2] == ["compile", "owner/name"]
