"""Facts that lie beside an ONNX model: config.json, genai_config.json -> `ModelFacts`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blinkc.errors import BlinkError
from blinkc.json_file import token_ids_from_json


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What the files beside the model say; None where they say nothing."""

    name: str
    architecture: str = "onnx"
    max_positions: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def read_model_facts(model_path: Path, config_path: Path | None) -> ModelFacts:
    """Read what is there; `config_path` is a config file or a folder (default: the model's)."""
    folder = model_path.parent
    paths: list[Path] = []
    if config_path is not None and config_path.is_file():
        paths = [config_path]
        folder = config_path.parent
    else:
        folder = config_path or folder
        if config_path is not None and not config_path.is_dir():
            raise BlinkError(f"{config_path}: no such config file or folder")
        paths = [
            folder / "config.json",
            folder / "generation_config.json",
            folder / "genai_config.json",
        ]
        if (
            not paths[0].exists() and folder.name == "onnx"
        ):  # hub layout: the model is one folder down
            paths = [folder.parent / path.name for path in paths]
    merged: dict[str, Any] = {}
    for path in paths:
        if path.is_file():
            merged.update(_flattened(path))
    folder_name = model_path.resolve().parent.name
    positions = merged.get("max_position_embeddings") or merged.get("n_positions")
    return ModelFacts(
        name=str(merged.get("_name_or_path") or folder_name or model_path.stem),
        architecture=str(merged.get("model_type", "onnx")),
        max_positions=_single(positions, "max_position_embeddings") or None,
        bos_token_id=_single(merged.get("bos_token_id"), "bos_token_id"),
        eos_token_ids=token_ids_from_json(merged.get("eos_token_id"), "config.json"),
    )


def _flattened(path: Path) -> dict[str, Any]:
    """Read one file; genai_config.json keeps the same facts under `model` by other names."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BlinkError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BlinkError(f"{path}: not a JSON object")
    nested = values.get("text_config")
    if isinstance(nested, dict):
        values = {**values, **nested}
    model = values.get("model")
    if isinstance(model, dict):
        values = {
            "max_position_embeddings": model.get("context_length"),
            "model_type": model.get("type"),
            "eos_token_id": model.get("eos_token_id"),
            "bos_token_id": model.get("bos_token_id"),
        }
    return {name: value for name, value in values.items() if value is not None}


def _single(value: Any, name: str) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise BlinkError(f"config.json: {name} is {value!r}", hint="it is a number")
    return value
