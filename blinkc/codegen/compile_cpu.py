"""Compiles rendered C++ for the host: source files by name -> one shared object."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blinkc.child_processes import ChildProcesses
from blinkc.errors import BlinkError
from blinkc.resources import include_folder
from blinkc.usable_cores import usable_cores

# Loops with a float comparison vectorize only where nobody looks at the exception flags.
_BASE_FLAGS = ("-std=c++20", "-O3", "-fno-trapping-math", "-fPIC", "-pthread", "-Wall", "-Wextra")
_TIMEOUT_S = 900


def default_march() -> str:
    """Return the baseline that every machine of this kind in use has (AVX2 and FMA on x86-64)."""
    return {"x86_64": "x86-64-v3", "aarch64": "armv8.2-a"}.get(platform.machine(), "native")


def compile_cpu(
    sources: Mapping[str, str],
    *,
    out: Path,
    include_dirs: Sequence[Path] = (),
    march: str = "",
    flags: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Compile every `.cpp` and link them into `out`, which appears whole or not at all.

    Args:
        sources: text by file name, headers included.
        out: path of the shared object.
        include_dirs: searched after the sources' own folder and the project's headers.
        march: `-march` of the compiler; empty for `default_march()`.
        flags: extra compiler flags by file name.

    Raises:
        BlinkError: there is no C++ compiler, or it rejected a file; carries its log.
    """
    with tempfile.TemporaryDirectory(prefix="blinkc-") as name, ChildProcesses(name) as children:
        folder = Path(name)
        for file_name, text in sources.items():
            (folder / file_name).write_text(text)
        includes = [folder, include_folder(), *include_dirs]
        command = [
            *find_compiler(),
            *_BASE_FLAGS,
            f"-march={march or default_march()}",
            *(f"-I{path}" for path in includes),
        ]
        units = sorted(file_name for file_name in sources if file_name.endswith(".cpp"))
        objects = [folder / f"{unit}.o" for unit in units]

        def compile_unit(unit: str, target: Path) -> None:
            extra = (flags or {}).get(unit, ())
            _run(children, [*command, *extra, "-c", str(folder / unit), "-o", str(target)], unit)

        linked = folder / "linked.so"
        arguments = ["-shared", "-pthread", *map(str, objects), "-o", str(linked)]
        with ThreadPoolExecutor(max_workers=usable_cores()) as pool:
            try:
                for done in [
                    pool.submit(compile_unit, unit, target)
                    for unit, target in zip(units, objects, strict=True)
                ]:
                    done.result()
                pool.submit(_run, children, [*find_compiler(), *arguments], out.name).result()
            except BaseException:  # a file that is rejected, or a signal: wait for no other
                children.close()
                raise
        _move_into_place(linked, out)


def _move_into_place(linked: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(out.name + ".partial")  # rename is atomic only within a file system
    shutil.copyfile(linked, beside)
    beside.chmod(0o755)
    beside.replace(out)


def find_compiler() -> list[str]:
    """Return the words that the C++ compiler is called by: $CXX, or what is installed.

    Raises:
        BlinkError: there is none.
    """
    named = os.environ.get("CXX", "").split()
    if named and shutil.which(named[0]) is None:
        raise _missing(named[0])
    if named:
        return named
    for candidate in ("g++", "c++", "clang++"):
        if shutil.which(candidate):
            return [candidate]
    raise BlinkError("no C++ compiler found", hint="apt-get install g++, or set CXX to one")


def _missing(name: str) -> BlinkError:
    return BlinkError(f"the C++ compiler {name} does not exist", hint="set CXX to one that does")


def _run(children: ChildProcesses, command: Sequence[str], what: str) -> None:
    try:
        result = children.run(command, timeout_s=_TIMEOUT_S)
    except FileNotFoundError as error:
        raise _missing(command[0]) from error
    except subprocess.TimeoutExpired as error:
        raise BlinkError(f"compiling {what} took longer than {_TIMEOUT_S} s") from error
    if result.returncode != 0:
        raise BlinkError(
            f"compiling {what} failed with exit code {result.returncode}",
            hint="g++ 12 or newer is needed",
            log=result.stderr,
        )
