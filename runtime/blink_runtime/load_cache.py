"""What a machine has learned of a bundle, on disk: algorithms, golden tokens, the best placement.

One file for each bundle, GPU, driver and cuBLASLt. A folder that cannot be written costs the next
start a few seconds, no more.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkc.bundle.manifest import manifest_to_bytes

if TYPE_CHECKING:
    from blinkc.bundle.manifest import Manifest


class LoadCache:
    """A few values by name.

    Args:
        manifest: of the bundle; another compilation is another bundle.
        machine: what else the values depend on, such as GPU, driver and library versions.
    """

    def __init__(self, manifest: Manifest, *machine: object) -> None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        text = "\0".join(
            [hashlib.sha256(manifest_to_bytes(manifest)).hexdigest(), *map(str, machine)]
        )
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        self.path = root / "blink" / "loads" / f"{name}.json"
        self._values = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def algorithms(self) -> dict[str, list[int]]:
        """Return measured cuBLASLt algorithms; nothing where the entry is missing or damaged."""
        try:
            entries = self._values.get("algorithms", {}).items()
            return {str(key): list(map(int, words)) for key, words in entries}
        except (ValueError, AttributeError, TypeError):
            return {}

    def golden_tokens(self) -> tuple[int, ...]:
        """Return what the golden prompt gave at an earlier load."""
        try:
            return tuple(map(int, self._values.get("golden", ())))
        except (ValueError, TypeError):
            return ()

    def placement(self) -> str:
        """Return the placement that was measured to be the fastest; empty before."""
        found = self._values.get("placement", "")
        return found if isinstance(found, str) else ""

    def update(self, **values: Any) -> None:
        """Remember values under their names."""
        self._values |= values
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(self._values), encoding="utf-8")
            part.replace(self.path)
        except OSError:
            return
