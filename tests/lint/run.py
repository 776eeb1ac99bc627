"""Check the rules that no linter knows; print each breach as `file:line: rule` and exit 1 on any.

Rules: files of code stay under 450 lines; C++ and CUDA keep to clang-format; no folder or file is
named utils, helpers, manager, misc or v2; no path of one machine stands in a tracked file.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 450
CODE = {".py", ".h", ".hpp", ".cc", ".cuh", ".cu", ".jinja"}
NATIVE = {".h", ".hpp", ".cc", ".cuh", ".cu"}
GENERATED = ("unicode_tables", "golden/", "templates/")
VAGUE_NAME = re.compile(r"(^|/)(utils?|helpers?|manager|misc|v2)(\.|/)")
LOCAL_PATH = re.compile(r"(?<![\w.])/(work|root|home/\w+)/")


def tracked_files() -> list[Path]:
    """List the files that git tracks, relative to the root."""
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [Path(line) for line in listing.splitlines() if (ROOT / line).is_file()]


def breaches(path: Path) -> Iterator[str]:
    """Yield the breaches of one file."""
    name = path.as_posix()
    if VAGUE_NAME.search(name):
        yield f"{name}:1: a name that says nothing"
    if path.suffix not in CODE | {".md", ".toml", ".txt", ".yml"} and path.name != "Makefile":
        return
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    generated = any(part in name for part in GENERATED)
    if path.suffix in CODE and not generated and len(lines) > MAX_LINES:
        yield f"{name}:{len(lines)}: more than {MAX_LINES} lines"
    if name != "tests/lint/run.py":
        for number, line in enumerate(lines, 1):
            if LOCAL_PATH.search(line):
                yield f"{name}:{number}: a path of one machine"


def misformatted(paths: list[Path]) -> Iterator[str]:
    """Yield the native files that clang-format would change."""
    program = Path(sys.executable).parent / "clang-format"
    command = str(program) if program.exists() else shutil.which("clang-format")
    if command is None:
        raise SystemExit("clang-format is missing: pip install clang-format")
    for path in paths:
        if path.suffix in NATIVE and not any(part in path.as_posix() for part in GENERATED):
            text = (ROOT / path).read_bytes()
            if subprocess.run([command, path], cwd=ROOT, capture_output=True).stdout != text:
                yield f"{path}:1: not as clang-format leaves it (clang-format -i {path})"


def main() -> int:
    """Check every tracked file."""
    paths = tracked_files()
    found = [breach for path in paths for breach in breaches(path)] + list(misformatted(paths))
    print("\n".join(found) if found else f"{len(paths)} files keep the house rules")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
