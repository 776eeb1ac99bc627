"""Damaged, hostile, misplaced bundles: refused with a clear error before anything is loaded."""

from __future__ import annotations

import ctypes
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blinkc.bundle.manifest import MANIFEST_NAME, Manifest, manifest_to_bytes
from blinkc.bundle.reader import extract_archive, open_bundle
from blinkc.bundle.weights import assemble_weight, convert
from blinkc.bundle.write_bundle import _write_archive
from blinkc.bundle.write_weights import WEIGHTS_NAME, embed_weights, reference_weights
from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightPart, WeightRef
from tests.bundle.small_bundle import manifest_of, some_weights, write_small_bundle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_small_bundle(tmp_path / "b")
    return tmp_path / "b"


@pytest.fixture
def archive(folder: Path) -> Path:
    path = folder.with_name("b.blink")
    with open_bundle(folder) as bundle:
        _write_archive(folder, bundle.manifest, path)
    return path


def floats_at(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)).copy()


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_weights_are_aligned_addresses_of_the_right_values(
    kind: str, folder: Path, archive: Path
) -> None:
    path = folder if kind == "folder" else archive
    with open_bundle(path) as bundle, bundle.weights() as weights:
        assert [address % 64 for address in weights.addresses] == [0, 0, 0]
        for reference, address in zip(some_weights(), weights.addresses, strict=True):
            expected = np.concatenate(
                [np.frombuffer(part.inline or b"", np.float32) for part in reference.parts]
            )
            assert np.array_equal(floats_at(address, expected.size), expected)


def test_embedded_weights_are_a_valid_safetensors_file(folder: Path) -> None:
    from safetensors.numpy import load_file

    tensors = load_file(str(folder / WEIGHTS_NAME))
    assert {"norm", "qkv", "bias"} <= set(tensors)
    assert tensors["qkv"].shape == (8, 5)


def test_archive_opens_in_place_and_extracts(archive: Path, tmp_path: Path) -> None:
    with open_bundle(archive) as bundle:
        assert bundle.is_archive
        taken_out = bundle.file("code/target.so")
        assert taken_out.read_bytes().startswith(b"\x7fELF")
        assert bundle.read_bytes("plan.json") == b"{}"
        extract_archive(bundle, tmp_path / "out")
    assert not taken_out.exists()
    open_bundle(tmp_path / "out").close()


def test_archive_has_the_same_bytes_each_time(folder: Path, archive: Path) -> None:
    with open_bundle(folder) as bundle:
        _write_archive(folder, bundle.manifest, archive.with_name("again"))
    assert archive.read_bytes() == archive.with_name("again").read_bytes()


@pytest.mark.parametrize("name", ["code/target.so", "plan.json", WEIGHTS_NAME])
@pytest.mark.parametrize("damage", ["truncate", "grow", "flip", "remove", "symlink", "folder"])
def test_damaged_file_is_named(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage in ("truncate", "grow", "flip"):
        if damage == "flip":
            data[len(data) // 2] ^= 1
        path.write_bytes(data[:-1] if damage == "truncate" else data + b"x" * (damage == "grow"))
    else:
        path.unlink()
        if damage == "symlink":
            outside = folder.parent / "outside"
            outside.write_bytes(data)
            path.symlink_to(outside)
        elif damage == "folder":
            path.mkdir()
    with pytest.raises(BlinkError, match=name) as caught:
        open_bundle(folder)
    assert caught.value.hint


def test_symlink_on_the_way_is_refused(folder: Path) -> None:
    (folder / "code").rename(folder.parent / "elsewhere")
    (folder / "code").symlink_to(folder.parent / "elsewhere")
    with pytest.raises(BlinkError, match="symlink"):
        open_bundle(folder)


def test_manifest_that_is_a_symlink_is_refused(folder: Path) -> None:
    (folder / MANIFEST_NAME).rename(folder.parent / "m.json")
    (folder / MANIFEST_NAME).symlink_to(folder.parent / "m.json")
    with pytest.raises(BlinkError, match="not a bundle"):
        open_bundle(folder)


def add_member(archive: Path, info: tarfile.TarInfo) -> None:
    with tarfile.open(archive, "a") as tar:
        tar.addfile(info)


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/x", "code/../../x", "plan.json"])
def test_archive_member_that_leaves_or_repeats_is_refused(archive: Path, name: str) -> None:
    add_member(archive, tarfile.TarInfo(name))
    with pytest.raises(BlinkError):
        open_bundle(archive)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
)
def test_archive_member_that_is_no_file_is_refused(archive: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("code/link")
    info.type = kind
    info.linkname = "/etc/passwd"
    add_member(archive, info)
    with pytest.raises(BlinkError, match="regular file"):
        open_bundle(archive)


@settings(max_examples=200)
@given(st.data())
def test_archive_with_any_byte_flipped_or_cut_never_opens_changed(
    archive: Path, data: st.DataObject
) -> None:
    """Either refused, or the damage lay in bytes that mean nothing and all content is as before."""
    content = bytearray(archive.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= data.draw(st.integers(1, 255))
    else:
        del content[position:]
    damaged = archive.with_name("damaged")
    damaged.write_bytes(content)
    try:
        with open_bundle(damaged) as bundle, open_bundle(archive) as good:
            for entry in good.manifest.files:
                assert bundle.read_bytes(entry.path) == good.read_bytes(entry.path)
    except BlinkError:
        pass


def rewrite(folder: Path, **changes: Any) -> Manifest:
    with open_bundle(folder) as bundle:
        manifest = Manifest.model_validate({**dict(bundle.manifest), **changes})
    (folder / MANIFEST_NAME).write_bytes(manifest_to_bytes(manifest))
    return manifest


def test_other_machine_names_both_and_the_command(folder: Path) -> None:
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    with open_bundle(folder) as bundle:
        target = bundle.manifest.target.model_copy(update={"machine": other})
    rewrite(folder, target=target)
    with open_bundle(folder) as bundle, pytest.raises(BlinkError) as caught:
        bundle.check_machine()
    assert other in caught.value.message and platform.machine() in caught.value.message
    assert "blinkc compile small" in caught.value.hint


def test_other_build_of_an_engine_names_both_and_the_command(folder: Path) -> None:
    with open_bundle(folder) as bundle:
        target = bundle.manifest.target.model_copy(
            update={"builds": {"tensorrt": "11.0.1", "driver": "580.1"}}
        )
    rewrite(folder, target=target)
    with open_bundle(folder) as bundle:
        bundle.check_builds({"tensorrt": "11.0.1", "driver": "580.1", "other": "1"})
        with pytest.raises(BlinkError) as caught:
            bundle.check_builds({"tensorrt": "11.0.2", "driver": "580.1"})
    assert "11.0.1" in caught.value.message and "11.0.2" in caught.value.message
    assert f"blinkc rebuild {folder}" in caught.value.hint


@pytest.mark.parametrize(
    ("architecture", "runs_on", "not_on"),
    [
        ("sm_90a", [(9, 0)], [(8, 0), (10, 0), (9, 1)]),
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(9, 0), (7, 5), (12, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("sm_120a", [(12, 0)], [(12, 1), (10, 0), (1, 20)]),
        ("sm_89,sm_120a", [(8, 9), (12, 0)], [(8, 6), (9, 0), (12, 1)]),
    ],
)
def test_gpu_of_another_capability_is_refused(
    folder: Path,
    architecture: str,
    runs_on: list[tuple[int, int]],
    not_on: list[tuple[int, int]],
) -> None:
    with open_bundle(folder) as bundle:
        target = bundle.manifest.target.model_copy(update={"architecture": architecture})
    rewrite(folder, target=target)
    with open_bundle(folder) as bundle:
        for capability in runs_on:
            bundle.check_gpu(*capability)
        for major, minor in not_on:
            with pytest.raises(BlinkError) as caught:
                bundle.check_gpu(major, minor)
            assert architecture in caught.value.message
            assert f"{major}.{minor}" in caught.value.message
            assert "blinkc compile" in caught.value.hint


def test_other_ring_abi_names_both(folder: Path) -> None:
    rewrite(folder, abi_version=99)
    with open_bundle(folder) as bundle, pytest.raises(BlinkError, match="version 99; this is 1"):
        bundle.check_machine()


def test_build_folder_is_told_from_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "build.json").write_text("{}")
    with pytest.raises(BlinkError, match="not a bundle") as caught:
        open_bundle(tmp_path)
    assert "blinkc bundle" in caught.value.hint


def checkpoint_weights(path: Path) -> list[WeightRef]:
    """Write a bf16 checkpoint; return an fp32 weight merged from two parts, one transposed."""
    import ml_dtypes
    from safetensors.numpy import save_file

    rng = np.random.default_rng(1)
    q = rng.standard_normal((4, 6)).astype(ml_dtypes.bfloat16)
    k = rng.standard_normal((6, 3)).astype(ml_dtypes.bfloat16)
    save_file({"q": q, "k": k}, str(path))
    parts = (
        WeightPart(source="safetensors", key="q", shape=(4, 6), dtype="bf16", path=path),
        WeightPart(
            source="safetensors", key="k", shape=(6, 3), dtype="bf16", path=path,
            transpose=True, rows=(1, 3),
        ),
    )  # fmt: skip
    return [WeightRef(name="qk", shape=(6, 6), dtype="fp32", parts=parts), *some_weights()]


def test_referenced_weights_equal_embedded_ones(folder: Path) -> None:
    checkpoint = folder.parent / "model.safetensors"
    references = checkpoint_weights(checkpoint)
    table, external = reference_weights(references, folder / WEIGHTS_NAME, lambda _: None)
    assert [file.path for file in external] == [str(checkpoint)]
    manifest = manifest_of(folder, table, external_files=external)
    (folder / MANIFEST_NAME).write_bytes(manifest_to_bytes(manifest))

    inside = folder.parent / "inside.safetensors"
    embedded = embed_weights(references, inside, lambda _: None)
    view = {WEIGHTS_NAME: memoryview(inside.read_bytes())}
    with open_bundle(folder) as bundle, bundle.weights() as weights:
        for entry, address in zip(embedded, weights.addresses, strict=True):
            expected = assemble_weight(entry, view).reshape(-1)
            assert np.array_equal(floats_at(address, expected.size), expected)

    # Moved: found where it is looked for, by content.
    moved = folder.parent / "moved"
    moved.mkdir()
    checkpoint.rename(moved / checkpoint.name)
    with open_bundle(folder) as bundle:
        with pytest.raises(BlinkError, match="no such file"):
            bundle.weights()
        bundle.weights(search=[moved]).close()
        data = bytearray((moved / checkpoint.name).read_bytes())
        data[-1] ^= 1
        (moved / checkpoint.name).write_bytes(data)
        with pytest.raises(BlinkError, match="other content"):
            bundle.weights(search=[moved])


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_bf16_rounds_to_nearest_even(values: list[float]) -> None:
    import ml_dtypes

    wide = np.array(values, np.float32)
    expected = wide.astype(ml_dtypes.bfloat16)
    found = convert(wide, "fp32", "bf16").view(ml_dtypes.bfloat16)
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    assert same.all()
    assert np.array_equal(
        convert(found.view(np.uint16), "bf16", "fp32"), found.astype(np.float32), equal_nan=True
    )


def test_manifest_is_read_as_json_of_the_folder(folder: Path) -> None:
    assert json.loads((folder / MANIFEST_NAME).read_bytes())["model_name"] == "small"
