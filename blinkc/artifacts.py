"""Stage artifacts on disk: decoder graphs and segmented models <-> JSON and ONNX files.

Weight files stand in the JSON by SHA-256, so that an artifact reads the same on another machine;
`WeightFiles` knows where they lie on this one.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkc.build_folder import BuildFolder, hash_file
from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import (
    AttentionSpec,
    DecoderGraph,
    ExpertsSpec,
    ModelSpec,
    WeightEncoding,
    WeightPart,
    WeightRef,
)
from blinkc.surgery.segments import CutOpCall, Segment, SegmentCall, SegmentedModel, ValueSpec

if TYPE_CHECKING:
    import onnx

_PATHS_NAME = "weight_paths.json"


class WeightFiles:
    """Where the weight files lie: SHA-256 -> path, kept in the build's weight_paths.json.

    Args:
        build: the folder that remembers.
        search: folders to look in for files that have moved, by name and size first.
    """

    def __init__(self, build: BuildFolder, search: Iterable[Path] = ()) -> None:
        self._build = build
        # The build keeps checkpoints that had to be rewritten (GGUF) below its own folder.
        self._search = (*search, *sorted((build.path / "weights").glob("*/")))
        self._entries: dict[str, dict[str, Any]] = build.read_json(_PATHS_NAME)

    def add(self, path: Path) -> str:
        """Return a file's SHA-256 and remember its place; an unchanged file is not read again."""
        path = Path(os.path.abspath(path))  # links stay: a hub keeps all else beside them
        state = path.stat()
        for digest, entry in self._entries.items():
            known = (entry["path"], entry["bytes"], entry["mtime_ns"])
            if known == (str(path), state.st_size, state.st_mtime_ns):
                return digest
        digest = hash_file(path)
        self._remember(digest, path)
        return digest

    def path(self, digest: str) -> Path:
        """Return where the file of this content lies.

        Raises:
            BlinkError: it is not at its last place, nor in the folders to search.
        """
        entry = self._entries.get(digest)
        if entry is None:
            raise BlinkError(
                f"the build refers to an unknown weight file {digest[:12]}...",
                hint="run blinkc compile again",
            )
        last = Path(entry["path"])
        if _is_unchanged(last, entry):
            return last
        for candidate in (last, *(folder / last.name for folder in self._search)):
            is_alike = candidate.is_file() and candidate.stat().st_size == entry["bytes"]
            if is_alike and hash_file(candidate) == digest:
                found = Path(os.path.abspath(candidate))
                self._remember(digest, found)
                return found
        raise BlinkError(
            f"the weights {last} are missing or have changed",
            hint="give their folder with --weights-from, or run blinkc compile again",
        )

    def knows_all_of(self, artifact: Path) -> bool:
        """Return whether every weight file that a graph's artifact refers to can be found."""
        for name in ("graph.json", "segmented.json"):
            if not (artifact / name).is_file():
                continue
            data = json.loads((artifact / name).read_text(encoding="utf-8"))
            digests = {part["path"] for weight in data["weights"] for part in weight["parts"]}
            if not digests <= {None, *self._entries}:
                return False
        return True

    def _remember(self, digest: str, path: Path) -> None:
        state = path.stat()
        self._entries[digest] = {
            "path": str(path),
            "bytes": state.st_size,
            "mtime_ns": state.st_mtime_ns,
        }
        if self._build.is_writable:
            self._build.write_json(_PATHS_NAME, self._entries)


def _is_unchanged(path: Path, entry: dict[str, Any]) -> bool:
    try:
        state = path.stat()
    except OSError:
        return False
    return bool((state.st_size, state.st_mtime_ns) == (entry["bytes"], entry["mtime_ns"]))


def save_graph(graph: DecoderGraph, folder: Path, files: WeightFiles) -> None:
    """Write a decoder graph: model.onnx and graph.json."""
    (folder / "model.onnx").write_bytes(graph.model.SerializeToString(deterministic=True))
    data = {"spec": asdict(graph.spec), "weights": _weights_to_json(graph.weights, files)}
    _write_json(folder / "graph.json", data)


def load_graph(folder: Path, files: WeightFiles) -> DecoderGraph:
    """Read what `save_graph` wrote."""
    data = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    return DecoderGraph(
        spec=spec_from_json(data["spec"]),
        model=_load_onnx(folder / "model.onnx"),
        weights=_weights_from_json(data["weights"], files),
    )


def load_spec(folder: Path) -> ModelSpec:
    """Read only the facts of a graph or segmented model, without onnx."""
    for name in ("graph.json", "segmented.json"):
        if (folder / name).is_file():
            return spec_from_json(json.loads((folder / name).read_text(encoding="utf-8"))["spec"])
    raise BlinkError(f"{folder} holds no model", hint="run blinkc compile again")


def save_segmented(model: SegmentedModel, folder: Path, files: WeightFiles) -> None:
    """Write a segmented model: segmented.json and one ONNX file for each distinct segment."""
    segments = []
    for number, segment in enumerate(model.segments):
        name = f"{number:03}_{segment.name}.onnx"
        (folder / name).write_bytes(segment.model.SerializeToString(deterministic=True))
        segments.append(
            {
                "name": segment.name,
                "digest": segment.digest,
                "file": name,
                "activations": [asdict(value) for value in segment.activations],
                "weights": [asdict(value) for value in segment.weights],
                "outputs": [asdict(value) for value in segment.outputs],
            }
        )
    data = {
        "spec": asdict(model.spec),
        "segments": segments,
        "calls": [asdict(call) for call in model.calls],
        "values": {name: asdict(value) for name, value in model.values.items()},
        "weights": _weights_to_json(model.weights, files),
    }
    _write_json(folder / "segmented.json", data)


def load_segmented(folder: Path, files: WeightFiles) -> SegmentedModel:
    """Read what `save_segmented` wrote."""
    data = json.loads((folder / "segmented.json").read_text(encoding="utf-8"))
    segments = tuple(
        Segment(
            name=entry["name"],
            digest=entry["digest"],
            model=_load_onnx(folder / entry["file"]),
            activations=_values_from_json(entry["activations"]),
            weights=_values_from_json(entry["weights"]),
            outputs=_values_from_json(entry["outputs"]),
        )
        for entry in data["segments"]
    )
    return SegmentedModel(
        spec=spec_from_json(data["spec"]),
        segments=segments,
        calls=tuple(_call_from_json(call) for call in data["calls"]),
        values={name: _value_from_json(value) for name, value in data["values"].items()},
        weights=_weights_from_json(data["weights"], files),
    )


def spec_from_json(data: dict[str, Any]) -> ModelSpec:
    """Rebuild a `ModelSpec` from its plain data."""
    values = dict(data)
    values["attention"] = tuple(AttentionSpec(**layer) for layer in data["attention"])
    values["experts"] = tuple(ExpertsSpec(**layer) for layer in data["experts"])
    values["eos_token_ids"] = tuple(data["eos_token_ids"])
    values["notes"] = tuple(data["notes"])
    return ModelSpec(**values)


def _call_from_json(data: dict[str, Any]) -> SegmentCall | CutOpCall:
    values = dict(data)
    for name in ("activations", "weights", "outputs"):
        values[name] = tuple(values[name])
    return CutOpCall(**values) if "op" in values else SegmentCall(**values)


def _values_from_json(data: list[dict[str, Any]]) -> tuple[ValueSpec, ...]:
    return tuple(_value_from_json(value) for value in data)


def _value_from_json(data: dict[str, Any]) -> ValueSpec:
    return ValueSpec(**{**data, "shape": tuple(data["shape"])})


def _weights_to_json(weights: dict[str, WeightRef], files: WeightFiles) -> list[dict[str, Any]]:
    # A list: the order is the order in which targets take the weights.
    return [
        {
            "name": weight.name,
            "shape": weight.shape,
            "dtype": weight.dtype,
            "parts": [_part_to_json(part, files) for part in weight.parts],
            "encoding": asdict(weight.encoding) if weight.encoding else None,
        }
        for weight in weights.values()
    ]


def _part_to_json(part: WeightPart, files: WeightFiles) -> dict[str, Any]:
    data = asdict(part)
    data["path"] = None if part.path is None else files.add(Path(part.path))
    data["inline"] = None if part.inline is None else base64.b64encode(part.inline).decode()
    return data


def _weights_from_json(data: list[dict[str, Any]], files: WeightFiles) -> dict[str, WeightRef]:
    paths: dict[str, Path] = {}
    weights = {}
    for entry in data:
        parts = tuple(_part_from_json(part, files, paths) for part in entry["parts"])
        weights[entry["name"]] = WeightRef(
            name=entry["name"],
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
            parts=parts,
            encoding=WeightEncoding(**entry["encoding"]) if entry["encoding"] else None,
        )
    return weights


def _part_from_json(data: dict[str, Any], files: WeightFiles, paths: dict[str, Path]) -> WeightPart:
    values = dict(data)
    digest = data["path"]
    if digest is not None:
        if digest not in paths:
            paths[digest] = files.path(digest)
        values["path"] = paths[digest]
    values["inline"] = None if data["inline"] is None else base64.b64decode(data["inline"])
    values["shape"] = tuple(data["shape"])
    values["rows"] = None if data["rows"] is None else tuple(data["rows"])
    return WeightPart(**values)


def _load_onnx(path: Path) -> onnx.ModelProto:
    import onnx

    return onnx.load(str(path), load_external_data=False)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, default=list), encoding="utf-8")
