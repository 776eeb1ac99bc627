"""Weights for a bundle that has none: the manifest must name what lies in the files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import write_weights


def weight(name: str, *shape: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": "bf16", "seed": 1, **more}


def test_files_hold_what_the_manifest_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_weights, "FILE_BYTES", 10_000)
    monkeypatch.setattr(write_weights, "BLOCK_BYTES", 4096)
    kept = {"name": "table", "shape": [3], "dtype": "fp32", "parts": [{"file": "w.safetensors"}]}
    weights = [weight("a", 100, 64), weight("norm", 64), kept, weight("b", 33, 7)]
    manifest = {"files": [{"path": "w.safetensors"}], "weights": weights}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    num_bytes, _ = write_weights.write_weights(tmp_path)
    found = json.loads((tmp_path / "manifest.json").read_text())
    entries = {entry["path"]: entry for entry in found["files"]}
    assert set(entries) == {"w.safetensors", "weights-0.bin", "weights-1.bin"}
    assert found["weights"][2] == kept
    for name in ("weights-0.bin", "weights-1.bin"):
        data = (tmp_path / name).read_bytes()
        assert entries[name]["bytes"] == len(data)
        assert entries[name]["sha256"] == hashlib.sha256(data).hexdigest()
    assert num_bytes == sum(entries[f"weights-{n}.bin"]["bytes"] for n in (0, 1))
    for number in (0, 1, 3):
        entry = found["weights"][number]
        assert "seed" not in entry
        (part,) = entry["parts"]
        assert part["bytes"] == 2 * np.prod(entry["shape"])
        assert part["offset"] % write_weights.ALIGNMENT_BYTES == 0
        data = (tmp_path / part["file"]).read_bytes()[part["offset"] :][: part["bytes"]]
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        if entry["name"] == "norm":
            assert (values == 1).all()
        else:
            assert 0 < np.abs(values).max() <= write_weights.SCALE
            assert np.unique(values).size > values.size // 20
