"""A compile that is ended by a signal: its compilers end with it, nothing is left, it resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from blinkc.child_processes import ChildProcesses
from blinkc.closing import Closing
from blinkc.config import STAGES
from blinkc.errors import BlinkError
from tests.cli.fake_stages import make_model

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300

# The command line, with stages that only write a line but for the last, which runs a compiler.
COMMAND = """
from pathlib import Path
from blinkc import cli, pipeline, stages
from blinkc.codegen.compile_cpu import compile_cpu
from tests.cli.fake_stages import fake_source_digest, fake_stages

def generate_code(*arguments):
    folder = next(a for a in arguments if isinstance(a, Path))
    (folder / "first.txt").write_text("half")
    sources = {f"{name}.cpp": f"int {name}() {{ return 1; }}" for name in "abcd"}
    compile_cpu(sources, out=folder / "target.so")

for name, function in fake_stages().items():
    setattr(stages, name, function)
stages.generate_code = generate_code
pipeline.source_digest = fake_source_digest
cli.main()
"""

# As g++: it tells its version at once, leaves a file where temporary ones go, and waits for a child
# that does the work. Both say who they are.
SLOW_COMPILER = """#!/bin/sh
case "$*" in *-c*) ;; *) echo 1.0; exit ;; esac
touch "$TMPDIR/cc.s"
sleep 1000 &
echo $$ >> {pids}
echo $! >> {pids}
wait
"""


def heed_signals() -> None:
    """In a child: end by what the tests' own process may ignore, under nohup or in background."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class Compile(Closing):
    """`blinkc compile` in a process of its own, whose compiler never ends."""

    def __init__(self, folder: Path, *prefix: str) -> None:
        self.folder = folder
        self.pids = folder / "pids"
        compiler = folder / "slow"
        compiler.write_text(SLOW_COMPILER.format(pids=self.pids))
        compiler.chmod(0o755)
        (folder / "tmp").mkdir()
        model = make_model(folder / "model")
        self.command = [sys.executable, "-c", COMMAND, "compile", str(model), "--json"]
        self.command += ["-o", str(folder / "build")]
        self.environment = {
            **os.environ, "TMPDIR": str(folder / "tmp"), "BLINK_CACHE_DIR": str(folder / "cache"),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [*prefix, *self.command],
            cwd=ROOT,
            env={**self.environment, "CXX": str(compiler)},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_signals,
        )
        try:
            self.wait_for_compiler()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End what a failed test leaves."""
        self.process.kill()
        self.process.communicate()
        for pid in self.pids.read_text().split() if self.pids.exists() else []:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def wait_for_compiler(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not self.pids.exists() or len(self.pids.read_text().split()) < 2:
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    def is_alive(self) -> bool:
        """Whether any of the compilers, or of their children, still runs."""
        return any(is_running(int(pid)) for pid in self.pids.read_text().split())

    def wait_for_their_end(self) -> None:
        """Wait until none runs: a grandchild that was killed ends once it gets a core."""
        deadline = time.monotonic() + DEADLINE_S  # each would stay for 1000 s
        while self.is_alive():
            assert time.monotonic() < deadline, "a compiler still runs"
            time.sleep(0.02)

    def resume(self) -> dict[str, bool]:
        """Run it again with a compiler that ends; return for each stage whether it was kept."""
        done = subprocess.run(
            self.command, cwd=ROOT, env=self.environment, capture_output=True, text=True,
            timeout=DEADLINE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return {
            outcome["stage"]: outcome["cached"] for outcome in json.loads(done.stdout)["stages"]
        }


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_ended_compile_leaves_nothing_running(number: signal.Signals, tmp_path: Path) -> None:
    """The bug: its compilers went on, temporary files stayed; on SIGINT it waited for them."""
    with Compile(tmp_path) as run:
        run.process.send_signal(number)
        if number != signal.SIGINT:
            run.process.send_signal(number)  # as `timeout` does
        _, errors = run.process.communicate(timeout=DEADLINE_S)
        if number == signal.SIGINT:
            assert run.process.returncode == 1 and "Aborted!" in errors
        else:
            assert run.process.returncode == -number
            assert errors == f"blinkc: ended by {number.name}\n"
        run.wait_for_their_end()
        assert list((tmp_path / "tmp").iterdir()) == []
        left = sorted(path.name for path in (tmp_path / "build").iterdir())
        assert left == sorted([*STAGES[:-1], ".lock", "build.json", "command.json"])
        assert run.resume() == {stage: stage != STAGES[-1] for stage in STAGES}


def test_a_compile_that_shall_survive_the_terminal_does(tmp_path: Path) -> None:
    """Guards `nohup blinkc compile`: what was ignored before stays ignored."""
    with Compile(tmp_path, "nohup") as run:
        run.process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(timeout=1)
        assert run.is_alive()
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(DEADLINE_S) == -signal.SIGTERM
        run.wait_for_their_end()


def test_closed_children_end_and_none_begins(tmp_path: Path) -> None:
    with ChildProcesses(str(tmp_path)) as children:
        assert children.run(["echo", "one"], timeout_s=DEADLINE_S).stdout == "one\n"
        with pytest.raises(subprocess.TimeoutExpired):
            children.run(["sh", "-c", "sleep 1000 & wait"], timeout_s=0.1)
    with pytest.raises(BlinkError, match="was ended"):
        children.run(["echo", "two"], timeout_s=DEADLINE_S)
