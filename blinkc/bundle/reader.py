"""Opens a bundle and trusts nothing in it: folder or archive -> `Bundle`, every byte checked."""

from __future__ import annotations

import os
import platform
import re
import stat
import tarfile
import tempfile
from collections.abc import Callable, Container, Iterable
from pathlib import Path

from blinkc.bundle.external_files import CHUNK_BYTES, find_external, hash_span
from blinkc.bundle.manifest import (
    MANIFEST_NAME,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    checked_path,
    manifest_from_bytes,
)
from blinkc.bundle.weights import BundleWeights, FileSpan
from blinkc.capture.compute_capability import compute_capability
from blinkc.closing import Closing
from blinkc.errors import BlinkError
from blinkc.staging import staging_folder

COPY_AGAIN = "copy the bundle again, or make it again with blinkc bundle"
# CPU flags that a march needs, as /proc/cpuinfo names them.
MARCH_FLAGS = {
    "x86-64-v2": ("sse4_2", "popcnt", "ssse3"),
    "x86-64-v3": ("avx2", "fma", "bmi2", "f16c"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
}


class Bundle(Closing):
    """An opened bundle. Files of an archive are taken out when asked for, into a private folder.

    Weights of an archive are mapped where they lie. `close()` removes what was taken out.
    """

    def __init__(self, path: Path, manifest: Manifest, spans: dict[str, FileSpan]) -> None:
        self.path = path
        self.manifest = manifest
        self._spans = spans
        self._extracted: tempfile.TemporaryDirectory[str] | None = None

    @property
    def is_archive(self) -> bool:
        """Return whether the bundle is one file."""
        return self.path.is_file()

    def file(self, path: str) -> Path:
        """Return where the file `path` of the manifest can be opened."""
        span = self._spans[path]
        if not self.is_archive:
            return span.path
        if self._extracted is None:
            self._extracted = tempfile.TemporaryDirectory(prefix="blink-")
        target = Path(self._extracted.name) / path
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_span(span, target)
        return target

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a small file, such as the chat template."""
        span = self._spans[path]
        with span.path.open("rb") as file:
            file.seek(span.offset)
            return file.read(span.num_bytes)

    def manifest_bytes(self) -> bytes:
        """Return manifest.json as it lies there."""
        if not self.is_archive:
            return (self.path / MANIFEST_NAME).read_bytes()
        return self.read_bytes(MANIFEST_NAME)

    def weights(self, *, search: Iterable[Path] = ()) -> BundleWeights:
        """Map the weights.

        Args:
            search: folders to look in for referenced weight files that are not at their old place.

        Raises:
            BlinkError: a referenced file is missing or is not the one the bundle was made from.
        """
        return BundleWeights(self.manifest, self.weight_spans(search=search))

    def weight_spans(
        self, *, search: Iterable[Path] = (), check_content: bool = True
    ) -> dict[str, FileSpan]:
        """Return where every file lies, by the name that weight parts use.

        Args:
            check_content: read referenced files whole and compare their hashes; else their sizes.

        Raises:
            BlinkError: a referenced file is missing or is not the one the bundle was made from.
        """
        spans = dict(self._spans)
        for index, external in enumerate(self.manifest.external_files):
            spans[f"external:{index}"] = find_external(
                external, self.path, search, check_content=check_content
            )
        return spans

    @property
    def weight_files(self) -> frozenset[str]:
        """Return the bundle's own files that hold weights."""
        return frozenset(
            part.file
            for weight in self.manifest.weights
            for part in weight.parts
            if part.file in self._spans
        )

    def check_hashes(self, files: Container[str] | None = None) -> None:
        """Read every file, or those named, and compare its SHA-256 with the manifest's.

        Raises:
            BlinkError: a byte differs; the message names the file and both hashes.
        """
        for entry in self.manifest.files:
            if files is not None and entry.path not in files:
                continue
            found = hash_span(self._spans[entry.path])
            if found != entry.sha256:
                raise BlinkError(
                    f"{self.path}: {entry.path} is damaged: its SHA-256 is {found[:16]}..., the "
                    f"manifest says {entry.sha256[:16]}...",
                    hint=COPY_AGAIN,
                )

    def check_abi(self) -> None:
        """Refuse an installation that speaks another version of the ring's ABI.

        Raises:
            BlinkError: names both and how to rebuild.
        """
        from blinkc import abi

        ours = abi.constants()["BLINK_ABI_VERSION"]
        if self.manifest.abi_version != ours:
            raise BlinkError(
                f"{self.path} has ring ABI version {self.manifest.abi_version}; this is {ours}",
                hint=f"make it again here: {self.manifest.rebuild}",
            )

    def check_machine(self) -> None:
        """Refuse a machine, or an installation, that the bundle's host code does not run on.

        Raises:
            BlinkError: names what the bundle wants, what is here, and how to rebuild.
        """
        self.check_abi()
        target = self.manifest.target
        found = platform.machine()
        if target.library is not None and target.machine != found:  # GPU code runs on any host
            raise BlinkError(
                f"{self.path} is made for {target.machine} machines; this one is {found}",
                hint=f"make it again here: {self.manifest.rebuild}",
            )
        flags = _cpu_flags()
        missing = [f for f in MARCH_FLAGS.get(target.march, ()) if flags and f not in flags]
        if missing:
            raise BlinkError(
                f"{self.path} needs a {target.march} processor; this one has no {missing[0]}",
                hint=f"make it again here: {self.manifest.rebuild}",
            )

    def check_gpu(self, major: int, minor: int) -> str:
        """Refuse a GPU whose compute capability the bundle's code does not run on.

        Code for sm_90a runs on 9.0 alone; code for sm_80 on 8.0 and later 8.x.

        Returns:
            The architecture to take; a bundle may hold code for several.

        Raises:
            BlinkError: names both and the command that rebuilds.
        """
        target = self.manifest.target
        wanted = [
            (name, divmod(compute_capability(name), 10)) for name in target.architecture.split(",")
        ]
        if not target.architecture:
            raise BlinkError(f"{self.path} is for the cpu, not for a GPU")
        for name, (first, second) in sorted(wanted, key=lambda pair: pair[1], reverse=True):
            is_newer = name[-1].isdigit() and major == first and minor >= second
            if (major, minor) == (first, second) or is_newer:
                return name
        capabilities = ", ".join(f"{first}.{second}" for _, (first, second) in wanted)
        rebuild = self.manifest.rebuild.replace(
            f"--target {target.name}", f"--target sm_{major}{minor}"
        )
        raise BlinkError(
            f"{self.path} is built for compute capability {capabilities} "
            f"({target.architecture}); this GPU has {major}.{minor}",
            hint=f"make it again: {rebuild}",
        )

    def check_builds(self, found: dict[str, str]) -> None:
        """Refuse when a build that engines are bound to differs (TensorRT, GPU or driver), or a
        version is too old.

        Args:
            found: what this machine has, by the names of the manifest's `target.builds` and
                `target.requires`.

        Raises:
            BlinkError: names both sides and what to do.
        """
        for name, oldest in self.manifest.target.requires.items():
            here = found.get(name)
            if here is None or _version(here) < _version(oldest):
                raise BlinkError(
                    f"{self.path} needs {name} {oldest} or later; "
                    f"this machine has {here or 'none'}",
                    hint=f"update it, or make the bundle again here: {self.manifest.rebuild}",
                )
        for name, wanted in self.manifest.target.builds.items():
            if found.get(name) != wanted:
                raise BlinkError(
                    f"the engines of {self.path} are built for {name} {wanted}; this machine has "
                    f"{found.get(name, 'none')}",
                    hint=f"blinkc rebuild {self.path} builds them again here, in seconds",
                )

    def close(self) -> None:
        """Remove what was taken out of an archive."""
        if self._extracted is not None:
            self._extracted.cleanup()
            self._extracted = None


def open_bundle(
    path: Path,
    *,
    check_hashes: bool = True,
    files: Callable[[Manifest], Container[str]] | None = None,
) -> Bundle:
    """Open a bundle folder or archive.

    Args:
        path: the folder with manifest.json, or the archive.
        check_hashes: read every file, weights too, and compare hashes (about 1 GB/s).
        files: which files the caller will ask for; the others may be missing. None: all.

    Raises:
        BlinkError: it is no bundle, or anything about it is not as the manifest says.
    """
    if not path.exists():
        raise BlinkError(f"{path} does not exist", hint="make it with blinkc bundle BUILD -o PATH")
    bundle = _open_folder(path, files) if path.is_dir() else _open_archive(path)
    if check_hashes:
        bundle.check_hashes()
    return bundle


def _open_folder(path: Path, files: Callable[[Manifest], Container[str]] | None) -> Bundle:
    manifest_path = path / MANIFEST_NAME
    if not manifest_path.is_file() or manifest_path.is_symlink():
        raise BlinkError(
            f"{path} is not a bundle: it has no {MANIFEST_NAME}",
            hint="a folder made by blinkc compile is a build: run blinkc bundle on it first",
        )
    with manifest_path.open("rb") as file:
        data = file.read(MAX_MANIFEST_BYTES + 1)
    manifest = manifest_from_bytes(data, where=str(manifest_path))
    wanted = files(manifest) if files is not None else None
    spans = {}
    for entry in manifest.files:
        if wanted is not None and entry.path not in wanted:
            continue
        spans[entry.path] = FileSpan(
            path=_regular_file(path, entry), offset=0, num_bytes=entry.bytes
        )
    return Bundle(path, manifest, spans)


def _regular_file(folder: Path, entry: FileEntry) -> Path:
    """Return the path of an entry; every step on the way must be a true folder, the end a file."""
    current = folder
    parts = entry.path.split("/")
    for number, part in enumerate(parts):
        current = current / part
        try:
            mode = current.lstat().st_mode
        except OSError:
            raise BlinkError(
                f"{folder}: {entry.path} is missing",
                hint=f"{COPY_AGAIN}; a copy by blink-runtime slim is for serve-dpu alone",
            ) from None
        if stat.S_ISLNK(mode):
            raise BlinkError(
                f"{folder}: {entry.path} goes through a symlink, which a bundle never holds",
                hint=COPY_AGAIN,
            )
        is_last = number == len(parts) - 1
        if not (stat.S_ISREG(mode) if is_last else stat.S_ISDIR(mode)):
            raise BlinkError(f"{folder}: {entry.path} is not a regular file", hint=COPY_AGAIN)
    _check_size(folder, entry, current.stat().st_size)
    return current


def _check_size(where: Path, entry: FileEntry, size: int) -> None:
    if size != entry.bytes:
        what = "truncated" if size < entry.bytes else "too long"
        raise BlinkError(
            f"{where}: {entry.path} is {what}: {size} bytes, the manifest says {entry.bytes}",
            hint=COPY_AGAIN,
        )


def _open_archive(path: Path) -> Bundle:
    members: dict[str, FileSpan] = {}
    size = path.stat().st_size
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isreg() or member.issparse():
                    raise BlinkError(f"{path}: {member.name[:80]!r} is not a regular file")
                name = checked_path(member.name)
                if name in members or len(members) > MAX_FILES:
                    raise BlinkError(f"{path}: {name} is there twice, or too many files")
                if member.offset_data + member.size > size:
                    raise BlinkError(f"{path} is truncated inside {name}", hint=COPY_AGAIN)
                members[name] = FileSpan(
                    path=path, offset=member.offset_data, num_bytes=member.size
                )
    except (tarfile.TarError, ValueError, EOFError, OSError) as error:
        raise BlinkError(f"{path} is not a bundle: {error}", hint=COPY_AGAIN) from None
    span = members.get(MANIFEST_NAME)
    if span is None:
        raise BlinkError(f"{path} is not a bundle: it has no {MANIFEST_NAME}", hint=COPY_AGAIN)
    with path.open("rb") as file:
        file.seek(span.offset)
        data = file.read(min(span.num_bytes, MAX_MANIFEST_BYTES + 1))
    manifest = manifest_from_bytes(data, where=f"{path}:{MANIFEST_NAME}")
    for entry in manifest.files:
        if entry.path not in members:
            raise BlinkError(f"{path}: {entry.path} is missing", hint=COPY_AGAIN)
        _check_size(path, entry, members[entry.path].num_bytes)
    return Bundle(path, manifest, members)


def _version(text: str) -> tuple[int, ...]:
    """Return a version's numbers, for comparison: "13.0" becomes (13, 0)."""
    return tuple(int(digits) for digits in re.findall(r"\d+", text))


def _copy_span(span: FileSpan, target: Path) -> None:
    partial = target.with_name(target.name + ".partial")
    with span.path.open("rb") as source, partial.open("wb") as out:
        source.seek(span.offset)
        left = span.num_bytes
        while left > 0:
            data = source.read(min(left, CHUNK_BYTES))
            if not data:
                raise BlinkError(f"{span.path} is truncated", hint=COPY_AGAIN)
            out.write(data)
            left -= len(data)
    os.replace(partial, target)


def extract_archive(bundle: Bundle, folder: Path) -> None:
    """Take a whole archive out into a new folder.

    Raises:
        BlinkError: `folder` exists, or the bundle is no archive.
    """
    if not bundle.is_archive:
        raise BlinkError(f"{bundle.path} is a folder already")
    if folder.exists():
        raise BlinkError(f"{folder} exists already", hint="choose another folder")
    with staging_folder(folder) as staging:
        whole = staging / "bundle"
        for path in (MANIFEST_NAME, *(entry.path for entry in bundle.manifest.files)):
            target = whole / path
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_span(bundle._spans[path], target)
        os.replace(whole, folder)


def _cpu_flags() -> frozenset[str]:
    """Return the processor's flags; empty where the system does not say."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        return frozenset()
    return frozenset()
