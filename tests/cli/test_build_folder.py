"""Folders take their place at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from blinkc import build_folder
from blinkc.build_folder import exchange_names, replace_folder


def new_folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def can_exchange(folder: Path) -> bool:
    (folder / "a").touch()
    (folder / "b").touch()
    return exchange_names(folder / "a", folder / "b")


def test_a_folder_that_is_replaced_is_never_missing(tmp_path: Path) -> None:
    """Guards a reader, or a kill, between two renames."""
    if not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange names")
    place = new_folder(tmp_path / "place", "0")
    is_over = threading.Event()
    missing: list[int] = []

    def look() -> None:
        looks = 0
        while not is_over.is_set():
            looks += 1
            if not place.exists():
                missing.append(looks)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(1, 2000):
        replace_folder(new_folder(tmp_path / "new", str(number)), place)
        assert (place / "file").read_text() == str(number)
    is_over.set()
    reader.join()
    assert not missing
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "place"}


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("was_there", ["nothing", "a folder", "an empty folder", "a link"])
def test_what_was_there_is_gone(
    was_there: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(build_folder, "exchange_names", lambda first, second: False)
    place = tmp_path / "place"
    left = {"place"}
    if was_there == "a folder":
        new_folder(place, "old")
    elif was_there == "an empty folder":
        place.mkdir()
    elif was_there == "a link":
        place.symlink_to(new_folder(tmp_path / "target", "kept"))
        left.add("target")
    replace_folder(new_folder(tmp_path / "new", "new"), place)
    assert (place / "file").read_text() == "new"
    assert not place.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == left
    if was_there == "a link":
        assert (tmp_path / "target" / "file").read_text() == "kept"
