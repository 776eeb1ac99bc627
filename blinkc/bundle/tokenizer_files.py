"""Takes over a checkpoint's tokenizer: its files -> the bundle's files and manifest entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from blinkc.bundle.manifest import Tokenizer
from blinkc.errors import BlinkError
from blinkc.json_file import read_json_object, token_ids_from_json

COMPILED_NAME = "tokenizer.bin"
TEMPLATE_NAME = "chat_template.jinja"


def write_tokenizer(
    source: Path,
    folder: Path,
    *,
    spec_bos_id: int | None,
    spec_eos_ids: Sequence[int],
    note: Callable[[str], None],
    tool_format: str = "auto",
) -> Tokenizer:
    """Copy and compile the tokenizer in `source` into `folder`.

    Args:
        spec_bos_id: the model's own bos id, used where the tokenizer names none.
        spec_eos_ids: the model's own eos ids; generation_config.json's come on top.
        note: is told what the user should know, e.g. that the tokenizer was not compiled.
        tool_format: how the model writes calls of tools; auto: as its template says.
    """
    tokenizer_json = source / "tokenizer.json"
    config = _read_json(source / "tokenizer_config.json")
    if not tokenizer_json.is_file():
        note("there is no tokenizer.json: the bundle takes token ids only (or give --tokenizer)")
        return Tokenizer(bos_token_id=spec_bos_id, eos_token_ids=tuple(spec_eos_ids))
    data = _read_json(tokenizer_json)
    added = _added_tokens(data)
    (folder / "tokenizer.json").write_bytes(tokenizer_json.read_bytes())
    values: dict[str, Any] = {"tokenizer_json": "tokenizer.json"}
    if (source / "tokenizer_config.json").is_file():
        text = (source / "tokenizer_config.json").read_bytes()
        (folder / "tokenizer_config.json").write_bytes(text)
        values["config"] = "tokenizer_config.json"
    if _compile(tokenizer_json, folder / COMPILED_NAME, note):
        values["compiled"] = COMPILED_NAME
    template = _chat_template(source, config)
    if template is not None:
        _check_template(template)
        (folder / TEMPLATE_NAME).write_text(template, encoding="utf-8")
        values["chat_template"] = TEMPLATE_NAME
        values["tool_format"] = find_tool_format(template) if tool_format == "auto" else tool_format
    ids = {token["content"]: token["id"] for token in added}
    special = {token["id"] for token in added if token.get("special")}
    bos, eos = _token_text(config.get("bos_token")), _token_text(config.get("eos_token"))
    eos_ids = set(spec_eos_ids) | _generation_eos_ids(source)
    if eos is not None and eos in ids:
        eos_ids.add(ids[eos])
    values |= {
        "bos_token": bos,
        "eos_token": eos,
        "bos_token_id": ids.get(bos, spec_bos_id) if bos is not None else spec_bos_id,
        "eos_token_ids": tuple(sorted(eos_ids)),
        "special_token_ids": tuple(sorted(special)),
    }
    try:
        return Tokenizer.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BlinkError(
            f"the tokenizer's files or the model's config give {where} a value that no bundle can "
            f"hold: {first['msg']}"
        ) from error


def _compile(tokenizer_json: Path, target: Path, note: Callable[[str], None]) -> bool:
    from blinkc.bundle.compile_tokenizer import compile_tokenizer

    try:
        target.write_bytes(compile_tokenizer(tokenizer_json))
    except BlinkError as error:
        _check_library(tokenizer_json)
        note(f"the tokenizers library will be used: {error.message}")
        return False
    return True


def _check_library(tokenizer_json: Path) -> None:
    """Raise `BlinkError` where the tokenizers library, if it is here, cannot read the file."""
    try:
        import tokenizers
    except ImportError:
        return
    try:
        tokenizers.Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the library raises plain Exception
        raise BlinkError(
            f"the tokenizers library refuses tokenizer.json: {error}", hint="download it again"
        ) from error


def _chat_template(source: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template: its own file first, then the one named default in the config."""
    file = source / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BlinkError(f"{file.name} is no UTF-8 text: {error}") from error
    template = _read_json(source / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, list):
        try:
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        except (KeyError, TypeError) as error:
            raise BlinkError(
                f"tokenizer_config.json: chat_template is no list of names with templates: {error}",
                hint="download it again",
            ) from error
    if template is not None and not isinstance(template, str):
        raise BlinkError(f"tokenizer_config.json: chat_template is no text: {template!r:.80}")
    return template


def _check_template(template: str) -> None:
    """Raise `BlinkError` where a chat template cannot be compiled: no server would start."""
    from blink_runtime.chat_template import ChatTemplate, ChatTemplateError

    try:
        template.encode()
        ChatTemplate(template, {})
    except (ChatTemplateError, UnicodeError) as error:
        raise BlinkError(str(error), hint="mend the model's chat template") from error


def _added_tokens(data: dict[str, Any]) -> list[dict[str, Any]]:
    added = data.get("added_tokens") or []
    if not isinstance(added, list) or not all(
        isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and type(token.get("id")) is int
        for token in added
    ):
        raise BlinkError(
            "tokenizer.json: added_tokens is no list of tokens with content and id",
            hint="download it again",
        )
    return added


def find_tool_format(template: str) -> str:
    """Return how a model writes calls of tools, by what its chat template shows of earlier calls.

    `hermes` is `<tool_call>` around JSON (Qwen, Hermes), `llama3` is JSON with `parameters`, whose
    answers are read back under the role ipython. Others, such as calls as XML or as Python, are
    `none`: tools are refused by name.
    """
    if "tools" not in template:
        return "none"
    if "<tool_call>" in template:
        return "none" if "<function=" in template or "<arg_key>" in template else "hermes"
    is_llama3 = '"parameters": ' in template and "ipython" in template
    return "llama3" if is_llama3 else "none"


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _generation_eos_ids(source: Path) -> set[int]:
    name = "generation_config.json"
    return set(token_ids_from_json(_read_json(source / name).get("eos_token_id"), name))


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
