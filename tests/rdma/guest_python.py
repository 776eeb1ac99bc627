"""CPython and the two roles for a guest: a bundle -> the files that serve-gpu and serve-dpu need.

Both run here first, over shared memory; what they have imported by their end is what the guest
gets, at the same paths, with its libraries. Modules travel compiled, so that nothing is compiled
under emulation.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from blinkc.bundle.front_end_copy import copy_front_end
from blinkc.resources import include_folder

from .guest import needed_libraries

# What both run here and in a guest; says at its end what it needed, where that is asked for.
ROLE = """
import json, os, sys
from blink_runtime.cli import main
try:
    main()
finally:
    if "BLINK_NEEDED_FILES" in os.environ:
        places = {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if not file:
                continue
            places[file] = file
            parent = sys.modules.get(name.rpartition(".")[0])
            beside = getattr(parent, "__path__", None) and getattr(parent, "__file__", None)
            if beside and not hasattr(module, "__path__"):
                # Where it is found without the finder of an editable installation.
                places[file] = os.path.join(os.path.dirname(beside), os.path.basename(file))
        with open(os.environ["BLINK_NEEDED_FILES"], "w") as out:
            json.dump(places, out)
"""
LIMIT_S = 1200
ASKED = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 24,
    "temperature": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Files by their paths in the guest, its environment, and what the model says to `ASKED`, as it
    stands in the JSON."""

    files: Mapping[str, bytes]
    environment: Mapping[str, str]
    python: str
    answer: str


def pack_roles(bundle: Path, folder: Path) -> Roles:
    """Run both roles of `bundle` once and pack what they needed; `folder` is for scratch."""
    slim = folder / "slim"
    copy_front_end(bundle, slim)
    ring = f"/blink-pack-{os.getpid()}"
    shm = ("--transport", "shm")
    with ExitStack() as stack:
        owner = _Role(stack, folder / "gpu", "serve-gpu", bundle, *shm, "--listen", ring)
        owner.wait_for("ready after")
        listen = ("--listen", "127.0.0.1:0")
        front_end = _Role(
            stack, folder / "dpu", "serve-dpu", slim, *shm, "--connect", ring, *listen
        )
        url = "http://" + front_end.wait_for("http://").split("http://")[1].split("/")[0]
        response = httpx.post(f"{url}/v1/chat/completions", json=ASKED, timeout=LIMIT_S)
        needed = {**front_end.end(), **owner.end()}
    for name, place in (("bundle", bundle), ("slim", slim)):
        paths = [path for path in place.rglob("*") if path.is_file()]
        needed |= {str(path): f"/t/{name}/{path.relative_to(place)}" for path in paths}
    files = dict(_packed(needed))
    return Roles(
        files=files,
        environment={
            "PYTHONHOME": sys.base_prefix,
            "PYTHONPATH": ":".join(path for path in sys.path if path),
        },
        python=os.path.realpath(sys.executable),
        answer=_content(response.text),
    )


def _content(text: str) -> str:
    found = re.search(r'"content":"(?:[^"\\]|\\.)+"', text)
    assert found is not None, text
    return found[0]


class _Role:
    """One of the two commands in a process of its own."""

    def __init__(self, stack: ExitStack, scratch: Path, *words: Any) -> None:
        self._log = scratch.with_suffix(".log")
        self._needed = scratch.with_suffix(".json")
        environment = {**os.environ, "BLINK_NEEDED_FILES": str(self._needed)}
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", ROLE, *map(str, words)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)

    def wait_for(self, phrase: str) -> str:
        deadline = time.monotonic() + LIMIT_S
        while phrase not in (text := self._log.read_text()):
            assert self._process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.05)
        return text

    def end(self) -> dict[str, str]:
        """Stop it; return the files it needed, with their places in a guest."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(LIMIT_S) == 0, self._log.read_text()
        return dict(json.loads(self._needed.read_text()))


def _packed(needed: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of modules, compiled, and of programs with their libraries."""
    header = include_folder() / "blink" / "abi.h"
    yield str(header).lstrip("/"), header.read_bytes()
    program = os.path.realpath(sys.executable)
    for name, place in {**needed, program: program}.items():
        if name.endswith(".py"):
            code = compile(Path(name).read_bytes(), name, "exec", dont_inherit=True)
            # Flags 1: never compared with a source, which is not there.
            head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
            yield f"{place}c".lstrip("/"), head + marshal.dumps(code)
        else:
            yield place.lstrip("/"), Path(name).read_bytes()
            for library in needed_libraries(Path(name)):
                yield library.lstrip("/"), Path(library).read_bytes()
