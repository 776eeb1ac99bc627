"""Reads a checkpoint's small JSON files: path -> object, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blinkc.errors import BlinkError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        BlinkError: it is damaged, or no object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BlinkError(f"{path.name} is damaged: {error}", hint="download it again") from error
    if not isinstance(data, dict):
        raise BlinkError(f"{path.name} is no JSON object", hint="download it again")
    return data


def token_ids_from_json(value: Any, where: str) -> tuple[int, ...]:
    """Return the ids that end an answer, as configs have them: one, a list of some, or null.

    Negative ones, by which some configs say that there is none, are left out.

    Raises:
        BlinkError: one is no integer.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if item is not None and (not isinstance(item, int) or isinstance(item, bool)):
            raise BlinkError(
                f"{where}: eos_token_id is {value!r}", hint="it is a token id or a list of some"
            )
    return tuple(item for item in ids if item is not None and item >= 0)
