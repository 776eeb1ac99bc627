"""A checkpoint on disk or on the hub: path or id in, config and the tensors of its files out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightPart
from blinkc.frontend.weights import SAFETENSORS_DTYPES, safetensors_header

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Where a model lies; `gguf` is the file when it is one."""

    name: str
    folder: Path
    gguf: Path | None = None


def find_checkpoint(path_or_id: str) -> Checkpoint:
    """Find a checkpoint folder, a GGUF file or, failing these, a model of the hub.

    Raises:
        BlinkError: there is none, or the hub cannot be reached.
    """
    path = Path(path_or_id)
    if path.is_dir():
        return Checkpoint(name=path.resolve().name, folder=path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise BlinkError(f"{path} is neither a checkpoint folder nor a .gguf file")
        return Checkpoint(name=path.stem, folder=path.parent, gguf=path)
    if path_or_id.startswith(("/", ".", "~")) or path_or_id.count("/") > 1:
        raise BlinkError(f"there is no checkpoint at {path_or_id}")
    return Checkpoint(name=path_or_id.rsplit("/", 1)[-1], folder=_fetch(path_or_id))


def _fetch(hub_id: str) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        httpx.HTTPError,
        OSError,
    ) as error:
        raise BlinkError(
            f"{hub_id} is no folder here and cannot be fetched from the hub: {error}",
            hint="give the path of a checkpoint folder, or check the id, the network and HF_TOKEN",
        ) from error


def read_config(checkpoint: Checkpoint) -> Any:
    """Read the config of a decoder.

    Raises:
        BlinkError: it is missing, unknown, quantized or no decoder's.
    """
    from transformers import AutoConfig

    where = checkpoint.gguf or checkpoint.folder / "config.json"
    if not where.is_file():
        raise BlinkError(f"{where} does not exist", hint="a checkpoint folder holds a config.json")
    gguf = {"gguf_file": checkpoint.gguf.name} if checkpoint.gguf else {}
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True, **gguf)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise BlinkError(
            f"{where}: transformers cannot read this config: {error}",
            hint="models that bring their own code are not run",
        ) from error
    if not checkpoint.gguf and getattr(config, "quantization_config", None):
        raise BlinkError(
            f"{where}: the checkpoint is quantized",
            hint="use a checkpoint in fp32, fp16 or bf16, or a GGUF file",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise BlinkError(
            f"{where}: `{config.model_type}` is an encoder-decoder",
            hint="only decoders can be compiled",
        )
    return config


def eos_token_ids(checkpoint: Checkpoint, config: Any) -> tuple[int, ...]:
    """Read the ids that end an answer: those of generation_config.json, else the config's."""
    found = getattr(config, "eos_token_id", None)
    path = checkpoint.folder / "generation_config.json"
    if checkpoint.gguf is None and path.is_file():
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id", found)
    ids: Sequence[Any] = found if isinstance(found, list) else [found]
    return tuple(int(item) for item in ids if item is not None)


def list_tensors(folder: Path) -> dict[str, WeightPart]:
    """Name every tensor of a checkpoint's safetensors files, sharded or not.

    Raises:
        BlinkError: there are none, or a shard is missing or damaged.
    """
    tensors: dict[str, WeightPart] = {}
    for path in _safetensors_files(folder):
        header, _ = safetensors_header(path)
        for key, entry in header.items():
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"])
            tensors[key] = WeightPart(
                source="safetensors", key=key, shape=tuple(entry["shape"]), dtype=dtype, path=path
            )
    return tensors


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            shards = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BlinkError(f"{index} is no index of shards: {error}") from error
        for shard in shards:
            if "/" in shard or not (folder / shard).is_file():
                raise BlinkError(
                    f"{index} names shard {shard}, which is not there",
                    hint="fetch the checkpoint again",
                )
        return [folder / shard for shard in shards]
    if single.is_file():
        return [single]
    if list(folder.glob("*.bin")) or list(folder.glob("*.pth")):
        raise BlinkError(
            f"{folder} holds weights as pickle files (.bin), which can run code when read",
            hint="convert them: save_pretrained of a recent transformers writes safetensors",
        )
    raise BlinkError(
        f"{folder} holds no model.safetensors",
        hint="with a config alone, ask for random weights (--random-weights SEED)",
    )
