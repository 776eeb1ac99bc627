"""Front end alone: a bundle's tokenizer and chat template over a ring whose owner answers at once.

Input: a bundle (weights are not read). The front end runs in a process of its own, as users start
it; `benchmarks/frontend_load` is the client and the ring's owner, in C++. All on two cores. Output:
figures on stdout, JSON in benchmarks/results/frontend.json. Run it as `make bench-frontend`, or
`python benchmarks/bench_frontend.py BUNDLE --minutes 10` for the memory run too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blinkc.closing import Closing

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS = 64
STREAMS, STREAM_TOKENS = 256, 256
PACED_TOKENS_PER_S = 110_000
MEMORY_CONNECTIONS, IDLE_CONNECTIONS = 2000, 10_000
# The bars of the issue: tokens a second, completions a second, milliseconds, microseconds.
BARS = {"tokens_per_s": 100_000, "completions_per_s": 5_000, "p99_ms": 1.0, "pending_us": 150}
NUM_PROMPTS = 1000


def serve(bundle_path: Path, ring_name: str, num_connections: int) -> None:
    """Serve the bundle's tokenizer and template over a new ring until stdin closes."""
    from blink_runtime import _native
    from blink_runtime.chat_template import load_chat_template
    from blink_runtime.codec import load_codec
    from blink_runtime.front_end import FrontEnd, FrontEndOptions
    from blinkc.bundle.reader import open_bundle

    bundle = open_bundle(bundle_path, check_hashes=False)
    sizes = _native.RingSizes(
        num_slots=512,
        max_prompt_tokens=512,
        max_output_tokens=512,
        max_seqlen=1024,
        max_batch=256,
        vocab_size=bundle.manifest.limits.vocab_size,
        page_size_tokens=16,
        num_kv_pages=1 << 20,
    )
    ring = _native.Ring.create(ring_name, sizes)
    options = FrontEndOptions(
        port=0,
        model_name=bundle.manifest.model_name,
        eos_token_ids=bundle.manifest.tokenizer.eos_token_ids,
        max_connections=num_connections,
        stall_timeout_ms=30_000,  # a busy machine may starve the owner; that is not the subject
    )
    codec = load_codec(bundle, print)
    with FrontEnd(ring, codec, load_chat_template(bundle), options) as front_end:
        print(front_end.port, flush=True)
        sys.stdin.read()


class FrontEndProcess(Closing):
    """The front end under test, and what it costs.

    Args:
        bundle: whose tokenizer and template are served.
        cores: those it may use.
    """

    def __init__(self, bundle: Path, cores: Sequence[int], num_connections: int = 4096) -> None:
        self.ring_name = f"/blink-bench-{os.getpid()}"
        command = [sys.executable, __file__, str(bundle), "--serve", self.ring_name]
        self._process = subprocess.Popen(
            [*command, "--connections", str(num_connections)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the front end did not start")
        self.port = int(line)

    def cpu_s(self) -> float:
        """Return user and system time of all its threads so far, in seconds."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mib(self) -> float:
        """Return its resident memory; the ring, which is shared memory, is not counted."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        kib = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if " kB" in line}
        return int(kib["RssAnon"]) / 1024

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def run_load(
    program: Path, front_end: FrontEndProcess, cores: Sequence[int], **options: Any
) -> dict[str, Any]:
    """Run the load program once and return its figures with the front end's CPU time."""
    before = front_end.cpu_s()
    process = start_load(program, front_end, cores, **options)
    output, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"the load program failed: {output}")
    figures: dict[str, Any] = json.loads(output)
    figures["front_end_cpu_s"] = round(front_end.cpu_s() - before, 3)
    figures["load_average"] = round(os.getloadavg()[0], 2)
    return figures


def start_load(
    program: Path, front_end: FrontEndProcess, cores: Sequence[int], **options: Any
) -> subprocess.Popen[str]:
    """Start the load program."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return subprocess.Popen(
        [str(program), front_end.ring_name, str(front_end.port), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


def prompts_of(bundle_path: Path, num_tokens: int, count: int) -> list[str]:
    """Return texts of English words, each `num_tokens` tokens long for the bundle's tokenizer."""
    import pydoc_data.topics

    from blink_runtime.codec import load_codec
    from blinkc.bundle.reader import open_bundle

    codec = load_codec(open_bundle(bundle_path, check_hashes=False), print)
    prose = " ".join(pydoc_data.topics.topics.values())
    # Words that are one token each also after a space: every token is then an event with text.
    vocabulary = sorted({word for word in re.findall("[a-z]{2,}", prose)})
    usable = [word for word in vocabulary if len(codec.encode(f" {word}", False)) == 1]
    generator = random.Random(5)
    texts = [" ".join(generator.choices(usable, k=num_tokens)) for _ in range(2 * count)]
    exact = [text for text in texts if len(codec.encode(text, False)) == num_tokens]
    if len(exact) < count:
        raise SystemExit(f"only {len(exact)} texts of {num_tokens} tokens found")
    return exact[:count]


def median_run(runs: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Return the run in the middle by `key`, and all values of it."""
    ordered = sorted(runs, key=lambda run: run[key])
    return {**ordered[len(ordered) // 2], "all": [run[key] for run in runs]}


class Bench:
    """The measurements, in the order of the issue's list."""

    def __init__(self, program: Path, bundle: Path, cores: Sequence[int], rounds: int) -> None:
        self._program = program
        self._bundle = bundle
        self._cores = cores
        self._rounds = rounds
        self._prompts = Path(tempfile.mkdtemp()) / "prompts"
        self._prompts.write_text("\n".join(prompts_of(bundle, PROMPT_TOKENS, NUM_PROMPTS)) + "\n")

    def _load(self, *, is_apart: bool = False, **options: Any) -> dict[str, Any]:
        own, others = self._cores, self._cores
        if is_apart:
            own, others = self._cores[:1], self._cores[1:2]
        with FrontEndProcess(self._bundle, own) as front_end:
            warm = {**options, "requests": max(64, options["requests"] // 10)}
            run_load(self._program, front_end, others, prompts=self._prompts, **warm)
            return run_load(self._program, front_end, others, prompts=self._prompts, **options)

    def _stream(self, **options: Any) -> dict[str, Any]:
        """Run the streams in rounds; return the median one with its rates."""
        runs = []
        for _ in range(self._rounds):
            run = self._load(
                connections=STREAMS, requests=4 * STREAMS, tokens=STREAM_TOKENS, stream=1,
                **options,
            )  # fmt: skip
            run["tokens_per_s"] = round(run["tokens"] / run["seconds"])
            run["cpu_us_per_token"] = round(run["front_end_cpu_s"] / run["tokens"] * 1e6, 2)
            run["events_per_recv"] = round(run["tokens"] / run["receives"], 2)
            runs.append(run)
        return median_run(runs, "tokens_per_s")

    def streams(self) -> dict[str, Any]:
        """Streamed tokens per second, one event each."""
        result = self._stream()
        print(
            f"streams: {result['tokens_per_s']:,} tokens/s over {STREAMS} streams of "
            f"{STREAM_TOKENS} (bar {BARS['tokens_per_s']:,}); front end "
            f"{result['cpu_us_per_token']} us CPU a token, {result['events_per_recv']} events a "
            f"recv; all {result['all']}"
        )
        return result

    def paced_streams(self) -> dict[str, Any]:
        """The same while every token comes at its own time, so that few share a write.

        The front end has one core; owner and client poll on the other.
        """
        interval_us = STREAMS * 1_000_000 // PACED_TOKENS_PER_S
        result = self._stream(token_interval_us=interval_us, pace="spread", is_apart=True, polls=1)
        print(
            f"streams, a token each {interval_us} us: {result['tokens_per_s']:,} tokens/s of "
            f"{PACED_TOKENS_PER_S:,} offered; front end {result['cpu_us_per_token']} us CPU a "
            f"token, {result['events_per_recv']} events a recv; all {result['all']}"
        )
        return result

    def idle_connections(self) -> dict[str, Any]:
        """Memory of a connection that asks for nothing."""
        with FrontEndProcess(self._bundle, self._cores, IDLE_CONNECTIONS + 10) as front_end:
            before = front_end.resident_mib()
            process = start_load(
                self._program, front_end, self._cores, shape="open", rate=10, seconds=6,
                requests=0, connections=IDLE_CONNECTIONS,
            )  # fmt: skip
            time.sleep(5)
            after = front_end.resident_mib()
            process.communicate()
            closed = front_end.resident_mib()
        kib = (after - before) * 1024 / IDLE_CONNECTIONS
        print(
            f"idle: {IDLE_CONNECTIONS:,} connections take {kib:.2f} KiB each in the front end "
            f"({before:.1f} -> {after:.1f} MiB; {closed:.1f} MiB after they closed)"
        )
        return {"kib_each": round(kib, 2), "before_mib": before, "after_mib": after}

    def completions(self, *, is_chat: bool) -> dict[str, Any]:
        """Completions per second, prompts of 64 tokens, one token out."""
        runs = []
        for _ in range(self._rounds):
            run = self._load(connections=64, requests=20_000, tokens=1, chat=int(is_chat))
            run["completions_per_s"] = round(run["requests"] / run["seconds"])
            run["cpu_us_per_completion"] = round(run["front_end_cpu_s"] / run["requests"] * 1e6, 1)
            runs.append(run)
        result = median_run(runs, "completions_per_s")
        bar = "no bar" if is_chat else f"bar {BARS['completions_per_s']:,}"
        print(
            f"{'chats' if is_chat else 'completions'}: {result['completions_per_s']:,}/s ({bar}); "
            f"front end {result['cpu_us_per_completion']} us CPU each; all {result['all']}"
        )
        return result

    def latency(self) -> dict[str, Any]:
        """At half the bars' load: token visible in the ring -> the client's recv."""
        half_tokens = int(BARS["tokens_per_s"] // 2)
        interval_us = STREAMS * 1_000_000 // half_tokens
        streams = {
            "connections": STREAMS, "requests": 8 * STREAMS, "tokens": STREAM_TOKENS, "stream": 1,
            "token_interval_us": interval_us, "pace": "spread",
            "ramp_ms": STREAM_TOKENS * interval_us // 1000,
        }  # fmt: skip
        apart = {"is_apart": True, "polls": 1}
        cases: dict[str, dict[str, Any]] = {
            # As in service: a core of the front end's own, and a ring's owner and clients that it
            # need not wake.
            "streams": {**streams, **apart},
            "streams on shared cores": streams,
            "streams that begin together": {**streams, **apart, "ramp_ms": 0},
            "streams in lockstep": {**streams, **apart, "pace": "lockstep"},
            "completions": {
                "shape": "open", "rate": int(BARS["completions_per_s"] // 2), "connections": 256,
                "requests": 15_000, "tokens": 1,
            },
        }  # fmt: skip
        results = {}
        for name, options in cases.items():
            runs = []
            for _ in range(self._rounds):
                run = self._load(**options)
                run["p99_ms"] = run["token_to_recv_us"]["p99"] / 1000
                runs.append(run)
            results[name] = result = median_run(runs, "p99_ms")
            spread = result["token_to_recv_us"]
            # 256 tokens or requests at one instant are harder than the bar asks for, and on shared
            # cores the ring's owner, a GPU in service, stands in the way.
            bar = "bar: p99 1000" if name in ("streams", "completions") else "no bar"
            print(
                f"latency, {name} at half load ({result['tokens'] / result['seconds']:,.0f} "
                f"tokens/s): p50 {spread['p50']:.0f} us, p99 {spread['p99']:.0f} us, p99.9 "
                f"{spread['p999']:.0f} us ({bar}); all p99 {result['all']} ms"
            )
        return results

    def pending(self) -> dict[str, Any]:
        """From POST to prefill_pending, one at a time, the front end on one core."""
        results = {}
        for name, is_chat in (("chat", 1), ("completion", 0)):
            runs = []
            for _ in range(self._rounds):
                with FrontEndProcess(self._bundle, self._cores[:1]) as front_end:
                    options = {"shape": "pending", "chat": is_chat, "prompts": self._prompts}
                    cores = self._cores[1:2]
                    run_load(self._program, front_end, cores, requests=100, **options)
                    run = run_load(self._program, front_end, cores, requests=2000, **options)
                run["median_us"] = run["post_to_pending_us"]["p50"]
                runs.append(run)
            results[name] = result = median_run(runs, "median_us")
            spread = result["post_to_pending_us"]
            print(
                f"POST to prefill_pending, {name} of {PROMPT_TOKENS} tokens, front end on one "
                f"core: median {spread['p50']:.0f} us, p99 {spread['p99']:.0f} us (bar: chat, "
                f"median {BARS['pending_us']}); all medians {result['all']}"
            )
        return results

    def memory(self, minutes: float) -> dict[str, Any]:
        """Resident memory over time, 2,000 connections under load."""
        with FrontEndProcess(self._bundle, self._cores) as front_end:
            options = {"shape": "open", "rate": 500, "connections": MEMORY_CONNECTIONS}
            process = start_load(
                self._program, front_end, self._cores, prompts=self._prompts, requests=0,
                seconds=round(minutes * 60), tokens=16, stream=1, token_interval_us=50_000,
                **options,
            )  # fmt: skip
            begin, series = time.monotonic(), []
            while process.poll() is None:
                series.append((round(time.monotonic() - begin), front_end.resident_mib()))
                time.sleep(min(10.0, minutes * 6))
            assert process.stdout is not None
            figures: dict[str, Any] = json.loads(process.stdout.read())
        settled = [mib for seconds, mib in series if seconds >= minutes * 12] or [series[-1][1]]
        growth = statistics.mean(settled[-5:]) - statistics.mean(settled[:5])
        print(
            f"memory at {MEMORY_CONNECTIONS} connections, {figures['requests']:,} streams in "
            f"{minutes:g} min: {settled[0]:.1f} MiB -> {settled[-1]:.1f} MiB, {growth:+.2f} MiB "
            f"from the first fifth to the end; series (s: MiB) "
            + ", ".join(f"{seconds}: {mib:.1f}" for seconds, mib in series)
        )
        return {"series_s_mib": series, "growth_mib": round(growth, 2), **figures}


def build_program() -> Path:
    """Build the load program and return its path."""
    folder = ROOT / "build" / "bench"
    print("building the load program: minutes the first time", flush=True)
    configure = ["cmake", "-S", str(ROOT / "runtime"), "-B", str(folder), "-G", "Ninja"]
    subprocess.run(
        [*configure, "-DBLINK_PYTHON=OFF", "-DBLINK_TESTS=ON"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(
        ["cmake", "--build", str(folder), "-j2", "--target", "frontend_bench"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder / "tests_frontend" / "frontend_bench"


def main() -> None:
    """Measure, print and write benchmarks/results/frontend.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement; medians count")
    parser.add_argument("--minutes", type=float, default=1.0, help="of the memory run; 0: none")
    parser.add_argument(
        "--only",
        help="one part, such as streams, chats or latency; kept in the record that --output names",
    )
    parser.add_argument("--program", type=Path, help="a frontend_bench built before")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/frontend.json")
    parser.add_argument("--serve", metavar="RING", help=argparse.SUPPRESS)
    parser.add_argument("--connections", type=int, default=4096, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.bundle, args.serve, args.connections)
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cores = sorted(os.sched_getaffinity(0))[:2]
    program = args.program or build_program()
    bench = Bench(program, args.bundle, cores, args.rounds)
    parts = {
        "streams": bench.streams,
        "paced_streams": bench.paced_streams,
        "completions": lambda: bench.completions(is_chat=False),
        "chats": lambda: bench.completions(is_chat=True),
        "latency": bench.latency,
        "pending": bench.pending,
        "idle": bench.idle_connections,
        "memory": lambda: bench.memory(args.minutes),
    }
    if args.minutes == 0:
        parts.pop("memory")
    results = {name: run() for name, run in parts.items() if args.only in (None, name)}
    run = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "python benchmarks/bench_frontend.py BUNDLE " + " ".join(sys.argv[2:]),
    }
    if args.only:
        if args.output:
            record = json.loads(args.output.read_text()) if args.output.exists() else {}
            record[args.only] = {**results[args.only], **run}
            args.output.write_text(json.dumps(record, indent=1) + "\n")
        return
    record = {
        **run,
        "hardware": f"{cpu_name()}, {len(cores)} cores for front end, ring owner and client",
        "tokenizer": "the bundle's own, compiled",
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "bars": BARS,
        **results,
    }
    output = args.output or ROOT / "benchmarks/results/frontend.json"
    output.write_text(json.dumps(record, indent=1) + "\n")


def cpu_name() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
