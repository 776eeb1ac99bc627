"""What an artifact was made with: versions of tools, and the hash of the compiler's own source."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import blinkc
from blinkc.resources import include_folder, templates_folder

# The folders whose code decides what a stage writes.
_STAGE_SOURCES = {
    "read": ("frontend",),
    "segment": ("surgery",),
    "engine": ("engine", "codegen"),
    "capture": ("capture",),
    "codegen": ("codegen", "engine", "capture"),
}
_SOURCE_SUFFIXES = (".py", ".jinja", ".h", ".hpp", ".cuh", ".cc")


@cache
def source_digest(stage: str) -> str:
    """Return a hash of the source that a stage's artifact depends on."""
    package = Path(blinkc.__file__).resolve().parent
    folders = [package / name for name in _STAGE_SOURCES[stage]]
    if stage == "codegen":
        folders += [templates_folder(), include_folder()]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SOURCE_SUFFIXES and path.is_file():
                digest.update(f"{path.relative_to(folder)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def tool_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the named tools that are here; nothing is imported.

    Names are Python distributions, or "c++" for the C++ compiler.
    """
    versions = {}
    for name in names:
        version = compiler_version() if name == "c++" else _distribution_version(name)
        if version:
            versions[name] = version
    return versions


def all_tool_versions() -> dict[str, str]:
    """Return what a bundle records besides the stages' tools."""
    return {"blinkc": blinkc.__version__, "python": platform.python_version()}


@cache
def compiler_command() -> str:
    """Return the C++ compiler: $CXX, or the first of g++ and c++ that is there; "" for none."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        if name and shutil.which(name):
            return name
    return ""


@cache
def compiler_version() -> str:
    """Return the C++ compiler's first line about itself; "" where there is none."""
    command = compiler_command()
    if not command:
        return ""
    result = subprocess.run(
        [command, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    lines = result.stdout.splitlines()
    return re.sub(r"\s+", " ", lines[0]) if lines else ""


@cache
def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
