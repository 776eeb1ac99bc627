"""The command line: heavy packages stay out until needed; errors come without traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from blinkc import model_facts
from blinkc.cli import main
from blinkc.command_group import EXIT_USER_ERROR, CommandGroup
from blinkc.config import CompileConfig, bytes_from_text
from blinkc.errors import BlinkError
from blinkc.model_facts import ModelFacts
from tests.bundle.small_bundle import write_small_bundle
from tests.capture.test_plan import LLAMA_8B, LLAMA_8B_BYTES

# What may not be there where bundles are only served, and costs seconds where it is.
BLOCKED = (
    "torch", "onnx", "onnxruntime", "onnx_graphsurgeon", "onnxscript", "transformers", "cuda",
    "tensorrt", "numpy", "polygraphy", "safetensors", "tokenizers", "rich", "huggingface_hub",
)  # fmt: skip

_BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is blocked by the test")

sys.meta_path.insert(0, Blocker())
"""


def run_blocked(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with every heavy package missing."""
    return subprocess.run(
        [sys.executable, "-c", _BLOCKER + program, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_torch_is_told_not_to_spin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: beside other work the golden prompt's reference took ten times as long."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    CliRunner().invoke(main, ["inspect", str(tmp_path)])
    assert os.environ["OMP_WAIT_POLICY"] == "active"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["compile", "--help"], ["plan", "--help"], ["--version"]]
)
def test_help_needs_no_heavy_package(arguments: list[str]) -> None:
    result = run_blocked("from blinkc.cli import main\nmain()", *arguments)
    assert result.returncode == 0, result.stderr
    assert "blinkc" in result.stdout or "Usage" in result.stdout


def test_bundles_are_inspected_and_verified_without_heavy_packages(tmp_path: Path) -> None:
    write_small_bundle(tmp_path / "b")
    result = run_blocked("from blinkc.cli import main\nmain()", "verify", str(tmp_path / "b"))
    assert result.returncode == 0, result.stderr
    result = run_blocked("from blinkc.cli import main\nmain()", "inspect", str(tmp_path / "b"))
    assert "LlamaForCausalLM" in result.stdout
    program = (
        "import sys, pathlib\nfrom blinkc.bundle.reader import open_bundle\n"
        "with open_bundle(pathlib.Path(sys.argv[1])) as b, b.weights() as w:\n"
        "    print(len(w.addresses))"
    )
    assert run_blocked(program, str(tmp_path / "b")).stdout.strip() == "3"


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compile", "/nowhere", "-o", "x"], "neither a file, a folder nor"),
        (["compile", "m", "--shapes", "decode:1..8"], "^"),
        (["compile", "m", "--target", "tpu"], "--target tpu is unknown"),
        (["compile", "m", "--target", "sm_77"], "--target sm_77 is unknown"),
        (["plan", "m", "--target", "sm_90,sm_999"], "--target sm_90,sm_999 is unknown"),
        (["compile", "m", "--dtype", "bf16"], "computes in fp32"),
        (["compile", "m", "--engine", "tensorrt"], "does not run on the cpu target"),
        (["compile", "m", "--max-batch", "0"], "--max-batch is 0"),
        (["plan", "m", "--memory-budget", "lots"], "no memory size"),
        (["verify", "/nowhere"], "does not exist"),
        (["bundle", "/nowhere", "-o", "x"], "is not a build"),
    ],
)
def test_user_errors_have_no_traceback(arguments: list[str], words: str) -> None:
    code, output = invoke(*arguments)
    assert code == EXIT_USER_ERROR
    assert words in output
    assert output.startswith("blinkc: ")
    assert "Traceback" not in output


def test_folder_that_may_not_be_written_is_no_traceback() -> None:
    code, output = invoke("bundle", "/proc", "-o", "/proc/x")
    assert code == EXIT_USER_ERROR and "Traceback" not in output
    result = CliRunner().invoke(main, ["extract", "/proc/self/mem", "-o", "/proc/x"])
    assert result.exit_code == EXIT_USER_ERROR


def test_failed_copy_names_both_files() -> None:
    # Guards: of a full disk the error named the file that was read.
    @click.group(cls=CommandGroup, program="p")
    def group() -> None:
        pass

    @group.command("copy")
    def copy() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "from", None, "to")

    result = CliRunner().invoke(group, ["copy"])
    assert result.output == "p: from -> to: No space left on device\n"


@pytest.fixture
def _llama(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(config: CompileConfig) -> ModelFacts:
        return ModelFacts(spec=LLAMA_8B, num_weight_bytes=LLAMA_8B_BYTES)

    monkeypatch.setattr(model_facts, "facts_from_model", facts)


@pytest.mark.usefixtures("_llama")
def test_plan_prints_sums_and_grids() -> None:
    code, output = invoke("plan", "llama", "--target", "sm_90")
    assert code == 0
    for words in ("weights", "15316.5 MiB", "KV pages", "ring", "budget", "\u25a0", "33 segment"):
        assert words in output


@pytest.mark.usefixtures("_llama")
def test_plan_says_what_it_waits_for() -> None:
    """The bug: it was silent for as long as importing torch and reading a config took."""
    told = CliRunner().invoke(main, ["plan", "llama", "--target", "sm_90"])
    assert "reading the model's facts" in told.stderr
    assert "reading" not in told.stdout
    assert CliRunner().invoke(main, ["plan", "llama", "--json"]).stderr == ""


@pytest.mark.usefixtures("_llama")
def test_plan_as_json_adds_up() -> None:
    code, output = invoke("plan", "llama", "--target", "sm_90", "--json")
    assert code == 0
    data: dict[str, Any] = json.loads(output)
    memory = data["memory"]
    parts = [v for k, v in memory.items() if k not in ("total_bytes", "budget_bytes")]
    assert sum(parts) == memory["total_bytes"] <= memory["budget_bytes"]
    assert 650 <= len(data["keys"]) <= 1000


@pytest.mark.usefixtures("_llama")
def test_model_too_large_is_said_before_any_work() -> None:
    code, output = invoke("plan", "llama", "--target", "sm_90", "--memory-budget", "12g")
    assert code == EXIT_USER_ERROR
    assert "too large" in output and "12.000 GiB" in output


def test_inspect_as_json_leaves_the_weight_table_out(tmp_path: Path) -> None:
    write_small_bundle(tmp_path / "b")
    code, output = invoke("inspect", str(tmp_path / "b"), "--json")
    data = json.loads(output)
    assert code == 0 and data["num_weights"] == 3 and "weights" not in data


@pytest.mark.parametrize(
    ("text", "size"),
    [("80g", 80 << 30), ("1.5GiB", 3 << 29), ("512 MB", 512 << 20), ("4096", 4096), ("2k", 2048)],
)
def test_memory_sizes(text: str, size: int) -> None:
    assert bytes_from_text(text) == size


def test_memory_size_that_is_none() -> None:
    for text in ("", "g", "-1g", "1x", "1e9", "0", "0.0g", "9" * 400):
        with pytest.raises(BlinkError):
            bytes_from_text(text)


@pytest.mark.parametrize(
    "words",
    [
        ("--random-weights", "-1"),
        ("--random-weights", "99999999999999999999"),
        ("--engine-seconds", "nan"),
        ("--engine-seconds", "-1"),
        ("--weights-from", "/nonexistent"),
        ("--memory-budget", "0"),
    ],
    ids=" ".join,
)
def test_a_value_that_cannot_be_is_refused_before_anything_is_made(
    words: tuple[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "build"
    code, text = invoke("compile", str(tmp_path), *words, "-o", str(output))
    assert code in (1, 2) and words[1] in text
    assert not output.exists()
