"""What a bundle takes over from a checkpoint's tokenizer files: the format of calls of tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blinkc.bundle.manifest import Tokenizer
from blinkc.bundle.tokenizer_files import find_tool_format, write_tokenizer
from blinkc.errors import BlinkError
from tests.bundle import tiny_model

# What the families' templates say about calls; the rest of them does not matter here.
HERMES = """{%- if tools %}{{- "<tools>" }}{%- endif %}{{- '<tool_call>\\n{"name": "' }}"""
LLAMA3 = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
{%- if message.role == "ipython" %}"""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, "hermes"),
        (LLAMA3, "llama3"),
        (HERMES + "<function=example>", "none"),  # calls as XML
        (HERMES + "<arg_key>", "none"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "none"),
        ("{{ messages[0].content }}", "none"),
    ],
)
def test_format_of_calls_by_template(template: str, expected: str) -> None:
    assert find_tool_format(template) == expected


def test_it_is_recorded_and_may_be_overridden(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "bundle"
    source.mkdir()
    folder.mkdir()
    tiny_model.write_tokenizer(source)
    arguments = {"spec_bos_id": None, "spec_eos_ids": (), "note": lambda _: None}
    config = {"chat_template": HERMES}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    assert write_tokenizer(source, folder, **arguments).tool_format == "hermes"
    forced = write_tokenizer(source, folder, **arguments, tool_format="none")
    assert forced.tool_format == "none"
    (source / "tokenizer_config.json").write_text("{}")
    assert write_tokenizer(source, folder, **arguments).tool_format == "none"


def _write(source: Path) -> Tokenizer:
    """Write what `source` holds, with a bundle's folder beside it."""
    folder = source.parent / "bundle"
    folder.mkdir()
    return write_tokenizer(source, folder, spec_bos_id=None, spec_eos_ids=(), note=lambda _: None)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("chat_template.jinja", b"\xff\xfe{{ messages }}", "no UTF-8"),
        ("chat_template.jinja", b"{% for m in messages %}", "does not compile"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "is no text"),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', "is no list of names"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "default"}]}',
            "is no list of names",
        ),
        ("tokenizer_config.json", rb'{"chat_template": "\ud800"}', "surrogates"),
        ("tokenizer_config.json", rb'{"eos_token": "\ud800"}', "give eos_token"),
        ("generation_config.json", b"[]", "no JSON object"),
        ("generation_config.json", b'{"eos_token_id": 99999999999}', "give eos_token_ids"),
        ("generation_config.json", b'{"eos_token_id": "x"}', "eos_token_id is 'x'"),
    ],
)
def test_damaged_files_are_refused(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    # Guards: a template that does not compile showed when the server started.
    source = tmp_path / "source"
    source.mkdir()
    tiny_model.write_tokenizer(source)
    (source / name).write_bytes(content)
    with pytest.raises(BlinkError, match=reason):
        _write(source)


@pytest.mark.parametrize("added", [{"a": 1}, ["x"], [{"id": 1}], [{"content": "x", "id": "1"}]])
def test_damaged_tokens_are_refused(added: object, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tiny_model.write_tokenizer(source)
    data = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps(data | {"added_tokens": added}))
    with pytest.raises(BlinkError, match="added_tokens"):
        _write(source)


def test_what_no_library_reads_is_refused(tmp_path: Path) -> None:
    # Guards: the bundle was written, and its server did not start.
    source = tmp_path / "source"
    source.mkdir()
    tiny_model.write_tokenizer(source)
    data = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps(data | {"model": None}))
    with pytest.raises(BlinkError, match="library refuses"):
        _write(source)
