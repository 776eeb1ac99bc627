"""The one Jinja environment: template name + context dataclass -> text."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blinkc.errors import InternalError
from blinkc.resources import templates_folder

if TYPE_CHECKING:
    import jinja2


def render_template(name: str, context: object) -> str:
    """Render template `name` with the fields of the dataclass `context`.

    Raises:
        InternalError: the template names something that the context lacks.
    """
    import jinja2

    if not is_dataclass(context) or isinstance(context, type):
        raise InternalError(f"context of {name} is {type(context).__name__}, not a dataclass")
    values: dict[str, Any] = {field.name: getattr(context, field.name) for field in fields(context)}
    try:
        return _environment(templates_folder()).get_template(name).render(values)
    except jinja2.UndefinedError as error:
        raise InternalError(f"template {name}: {error}") from error


@cache
def _environment(folder: Path) -> jinja2.Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # C++ is no HTML
    )
