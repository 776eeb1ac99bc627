"""What a bundle takes over from a checkpoint's tokenizer files: the format of calls of tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blinkc.bundle.tokenizer_files import find_tool_format, write_tokenizer
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
