"""Build the fuzz targets and run each: SECONDS [TARGET ...] -> executions, or what broke.

Inputs that find new paths are kept in build/fuzz/corpus, beside the seeds of fuzz/corpus. An input
that breaks something is left in build/fuzz and named; its place, once mended, is fuzz/corpus.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "fuzz"
# Bytes of the longest input: enough for what the target looks at.
TARGETS = {"http": 4096, "json": 2048, "tokenizer": 2048}
# libFuzzer holds the largest resident size against its limit, and Linux hands that figure down from
# whoever starts a program: a large Python would fail every target. A shell's child starts at zero.
FROM_A_SHELL = ["/bin/sh", "-c", '"$@"; exit $?', "sh"]


def find_compiler() -> str | None:
    """Return a clang++ that has libFuzzer beside it, or None."""
    for name in ("clang++", "clang++-14", "clang++-18"):
        if program := shutil.which(name):
            done = subprocess.run(
                [program, "-print-file-name=libclang_rt.fuzzer-x86_64.a"],
                capture_output=True,
                text=True,
            )
            folder = subprocess.run([program, "-print-runtime-dir"], capture_output=True, text=True)
            found = Path(done.stdout.strip()).is_absolute() or any(
                Path(folder.stdout.strip()).glob("libclang_rt.fuzzer*")
            )
            if found:
                return program
    return None


def build(compiler: str, targets: list[str]) -> None:
    """Compile the targets; raise CalledProcessError with the compiler's words."""
    configure = ["cmake", "-S", str(ROOT / "fuzz"), "-B", str(BUILD), "-G", "Ninja"]
    configure.append(f"-DCMAKE_CXX_COMPILER={compiler}")
    names = [f"fuzz_{target}" for target in targets]
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time, also under pytest-xdist
        for command in (configure, ["cmake", "--build", str(BUILD), "-j2", "--target", *names]):
            subprocess.run(command, check=True, stdout=sys.stderr)


def fuzz_for(target: str, seconds: int) -> int:
    """Fuzz one target with new inputs, which are kept; return the number of executions."""
    corpus = BUILD / "corpus" / target
    corpus.mkdir(parents=True, exist_ok=True)
    return run(target, corpus, f"-max_total_time={seconds}")


def run(target: str, corpus: Path, *options: str, memory_mb: int = 2048) -> int:
    """Run one target over `corpus` and its seeds; return the number of executions.

    Raises:
        RuntimeError: an input broke something; the message ends with the fuzzer's last lines.
    """
    done = subprocess.run(
        [
            *FROM_A_SHELL,
            str(BUILD / f"fuzz_{target}"),
            *options,
            f"-max_len={TARGETS[target]}",
            "-timeout=60",
            f"-rss_limit_mb={memory_mb}",
            "-print_final_stats=1",
            f"-artifact_prefix={BUILD}/{target}-",
            str(corpus),
            str(ROOT / "fuzz" / "corpus" / target),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    if done.returncode != 0:
        raise RuntimeError(f"fuzz_{target} broke:\n{done.stderr[-6000:]}")
    executions = re.search(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    assert executions is not None, done.stderr[-2000:]
    return int(executions[1])


def main() -> int:
    """Run the targets one after the other."""
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    targets = sys.argv[2:] or list(TARGETS)
    compiler = find_compiler()
    if compiler is None:
        print("clang++ with libFuzzer is missing (Debian: clang, libclang-rt-dev)", file=sys.stderr)
        return 1
    build(compiler, targets)
    for target in targets:
        print(f"{target}: {fuzz_for(target, seconds)} executions in {seconds} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
