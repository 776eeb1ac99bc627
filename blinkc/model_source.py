"""Finds what MODEL names: checkpoint folder, GGUF or ONNX file, hub id -> `ModelSource`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blinkc.build_folder import digest_of, hash_file
from blinkc.errors import BlinkError

# In the order in which they are copied; the first two make a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_MAX_HEADER_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model that exists. `reference` is what transformers is asked for."""

    reference: str
    path: Path  # folder or file; for a hub id not cached yet, an empty path
    is_onnx: bool
    digest: str  # of what the graph follows from: config and weight headers

    @property
    def name(self) -> str:
        """Return the model's name as its folder or file says it."""
        path = self.path.resolve()
        return path.stem if path.is_file() else path.name

    def weight_files(self) -> list[Path]:
        """Return the files with weights; an ONNX file's external data go by its name.

        Raises:
            BlinkError: one is no regular file.
        """
        if self.path.is_dir():
            return _safetensors_files(self.path)
        found = self.path.parent.glob(f"{self.path.name}*")
        return _regular_files(path for path in found if not path.is_dir())

    def depends_on_seqlen(self) -> bool:
        """Return whether the longest request may change the graph: by rope scaling, or in ONNX."""
        config = self.path / "config.json"
        if not config.is_file():
            return True
        return re.search(rb"longrope|dynamic|\bsu\b", config.read_bytes()) is not None

    def tokenizer_files(self, override: Path | None) -> list[Path]:
        """Return the tokenizer's files: those of `--tokenizer`, else the ones beside the model."""
        folder = self.path if self.path.is_dir() else self.path.parent
        found = {}
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                found[name] = folder / name
        if override is not None:
            if not override.exists():
                raise BlinkError(f"--tokenizer {override} does not exist")
            if override.is_file():
                found["tokenizer.json"] = override
                folder = override.parent
            else:
                folder = override
                found = {n: p for n, p in found.items() if n == "generation_config.json"}
            for name in TOKENIZER_FILES:
                if (folder / name).is_file() and not (override.is_file() and name in found):
                    found[name] = folder / name
        return [found[name] for name in TOKENIZER_FILES if name in found]


def find_model(model: str) -> ModelSource:
    """Find a model by path, or take its name for a hub id.

    Raises:
        BlinkError: the path exists but holds no model, or neither path nor id can be.
    """
    path = Path(model)
    if path.is_file():
        if path.suffix == ".onnx":
            return ModelSource(
                reference=str(path), path=path, is_onnx=True, digest=_onnx_digest(path)
            )
        if path.suffix == ".gguf":
            return ModelSource(
                reference=str(path), path=path, is_onnx=False, digest=_head_digest(path)
            )
        raise BlinkError(
            f"{model} is no model: its name ends in {path.suffix or 'nothing'}",
            hint="give a checkpoint folder, a .gguf or an .onnx file",
        )
    if path.is_dir():
        return _source_from_folder(path)
    if model.count("/") <= 1 and not model.startswith((".", "/")):
        folder = _hub_folder(model)
        if folder is not None:
            source = _source_from_folder(folder)
            return ModelSource(
                reference=model, path=folder, is_onnx=source.is_onnx, digest=source.digest
            )
    raise BlinkError(
        f"{model} is neither a file, a folder nor a model on the hub that can be reached",
        hint="give the folder of a checkpoint (with config.json), or a .gguf or .onnx file",
    )


def _source_from_folder(path: Path) -> ModelSource:
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return ModelSource(
            reference=str(path), path=path, is_onnx=False, digest=_checkpoint_digest(path)
        )
    onnx_files = sorted(path.glob("*.onnx"))
    if len(onnx_files) == 1:
        return ModelSource(
            reference=str(onnx_files[0]),
            path=onnx_files[0],
            is_onnx=True,
            digest=_onnx_digest(onnx_files[0]),
        )
    if len(onnx_files) > 1:
        names = ", ".join(file.name for file in onnx_files[:4])
        raise BlinkError(f"{path} holds several ONNX files ({names})", hint="name one of them")
    if (path / "config.json").is_file():  # weights may be random, or GGUF
        return ModelSource(
            reference=str(path), path=path, is_onnx=False, digest=_checkpoint_digest(path)
        )
    raise BlinkError(
        f"{path} holds no model: no config.json and no .onnx file",
        hint="give the folder of a checkpoint",
    )


def _hub_folder(model: str) -> Path | None:
    """Return the local snapshot of a hub id, downloading it when the hub can be reached."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many kinds; each means: not to be had
        raise BlinkError(
            f"{model} is no local folder and cannot be had from the hub: {error}",
            hint="give the folder of a checkpoint (with config.json)",
        ) from error


def _checkpoint_digest(folder: Path) -> str:
    parts: list[object] = [hash_file(folder / "config.json")]
    parts += [(path.name, _safetensors_header(path)) for path in _safetensors_files(folder)]
    for name in ("generation_config.json", "model.safetensors.index.json"):
        parts += [hash_file(folder / name)] if (folder / name).is_file() else []
    return digest_of(*parts)


def _safetensors_files(folder: Path) -> list[Path]:
    return _regular_files(folder.glob("*.safetensors"))


def _regular_files(paths: Iterable[Path]) -> list[Path]:
    """Return the paths in order; to open a pipe would be to wait for one who writes to it."""
    found = sorted(paths)
    for path in found:
        if path.exists() and not path.is_file():
            raise BlinkError(
                f"{path} is no regular file", hint="weights are read from regular files alone"
            )
    return found


def _safetensors_header(path: Path) -> str:
    """Hash a safetensors header and the file's size: names, shapes and places, no values."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size, _MAX_HEADER_BYTES):
            raise BlinkError(f"{path} is not a whole safetensors file", hint="download it again")
        header = file.read(length)
    return hashlib.sha256(header + str(size).encode()).hexdigest()


def _onnx_digest(path: Path) -> str:
    if path.stat().st_size > 2 << 30:
        raise BlinkError(f"{path} is over 2 GiB", hint="save its weights as external data")
    return digest_of(path.name, hash_file(path))


def _head_digest(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(16 << 20)  # a GGUF's metadata and tensor table come first
    return digest_of(hashlib.sha256(head).hexdigest(), path.stat().st_size)
