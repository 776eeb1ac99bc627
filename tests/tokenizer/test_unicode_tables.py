"""The generated Unicode tables are those of the installed `tokenizers` library."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from .vocabularies import ROOT

DIRECTORY = ROOT / "runtime" / "tokenizer"


def generator() -> ModuleType:
    path = DIRECTORY / "generate_unicode_tables.py"
    spec = importlib.util.spec_from_file_location("generate_unicode_tables", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def committed_array(name: str) -> list[int]:
    source = (DIRECTORY / "unicode_tables.cc").read_text()
    body = re.search(rf"{name}\[\d+\] = {{([^}}]*)}}", source)
    assert body is not None
    return [int(number) for number in body.group(1).split(",") if number.strip()]


def test_split_classes_of_every_code_point() -> None:
    """Every class that split patterns use, for every code point, asked from the library again."""
    index, blocks = committed_array("kClassIndex"), committed_array("kClassBlocks")
    module = generator()
    for bit, pattern in enumerate(module.CLASS_PATTERNS):
        expected = module.chars_matching(pattern)
        found = {c for c in module.SCALARS if blocks[index[c // 256] * 256 + c % 256] >> bit & 1}
        assert found == expected, pattern


@pytest.mark.slow
def test_generator_gives_the_committed_file() -> None:
    import tokenizers

    committed = (DIRECTORY / "unicode_tables.cc").read_text()
    header, _, body = committed.partition("\n")
    rendered_header, _, rendered_body = generator().render().partition("\n")
    assert rendered_body == body
    if tokenizers.__version__ in header:
        assert rendered_header == header
