"""All figures of one GPU in one run: prepared folders -> tables on stdout, JSON in results.

`make bench-gpu`, or `python -m benchmarks.bench_gpu --models FOLDER [--parts serve,compare,...]`.
FOLDER holds llama8b, llama8b_cache and qwen3moe, as `python -m benchmarks.prepare_gpu FOLDER`
makes them (make does). Request shapes and counts are those that vLLM's own client was given for the
comparison, `at a time` being its max-concurrency; they go over HTTP. Each part is written as soon
as it is done; a run into a file that exists adds its parts to it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks import host_facts
from benchmarks.gpu_bars import BARS, judge
from benchmarks.http_load import Load, LoadClient, summary
from benchmarks.server_process import (
    ROOT,
    ServerError,
    ServerProcess,
    bundle_server,
    environment,
    gpu_server,
)
from benchmarks.write_weights import forget_pages, write_weights

PEAK_BYTES_PER_S = 4.3e12  # copy, read + write, one H200
HOST_LOAD_REQUESTS = 500  # of a segment
HOST_LOAD_ROUNDS = 4  # idle and loaded segments of each kind
MILLION = 1_000_000  # decode steps of the small model
MILLION_TOKENS = 4000  # of one of its requests
PLACEMENTS = ("chained", "persistent", "host")
COMPARE_KEYS = "decode:1:512:200,decode:16:2048:1100,prefill:1:512:512,prefill:1:2048:2048"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A line of the request table: `concurrency` at a time, `num_requests` in all."""

    name: str
    concurrency: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def quick(self) -> Shape:
        """Return the same with fewer requests."""
        number = max(self.concurrency, -(-self.num_requests // QUICK_PART))
        return replace(self, num_requests=number)

    def __str__(self) -> str:
        return f"{self.concurrency} at a time, {self.prompt_tokens} -> {self.output_tokens}"


WARM = Shape(name="warm", concurrency=1, num_requests=2, prompt_tokens=64, output_tokens=16)
QUICK_PART = 4  # --quick sends this part of the requests: a look, not a measurement
BS1 = Shape(name="bs1", concurrency=1, num_requests=6, prompt_tokens=64, output_tokens=256)
C16 = Shape(name="c16", concurrency=16, num_requests=64, prompt_tokens=1024, output_tokens=128)
LONG = Shape(name="long", concurrency=1, num_requests=32, prompt_tokens=64, output_tokens=1900)
C64 = Shape(name="c64", concurrency=64, num_requests=192, prompt_tokens=1024, output_tokens=128)


def weight_bytes(launches: dict[str, Any], rows: int, distinct_experts: float) -> float:
    """Return the bytes of weights that a decode step of `rows` must read.

    The embedding table gives a row a token; of a mixture's experts only the chosen ones count.
    """
    widths = {"fp32": 4, "bf16": 2, "fp16": 2, "int32": 4, "int64": 8, "bool": 1}
    gathered = embedding_weights(launches)
    total = 0.0
    for number, weight in enumerate(launches["weights"]):
        size = float(widths[weight["dtype"]])
        for axis in weight["shape"]:
            size *= axis
        if number in gathered:
            size = size / weight["shape"][0] * rows
        elif len(weight["shape"]) == 3:
            size *= min(distinct_experts / weight["shape"][0], 1.0)
        total += size
    return total


def embedding_weights(launches: dict[str, Any]) -> set[int]:
    """Find the weights of vocabulary size that no product reads: rows are gathered from them."""
    products = {
        int(entry["weight"][1])
        for entry in launches["steps"]
        if entry["op"] == "gemm" and entry["weight"][0] == "weight"
    }
    return {
        number
        for number, weight in enumerate(launches["weights"])
        if weight["shape"][0] == launches["vocab_size"] and number not in products
    }


def run_shape(
    client: LoadClient, server: ServerProcess, shape: Shape, vocab: int
) -> dict[str, Any]:
    """Send one shape's requests; return its summary and the CPU time of the server's threads."""
    load = Load(
        num_requests=shape.num_requests, prompt_tokens=shape.prompt_tokens,
        output_tokens=shape.output_tokens, concurrency=shape.concurrency, vocab_size=vocab,
    )  # fmt: skip
    before, started = server.threads(), time.monotonic()
    result = summary(client.run(load))
    used = host_facts.used_by_threads(before, server.threads(), time.monotonic() - started)
    result["server_threads_percent"] = {name: v for name, v in used.items() if v > 0}
    print(
        f"  {shape!s:<28} {result['tokens_per_s']:8.1f} tok/s   "
        f"TTFT p50 {result['ttft_ms']['p50']:8.2f} ms   TPOT p50 {result['tpot_ms']['p50']:6.3f} "
        f"p99 {result['tpot_ms']['p99']:6.3f} ms",
        flush=True,
    )
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What the user asked for."""

    models: Path
    placements: tuple[str, ...] = PLACEMENTS
    is_quick: bool = False


def serve(
    run: Run, name: str, placement: str, shapes: Sequence[Shape], *options: str
) -> dict[str, Any]:
    """Serve a folder over HTTP and send it the shapes in turn."""
    folder = run.models / name
    launches = json.loads((folder / "launches.json").read_text())
    print(f"{folder.name}, {placement}:", flush=True)
    with ServerProcess(gpu_server(folder, placement, *options)) as server:
        result: dict[str, Any] = {"load": server.events["load"], "start_s": server.start_s}
        result["floor_bs1_ms"] = 1e3 * weight_bytes(launches, 1, 8) / PEAK_BYTES_PER_S
        with LoadClient(server.url) as client:
            run_shape(client, server, WARM, launches["vocab_size"])
            for shape in shapes:
                sent = shape.quick() if run.is_quick else shape
                result[shape.name] = run_shape(client, server, sent, launches["vocab_size"])
        result["end"] = server.end()
    return result


def part_serve(run: Run) -> dict[str, Any]:
    """Llama-3-8B shape: placement against placement against the floor."""
    found = {name: serve(run, "llama8b", name, (BS1, C16, C64)) for name in run.placements}
    floor = found[run.placements[0]]["floor_bs1_ms"]
    print(f"  floor of batch 1: {floor:.2f} ms (weights / 4.3 TB/s)")
    return found


def part_qwen(run: Run) -> dict[str, Any]:
    """Qwen3-30B-A3B shape, with the distinct experts that its steps had."""
    result = serve(run, "qwen3moe", "chained", (BS1, C16))
    # Again, because counting costs the served model a little.
    counted = serve(run, "qwen3moe", "chained", (replace(C16, num_requests=32),), "--count-experts")
    result["experts"] = counted["end"]["experts"]
    for rows, counts in result["experts"]["by_rows"].items():
        if int(rows) in (1, 16):
            print(f"  {rows} rows: distinct experts of a layer and step: {counts}", flush=True)
    return result


def part_compare(run: Run) -> dict[str, Any]:
    """Chained against back-to-back replay of the same graphs."""
    script, folder = ROOT / "benchmarks" / "bench_model.py", run.models / "llama8b"
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(script), str(folder), f"compare={COMPARE_KEYS}"]
        done = subprocess.run(
            command, env={**environment(), "OUT": scratch}, cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise ServerError(done.stdout[-1000:] + done.stderr[-2000:])
        files = list(Path(scratch).glob("*.json"))
        rows = json.loads(files[0].read_text())["results"]
    for row in rows:
        print(f"  {row['name']}: {row['added_percent']:+.2f} % of {row['plain_ms']:.3f} ms")
    return {row["name"]: row for row in rows}


def part_cache(run: Run) -> dict[str, Any]:
    """A cache of 800 graphs: cold, then with algorithms cached."""
    folder = run.models / "llama8b_cache"
    (folder / "algorithms.json").unlink(missing_ok=True)
    result = {}
    for state in ("cold", "cached"):
        with ServerProcess(gpu_server(folder, "chained")) as server:
            report = server.events["load"]
            result[state] = {**report, "start_s": server.start_s}
            server.end()
        print(
            f"  {report['num_graphs']} graphs, {state}: {report['graphs_s']:.1f} s, "
            f"{report['graph_bytes'] / 1e9:.2f} GB; tuning {report['tune_s']:.1f} s for "
            f"{report['num_measured']} products; process to ready {server.start_s:.1f} s",
            flush=True,
        )
    return result


def part_host_load(run: Run) -> dict[str, Any]:
    """P99 with the other cores idle and loaded, with and without reserved cores."""
    from benchmarks import bench_host_load

    load = Load(
        num_requests=60 if run.is_quick else HOST_LOAD_REQUESTS,
        prompt_tokens=32, output_tokens=32, rate_per_s=46.0, vocab_size=32000,
    )  # fmt: skip
    return bench_host_load.run(
        gpu_server(run.models / "llama8b", "chained"),
        load,
        rounds=2 if run.is_quick else HOST_LOAD_ROUNDS,
        contrast_rounds=1,
    )


def part_first_token(run: Run) -> dict[str, Any]:
    """From `blink-runtime run` to the first served token, weights on the disk."""
    bundle = run.models / "llama8b_cache" / "bundle"
    manifest = json.loads((bundle / "manifest.json").read_text())
    if not any(entry["path"].startswith("weights-") for entry in manifest["files"]):
        num_bytes, seconds = write_weights(bundle)
        print(f"  wrote {num_bytes / 1e9:.2f} GB of weights in {seconds:.1f} s", flush=True)
    result: dict[str, Any] = {}
    for state in ("cold", "cached"):
        for path in bundle.glob("weights-*.bin"):
            forget_pages(path)
        started = time.monotonic()
        with ServerProcess(bundle_server(bundle)) as server, LoadClient(server.url) as client:
            ready_s = time.monotonic() - started
            load = Load(num_requests=1, prompt_tokens=64, output_tokens=1, concurrency=1,
                        vocab_size=32000, model=manifest["model_name"])  # fmt: skip
            client.run(load)
            first_token_s = time.monotonic() - started
            server.end()
        said = [line.strip() for line in server.output if not line.startswith("captured")]
        result[state] = {"ready_s": ready_s, "first_token_s": first_token_s, "said": said}
        result[state].update(graphs_said(said))
        print(f"  {state}: ready {ready_s:.1f} s, first token {first_token_s:.1f} s", flush=True)
        for line in said:
            print(f"    {line}")
    return result


def graphs_said(lines: Sequence[str]) -> dict[str, float]:
    """Return what `blink-runtime run` said of its graphs; nothing where it said nothing."""
    for line in lines:
        found = re.search(r"(\d+) graphs of \d+ nodes in ([\d.]+) s, (\d+) MiB", line)
        if found:
            number, seconds, mebibytes = found.groups()
            return {
                "num_graphs": int(number),
                "graphs_s": float(seconds),
                "graph_bytes": float(mebibytes) * 2**20,
            }
    return {}


def print_threads(shares: dict[str, float]) -> float:
    """Print the CPU time of threads; return that of all but the front end's, in % of a core."""
    for name, percent in shares.items():
        part = "front end" if host_facts.is_front_end(name) else "other"
        print(f"    {percent:9.4f} % of a core  {name} ({part})")
    others = sum(v for name, v in shares.items() if not host_facts.is_front_end(name))
    print(f"    {others:9.4f} % of a core  all but the front end", flush=True)
    return others


def part_steps(run: Run) -> dict[str, Any]:
    """60,000 decode steps of the 8B shape without a host call: CPU time of every thread."""
    result = serve(run, "llama8b", "chained", (LONG,))
    print(f"  decode steps: {result['end']['counters']['decode_steps']}", flush=True)
    result["others_percent"] = print_threads(result[LONG.name]["server_threads_percent"])
    return result


def part_million(run: Run) -> dict[str, Any]:
    """A million decode steps of a two-layer model with one lane, as a user serves it.

    All requests are sent at once and wait in the ring.
    """
    bundle = run.models / "two_layers" / "bundle"
    model = json.loads((bundle / "manifest.json").read_text())["model_name"]
    num_steps = MILLION // (QUICK_PART if run.is_quick else 1)
    num_requests = -(-num_steps // (MILLION_TOKENS - 1))  # a first token comes from prefill
    load = Load(num_requests=num_requests, prompt_tokens=16, output_tokens=MILLION_TOKENS,
                concurrency=num_requests, model=model)  # fmt: skip
    found: dict[str, Any] = {}
    for placement in run.placements:
        if placement == "host":  # it has a thread that launches every step
            continue
        command = bundle_server(bundle, "--scheduler", placement)
        with ServerProcess(command) as server, LoadClient(server.url) as client:
            client.run(replace(load, num_requests=1, output_tokens=16, concurrency=1))
            before, first = server.threads(), decode_steps(server.url)
            started = time.monotonic()
            times = client.run(load)
            seconds = time.monotonic() - started
            steps = decode_steps(server.url) - first
            used = host_facts.used_by_threads(before, server.threads(), seconds)
            server.end()
        print(f"  {placement}: {steps} decode steps, {seconds * 1e6 / steps:.1f} us each")
        found[placement] = {
            "decode_steps": steps,
            "output_tokens": sum(t.num_tokens for t in times),
            "seconds": round(seconds, 2),
            "threads_percent": used,
            "others_percent": print_threads(used),
        }
    return found


def decode_steps(url: str) -> int:
    """Return the decode steps that a server has made so far."""
    with urlopen(f"{url}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("blink_decode_steps_total"):
                return int(float(line.split()[-1]))
    raise ServerError(f"{url}/metrics has no blink_decode_steps_total")


PARTS: dict[str, tuple[Callable[[Run], dict[str, Any]], str]] = {
    "serve": (part_serve, "Llama-3-8B shape over HTTP"),
    "compare": (part_compare, "chained against back-to-back replay, median of 20 pairs"),
    "qwen": (part_qwen, "Qwen3-30B-A3B shape over HTTP"),
    "cache": (part_cache, "the graph cache"),
    "first_token": (part_first_token, "from run to the first served token"),
    "host_load": (part_host_load, "under host load"),
    "million": (part_million, "a million steps without a host call, two layers"),
    "steps": (part_steps, "60,000 steps without a host call, 8B"),
}
DEFAULT_PARTS = "serve,compare,qwen,cache,first_token,host_load,million"


def open_result(output: Path, date: str) -> dict[str, Any]:
    """Return the result so far, or a new one; says which command added to it."""
    command = " ".join(["python -m benchmarks.bench_gpu", *sys.argv[1:]])
    if output.exists():
        result: dict[str, Any] = json.loads(output.read_text())
        result["commands"].append(command)
        return result
    return {
        "commands": [command],
        "date": date,
        "commit": host_facts.commit(),
        "hardware": host_facts.hardware(),
        "path": "HTTP, 127.0.0.1, client in a process of its own; random weights, bf16",
        "parts": {},
        "seconds": {},
        "errors": {},
    }


def main() -> None:
    """Run the parts; exit 1 if one of them broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--parts", default=DEFAULT_PARTS)
    parser.add_argument("--placements", default=",".join(PLACEMENTS))
    parser.add_argument("--quick", action="store_true", help="few requests: a look")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    run = Run(
        models=options.models,
        placements=tuple(options.placements.split(",")),
        is_quick=options.quick,
    )
    date = datetime.date.today().isoformat()
    output = options.output or ROOT / "benchmarks" / "results" / f"gpu_{date}.json"
    result = open_result(output, date)
    for name in options.parts.split(","):
        function, title = PARTS[name]
        print(f"== {title}", flush=True)
        result["errors"].pop(name, None)
        started = time.monotonic()
        try:
            result["parts"][name] = function(run)
        except (RuntimeError, OSError, KeyError, IndexError) as error:  # the others still count
            result["errors"][name] = str(error)[-3000:]
            print(f"  failed: {str(error)[-1500:]}", flush=True)
        result["seconds"][name] = round(time.monotonic() - started, 1)
        result["bars"] = judge(result["parts"])
        output.write_text(json.dumps(result, indent=1) + "\n")
    for bar in result["bars"]:
        verdict = "met" if bar["met"] else "FALLS SHORT"
        print(f"{bar['what']:<58} {bar['measured']:>9.4g}  bar {bar['bar']:g}: {verdict}")
    missing = len(BARS) - len(result["bars"])
    print(f"{missing} bars without a figure; {result['seconds']} s; written to {output}")
    sys.exit(1 if result["errors"] else 0)


if __name__ == "__main__":
    main()
