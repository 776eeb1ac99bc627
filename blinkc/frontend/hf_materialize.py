"""Have transformers load a checkpoint and write it again under the model's names: GGUF's way.

Also taken by checkpoints whose tensors transformers rearranges in ways that references cannot
express. It needs memory for the whole model; the file it writes is kept and found again by
content.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightPart
from blinkc.frontend.hf_checkpoint import Checkpoint, list_tensors


def materialize_checkpoint(
    checkpoint: Checkpoint, *, dtype: str, cache_dir: Path | None
) -> dict[str, WeightPart]:
    """Return the tensors of the rewritten checkpoint in `cache_dir`, or the user's cache folder.

    Raises:
        BlinkError: transformers cannot load it.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from blinkc.frontend.hf_model import TORCH_DTYPES

    folder = (cache_dir or default_cache_dir()) / f"{_fingerprint(checkpoint)}-{dtype}"
    target = folder / "model.safetensors"
    if not target.is_file():
        gguf: dict[str, Any] = {"gguf_file": checkpoint.gguf.name} if checkpoint.gguf else {}
        try:
            model = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder, dtype=TORCH_DTYPES[dtype], local_files_only=True, **gguf
            )
        except (ValueError, OSError, KeyError, ImportError, RuntimeError) as error:
            raise BlinkError(
                f"transformers cannot load {checkpoint.gguf or checkpoint.folder}: {error}"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"partial-{os.getpid()}"
        save_file(_unshared(model.state_dict(), torch), partial)
        partial.replace(target)
    return list_tensors(folder)


def default_cache_dir() -> Path:
    """Name the folder for rewritten checkpoints: $XDG_CACHE_HOME/blinkc or ~/.cache/blinkc."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "blinkc"


def _unshared(state: dict[str, Any], torch: Any) -> dict[str, Any]:
    """Keep one name of each storage: tied names are found again through the model."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in state.items():
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        kept[name] = tensor.to(torch.device("cpu")).contiguous()
    return kept


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Hash names, sizes and times of the files: contents of many gigabytes would take too long."""
    paths = [checkpoint.gguf] if checkpoint.gguf else sorted(checkpoint.folder.glob("*.*"))
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        digest.update(f"{path.resolve()}|{status.st_size}|{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]
