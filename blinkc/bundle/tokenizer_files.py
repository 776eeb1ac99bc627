"""Takes over a checkpoint's tokenizer: its files -> the bundle's files and manifest entry."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blinkc.bundle.manifest import Tokenizer
from blinkc.errors import BlinkError

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
        (folder / TEMPLATE_NAME).write_text(template, encoding="utf-8")
        values["chat_template"] = TEMPLATE_NAME
        values["tool_format"] = find_tool_format(template) if tool_format == "auto" else tool_format
    ids = {token["content"]: token["id"] for token in data.get("added_tokens", ())}
    special = {t["id"] for t in data.get("added_tokens", ()) if t.get("special")}
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
    return Tokenizer.model_validate(values)


def _compile(tokenizer_json: Path, target: Path, note: Callable[[str], None]) -> bool:
    from blinkc.bundle.compile_tokenizer import compile_tokenizer

    try:
        target.write_bytes(compile_tokenizer(tokenizer_json))
    except BlinkError as error:
        note(f"the tokenizers library will be used: {error.message}")
        return False
    return True


def _chat_template(source: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template: its own file first, then the one named default in the config."""
    file = source / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(source / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


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
    ids = _read_json(source / "generation_config.json").get("eos_token_id")
    if isinstance(ids, int):
        return {ids}
    return {token for token in ids if isinstance(token, int)} if isinstance(ids, list) else set()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BlinkError(f"{path.name} is damaged: {error}", hint="download it again") from error
    if not isinstance(data, dict):
        raise BlinkError(f"{path.name} is no JSON object", hint="download it again")
    return data
