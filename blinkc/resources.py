"""Finds the templates and headers of the compiler, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

from blinkc.errors import InternalError

_PACKAGE = Path(__file__).resolve().parent


def templates_folder() -> Path:
    """Return the folder of the Jinja templates."""
    return _find("templates", _PACKAGE.parent / "templates")


def include_folder() -> Path:
    """Return the folder that `#include <blink/...>` is relative to."""
    return _find("include", _PACKAGE.parent / "runtime" / "include")


def _find(name: str, in_checkout: Path) -> Path:
    # The wheel installs both below blinkc/_resources; a checkout or editable install has sources.
    candidates = (_PACKAGE / "_resources" / name, in_checkout)
    for folder in candidates:
        if folder.is_dir():
            return folder
    places = " or ".join(str(folder) for folder in candidates)
    raise InternalError(f"{name} is neither at {places}; the installation is incomplete")
