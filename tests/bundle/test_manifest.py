"""The manifest reader trusts nothing: any bytes give a checked `Manifest` or a `BlinkError`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkc.bundle.golden import PythonRing
from blinkc.bundle.manifest import Limits, checked_path, manifest_from_bytes, manifest_to_bytes
from blinkc.errors import BlinkError
from tests.bundle.small_bundle import write_small_bundle


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("bundle") / "b"
    data = json.loads(manifest_to_bytes(write_small_bundle(folder)))
    del data["sha256"]  # the tests change it, and it would refuse every change
    return data


def read(data: Any) -> Any:
    return manifest_from_bytes(json.dumps(data).encode(), where="manifest.json")


def test_round_trip_gives_the_same_bytes(good: dict[str, Any]) -> None:
    manifest = read(good)
    assert manifest_to_bytes(read(json.loads(manifest_to_bytes(manifest)))) == manifest_to_bytes(
        manifest
    )


@pytest.mark.parametrize(
    "path",
    [
        "", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", ".hidden", "a/.hidden",
        "a\\b", "c:/x", "a\0b", "~/x", "a" * 600, "a/" + "b" * 200, "a\nb", "\u202egnp.exe",
    ],
)  # fmt: skip
def test_path_that_leaves_or_hides_is_refused(path: str, good: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        checked_path(path)
    data = json.loads(json.dumps(good))
    data["files"][0]["path"] = path
    with pytest.raises(BlinkError, match="refused"):
        read(data)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("files", 0, "bytes"), -1),
        (("files", 0, "bytes"), 1 << 60),
        (("files", 0, "bytes"), 1.5),
        (("files", 0, "sha256"), "00"),
        (("files", 0, "extra"), 1),
        (("limits", "max_batch"), 0),
        (("limits", "max_batch"), "2"),
        (("limits", "num_slots"), 1 << 40),
        (("limits", "num_front_ends"), 17),
        (("target", "name"), "tpu"),
        (("target", "machine"), "m68k"),
        (("target", "library"), "code/other.so"),
        (("plan", "plan"), "other.json"),
        (("tokenizer", "chat_template"), "x.jinja"),
        (("weights", 1, "parts", 0, "offset"), 1 << 30),
        (("weights", 1, "parts", 0, "bytes"), 8),
        (("weights", 1, "parts", 0, "file"), "external:0"),
        (("weights", 1, "parts", 0, "file"), "../weights.safetensors"),
        (("weights", 1, "parts", 0, "shape"), [5, 8]),
        (("weights", 1, "parts", 0, "rows"), [3, 99]),
        (("weights", 1, "parts", 0, "rows"), [5, 3]),
        (("weights", 0, "parts", 0, "transpose"), True),
        (("weights", 1, "name"), "norm"),
        (("weights", 1, "shape"), [1 << 50, 5]),
        (("weights", 1, "parts"), []),
        (("tools",), {str(n): "" for n in range(200)}),
        (("golden",), {"prompt_token_ids": [50], "output_token_ids": [], "made_by": ""}),
        (("golden",), {"prompt_token_ids": [], "output_token_ids": [], "made_by": ""}),
        (("model_name",), ""),
        (("notes",), ["x" * 5000]),
    ],
)
def test_value_out_of_bounds_is_refused(
    place: tuple[Any, ...], value: Any, good: dict[str, Any]
) -> None:
    data = json.loads(json.dumps(good))
    target = data
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    with pytest.raises(BlinkError, match="refused"):
        read(data)


def test_a_ring_that_no_memory_holds(good: dict[str, Any]) -> None:
    """The bug: "Cannot allocate memory" and nothing more, where each size alone is in range."""
    sizes = {"num_slots": 1 << 24, "max_output_tokens": 1 << 24}
    with pytest.raises(BlinkError, match=r"16777216 slots: [0-9]{14,} bytes") as caught:
        PythonRing(Limits.model_validate({**good["limits"], **sizes}))
    assert "--num-slots" in caught.value.hint


def test_other_schema_version_names_both_and_the_command(good: dict[str, Any]) -> None:
    with pytest.raises(BlinkError) as caught:
        read({**good, "schema_version": 2})
    assert "version 2" in caught.value.message and "version 1" in caught.value.message
    assert "blinkc compile small" in caught.value.hint


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b'{"a": NaN}'])
def test_bytes_that_are_no_manifest(data: bytes) -> None:
    with pytest.raises(BlinkError):
        manifest_from_bytes(data, where="manifest.json")


def test_duplicate_file_is_refused(good: dict[str, Any]) -> None:
    data = json.loads(json.dumps(good))
    data["files"].append(data["files"][0])
    with pytest.raises(BlinkError, match="twice"):
        read(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


def paths_of(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of every value inside `data`."""
    items: Any = ()
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    found = [prefix] if prefix else []
    for key, value in items:
        found += paths_of(value, (*prefix, key))
    return found


@settings(max_examples=300)
@given(st.data())
def test_any_one_value_replaced_or_removed(good: dict[str, Any], data: st.DataObject) -> None:
    changed = json.loads(json.dumps(good))
    place = data.draw(st.sampled_from(paths_of(changed)))
    target = changed
    for step in place[:-1]:
        target = target[step]
    if data.draw(st.booleans()):
        del target[place[-1]]
    else:
        target[place[-1]] = data.draw(JSON)
    try:
        manifest = read(changed)
    except BlinkError:
        return
    sizes = {entry.path: entry.bytes for entry in manifest.files}
    for weight in manifest.weights:
        for part in weight.parts:
            assert part.offset + part.bytes <= sizes[part.file]


@settings(max_examples=300)
@given(st.data())
def test_any_byte_flipped_or_cut(good: dict[str, Any], data: st.DataObject) -> None:
    text = bytearray(json.dumps(good).encode())
    position = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        text[position] = data.draw(st.integers(0, 255))
    else:
        del text[position:]
    with contextlib.suppress(BlinkError):
        manifest_from_bytes(bytes(text), where="manifest.json")


@settings(max_examples=300)
@given(st.data())
def test_a_manifest_with_any_byte_changed_says_the_same_or_is_refused(
    good: dict[str, Any], data: st.DataObject
) -> None:
    """The bug: a digit changed in the size of the vocabulary, or in a stop token, was served."""
    manifest = read(good)
    text = bytearray(manifest_to_bytes(manifest))
    position = data.draw(st.integers(0, len(text) - 1))
    text[position] ^= data.draw(st.integers(1, 255))
    try:
        found = manifest_from_bytes(bytes(text), where="manifest.json")
    except BlinkError:
        return
    assert found.model_copy(update={"sha256": None}) == manifest


def test_a_manifest_without_its_own_hash_is_read(good: dict[str, Any]) -> None:
    assert read(good).sha256 is None
