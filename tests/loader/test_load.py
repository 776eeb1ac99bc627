"""The parts of a GPU's loader that need no GPU: runs of bytes, golden tokens, its memory."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from blink_runtime.hash_check import HashCheck
from blink_runtime.load_cache import LoadCache
from blink_runtime.serve import await_first_heartbeat
from blink_runtime.weight_upload import CHUNK_BYTES, file_chunks
from blinkc.bundle.golden import GOLDEN_TIE_STD, compare_golden
from blinkc.bundle.manifest import Golden, Manifest, WeightEntry, WeightPart
from blinkc.bundle.reader import open_bundle
from blinkc.bundle.weights import FileSpan, assemble_weight
from blinkc.bundle.write_weights import WEIGHTS_NAME, drawn_entry, split_random
from blinkc.errors import BlinkError
from blinkc.frontend.decoder_graph import WeightPart as FrontendPart
from blinkc.frontend.decoder_graph import WeightRef
from tests.bundle.small_bundle import write_small_bundle

if TYPE_CHECKING:
    from blink_runtime.front_end import FrontEnd


def part(offset: int, shape: tuple[int, ...], **changes: object) -> WeightPart:
    size = int(np.prod(shape)) * 2
    values = {"file": "f", "offset": offset, "bytes": size, "shape": shape, "dtype": "bf16"}
    return WeightPart.model_validate({**values, **changes})


def weight(shape: tuple[int, ...], *parts: WeightPart) -> WeightEntry:
    return WeightEntry(name="w", shape=shape, dtype="bf16", parts=parts)


def test_chunks_say_what_assembling_says(tmp_path: Path) -> None:
    """Guards merged weights that go to the GPU as runs of bytes: parts, row ranges, any offset."""
    data = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    path = tmp_path / "f"
    path.write_bytes(b"#" * 24 + data.tobytes())
    spans = {"f": FileSpan(path=path, offset=24, num_bytes=4096)}
    entry = weight((9, 8), part(2, (4, 8)), part(1000, (8, 8), rows=(3, 7)), part(900, (1, 8)))
    chunks = file_chunks(entry, spans, address=0)
    assert chunks is not None
    raw = path.read_bytes()
    got = bytearray(entry.num_bytes)
    for chunk in chunks:
        got[chunk.address : chunk.address + chunk.num_bytes] = raw[
            chunk.offset : chunk.offset + chunk.num_bytes
        ]
    want = assemble_weight(entry, {"f": memoryview(data.tobytes())})
    assert bytes(got) == want.tobytes()


def test_large_runs_are_cut(tmp_path: Path) -> None:
    rows = CHUNK_BYTES // 2 + 5
    spans = {"f": FileSpan(path=tmp_path / "f", offset=0, num_bytes=4 * rows)}
    chunks = file_chunks(weight((rows, 2), part(0, (rows, 2))), spans, address=4096)
    assert chunks is not None
    assert [c.num_bytes for c in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 20]
    assert [c.address for c in chunks] == [4096, 4096 + CHUNK_BYTES, 4096 + 2 * CHUNK_BYTES]
    assert [c.offset for c in chunks] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]


def test_what_must_be_changed_is_no_run_of_bytes() -> None:
    spans = {"f": FileSpan(path=Path("f"), offset=0, num_bytes=4096)}
    turned = weight((8, 4), part(0, (4, 8), transpose=True))
    converted = weight((4, 8), part(0, (4, 8), dtype="fp16"))
    assert file_chunks(turned, spans, 0) is None
    assert file_chunks(converted, spans, 0) is None


def golden(margins: tuple[float, ...]) -> Golden:
    return Golden(
        prompt_token_ids=(1,), output_token_ids=(5, 6, 7), margins=margins, made_by="a reference"
    )


def test_golden_tokens_agree_up_to_a_tie() -> None:
    wanted = (5, 6, 7)
    sure = golden((1.0, 1.0, 1.0))
    assert "its 3 tokens" in compare_golden(sure, wanted, [5, 6, 7])
    with pytest.raises(BlinkError, match=r"position 1.*a reference gave 6"):
        compare_golden(sure, wanted, [5, 9, 7])
    tie = golden((1.0, GOLDEN_TIE_STD, 1.0))
    assert "gives 1 tokens of a reference, then the other side of a tie" in compare_golden(
        tie, wanted, [5, 9, 1]
    )
    with pytest.raises(BlinkError, match="position 0"):
        compare_golden(tie, wanted, [0, 0, 0])  # a graph that computes nothing
    with pytest.raises(BlinkError, match="2 tokens of 3"):
        compare_golden(sure, wanted, [5, 6])


def test_a_first_load_that_computes_nothing() -> None:
    """Guards the tokens that are recorded where there is no reference: zeros are never taken."""
    unknown = Golden(prompt_token_ids=(1,), output_token_ids=(), made_by="")
    assert "its 3 tokens" in compare_golden(unknown, (), [0, 0, 4])
    with pytest.raises(BlinkError, match="computes nothing"):
        compare_golden(unknown, (), [0, 0, 0])


def test_without_margins_every_token_counts() -> None:
    with pytest.raises(BlinkError, match="position 2"):
        compare_golden(golden(()), (5, 6, 7), [5, 6, 8])


def small_manifest(tmp_path: Path) -> Manifest:
    return write_small_bundle(tmp_path / "bundle")


def test_a_load_is_remembered_for_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards that another driver's tokens and algorithms are not taken for this one's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    manifest = small_manifest(tmp_path)
    cache = LoadCache(manifest, "H200", 13000)
    assert (cache.algorithms(), cache.golden_tokens(), cache.placement()) == ({}, (), "")
    cache.update(algorithms={"1x2x3": [1, 2]}, golden=[4, 5])
    cache.update(placement="host")
    again = LoadCache(manifest, "H200", 13000)
    assert again.algorithms() == {"1x2x3": [1, 2]}
    assert again.golden_tokens() == (4, 5)
    assert again.placement() == "host"
    assert LoadCache(manifest, "H200", 13010).golden_tokens() == ()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"algorithms": 3, "golden": "x"}'])
def test_a_damaged_memory_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    manifest = small_manifest(tmp_path)
    cache = LoadCache(manifest, "H200")
    cache.update(golden=[1])
    cache.path.write_text(text)
    damaged = LoadCache(manifest, "H200")
    assert damaged.algorithms() == {} and damaged.golden_tokens() == ()


def test_hashes_are_compared_beside_the_load(tmp_path: Path) -> None:
    """Guards that code is never loaded unchecked, and that damaged weights never serve."""
    manifest = small_manifest(tmp_path)
    path = tmp_path / "bundle"
    with open_bundle(path) as bundle:
        HashCheck(bundle).wait()
    weights = bytearray((path / WEIGHTS_NAME).read_bytes())
    weights[-1] ^= 1
    (path / WEIGHTS_NAME).write_bytes(weights)
    with open_bundle(path, check_hashes=False) as bundle:
        check = HashCheck(bundle)
        with pytest.raises(BlinkError, match=f"{WEIGHTS_NAME} is damaged"):
            check.wait()
    code = next(f.path for f in manifest.files if f.path != WEIGHTS_NAME)
    damaged = bytearray((path / code).read_bytes())
    damaged[0] ^= 1
    (path / code).write_bytes(damaged)
    with (
        open_bundle(path, check_hashes=False) as bundle,
        pytest.raises(BlinkError, match="is damaged"),
    ):
        HashCheck(bundle)


def test_a_driver_that_is_too_old_is_named(tmp_path: Path) -> None:
    small_manifest(tmp_path)
    path = tmp_path / "bundle" / "manifest.json"
    data = json.loads(path.read_text())
    del data["sha256"]
    data["target"]["requires"] = {"cuda driver": "13.0"}
    path.write_text(json.dumps(data))
    with open_bundle(tmp_path / "bundle") as bundle:
        bundle.check_builds({"cuda driver": "13.0"})
        bundle.check_builds({"cuda driver": "14.2"})
        with pytest.raises(BlinkError, match=r"needs cuda driver 13.0 or later.*has 12.8"):
            bundle.check_builds({"cuda driver": "12.8"})
        with pytest.raises(BlinkError, match="has none"):
            bundle.check_builds({})


def test_random_weights_lie_in_no_file() -> None:
    """Guards what a GPU draws itself: the model's own matrices, not tables or other types."""
    random_part = FrontendPart(source="random", key="a", shape=(2, 3), dtype="bf16", seed=7)
    inline_part = FrontendPart(source="inline", key="b", shape=(2,), dtype="fp32", inline=b"\0" * 8)
    drawn = WeightRef(name="a", shape=(4, 3), dtype="bf16", parts=(random_part, random_part))
    table = WeightRef(name="b", shape=(2,), dtype="fp32", parts=(inline_part,))
    other = WeightRef(
        name="c", shape=(2, 3), dtype="fp32", parts=(replace(random_part, dtype="fp32"),)
    )
    seeds, in_files = split_random([drawn, table, other], "bf16")
    assert seeds == {"a": 7}
    assert [weight.name for weight in in_files] == ["b", "c"]
    entry = drawn_entry(drawn, 7)
    assert entry.parts == () and entry.seed == 7 and entry.num_bytes == 24


def test_drawn_weights_have_no_parts(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        manifest = small_manifest(tmp_path)
        data = manifest.model_dump()
        data["weights"][0]["seed"] = 3  # and parts as well
        Manifest.model_validate(data)


def test_ready_is_not_said_before_the_first_heartbeat() -> None:
    """The bug: the first request after "ready" was answered 503 where no golden prompt had run."""
    looks = iter(["starting", "starting", "serving"])

    class Watched:
        @property
        def health(self) -> str:
            return next(looks)

    await_first_heartbeat(cast("FrontEnd", Watched()), threading.Event())
    assert next(looks, None) is None
    told_to_stop = threading.Event()
    told_to_stop.set()
    looks = iter(["starting"])
    await_first_heartbeat(cast("FrontEnd", Watched()), told_to_stop)
