"""A checkpoint on disk or on the hub: path or id in, config and the tensors of its files out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightPart
from blinkc.frontend.weights import SAFETENSORS_DTYPES, safetensors_header
from blinkc.json_file import read_json_object, token_ids_from_json

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
    except Exception as error:  # each model checks its config by code of its own
        is_code = "trust_remote_code" in str(error)
        raise BlinkError(
            f"{where}: transformers cannot read this config: {_text_of(error)}",
            hint="models that bring their own code are not run"
            if is_code
            else "it is damaged, or of a model that this version of transformers does not know",
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
    """Read the ids that end an answer: those of generation_config.json, else the config's.

    Raises:
        BlinkError: generation_config.json is damaged, or an id is none.
    """
    found = getattr(config, "eos_token_id", None)
    where = "config.json"
    path = checkpoint.folder / "generation_config.json"
    if checkpoint.gguf is None and path.is_file():
        values = read_json_object(path)
        if "eos_token_id" in values:
            found, where = values["eos_token_id"], path.name
    return token_ids_from_json(found, where)


def list_tensors(folder: Path) -> dict[str, WeightPart]:
    """Name every tensor of a checkpoint's safetensors files, sharded or not.

    Raises:
        BlinkError: there are none, a shard is missing or damaged, or two hold the same tensor.
    """
    tensors: dict[str, WeightPart] = {}
    for path in _safetensors_files(folder):
        header, _ = safetensors_header(path)
        for key, entry in header.items():
            if key in tensors:
                raise BlinkError(
                    f"tensor {key} lies in {tensors[key].path} and in {path}",
                    hint="fetch the checkpoint again",
                )
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"])
            tensors[key] = WeightPart(
                source="safetensors", key=key, shape=tuple(entry["shape"]), dtype=dtype, path=path
            )
    return tensors


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(name, str) for name in names):
            raise BlinkError(
                f"{index} is no index of shards: its weight_map names no files",
                hint="fetch the checkpoint again",
            )
        shards = sorted(set(names))
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


def _text_of(error: Exception) -> str:
    """Return what an error says; what Python raises by itself does not say enough alone."""
    is_plain = isinstance(error, (ValueError, OSError, KeyError, ImportError))
    return str(error) if is_plain else f"{type(error).__name__}: {error}"
