# ruff: noqa: RUF001 (letters that look like others are what the texts are for)
"""Tokenizer speed: ours against Hugging Face `tokenizers`, both called from Python, one thread.

Input: tokenizer.json files (by default those that the tokenizer's tests use) and texts cut from the
documentation and source of the Python that runs this. Every call gets a text that was not passed
before, to any of the encoders compared. Times are CPU time of the process (threads of the library,
if it starts any, count), so that other programs of the machine disturb little. Output: microseconds
a call and ratios on stdout, JSON in benchmarks/results. Run it as
`python benchmarks/bench_tokenizer.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tokenizer")]

LENGTHS_TOKENS = (10, 32, 128, 512, 2048)
NUM_TEXTS = {10: 4000, 32: 2000, 128: 1000, 512: 400, 2048: 160}


def corpus_texts() -> dict[str, str]:
    """Return prose, code and text of many scripts, from what every Python installation carries."""
    import encodings
    import pydoc_data.topics

    prose = "\n\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    library = Path(encodings.__file__).parents[1]
    names = ("argparse", "ast", "asyncio/tasks", "dataclasses", "decimal", "inspect", "typing")
    code = "\n".join(
        (library / f"{name}.py").read_text(encoding="utf-8")
        for name in names
        if (library / f"{name}.py").exists()
    )
    return {"prose": prose, "code": code, "scripts": scripts_text()}


def scripts_text() -> str:
    """Return sentences in several scripts with words in random order, so that slices differ."""
    sentences = (
        "Всe люди рождаются свободными и равными в своём достоинстве и правах",
        "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
        "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다",
        "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق",
        "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है",
        "Tous les êtres humains naissent libres et égaux en dignité et en droits",
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren",
        "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα",
        "כל בני אדם נולדו בני חורין ושווים בערכם ובזכויותיהם",
    )
    random_ = random.Random(7)
    words = [word for sentence in sentences for word in sentence.split()]
    return " ".join(random_.choice(words) for _ in range(60_000))


def slices(text: str, hf: Any, length_tokens: int, count: int, seed: int) -> list[str]:
    """Return `count` different slices of about `length_tokens` tokens that start at a word."""
    random_ = random.Random(seed)
    sample = text[: 1 << 16]
    chars = max(1, round(len(sample) / len(hf.encode(sample).ids) * length_tokens))
    found: set[str] = set()
    while len(found) < count:
        start = random_.randrange(max(1, len(text) - chars))
        start = text.find(" ", start) + 1
        found.add(text[start : start + chars])
    return sorted(found, key=lambda piece: hash((seed, piece)))


def time_calls(
    encoders: dict[str, Callable[[Sequence[str]], float]], texts: Sequence[str]
) -> dict[str, float]:
    """Return the median over ten parts of the microseconds of one call, by encoder.

    The encoders take turns, each with texts of its own: none profits from what another cached.
    """
    part = max(1, len(texts) // (10 * len(encoders)))
    times: dict[str, list[float]] = {name: [] for name in encoders}
    at = 0
    while at + part * len(encoders) <= len(texts):
        for name, seconds_of in encoders.items():
            times[name].append(seconds_of(texts[at : at + part]) / part * 1e6)
            at += part
    return {name: statistics.median(values) for name, values in times.items()}


def called(encode: Callable[[str], object]) -> Callable[[Sequence[str]], float]:
    """Return a function that passes each text to `encode` and returns the seconds that it took."""

    def seconds_of(texts: Sequence[str]) -> float:
        start = time.process_time()
        for text in texts:
            encode(text)
        return time.process_time() - start

    return seconds_of


def measure(name: str, raw: bytes, module: Any, corpora: dict[str, str]) -> list[dict[str, Any]]:
    """Time one vocabulary over every corpus and length; check that the ids are equal."""
    from tokenizers import Tokenizer

    from blinkc.bundle.compile_tokenizer import compile_tokenizer

    hf = Tokenizer.from_str(raw.decode())
    ours = module.Tokenizer(compile_tokenizer(raw))
    rows = []
    for corpus, text in corpora.items():
        for length in LENGTHS_TOKENS:
            texts = slices(text, hf, length, NUM_TEXTS[length], seed=length)
            for piece in texts[:20]:
                if hf.encode(piece).ids != ours.encode(piece):
                    raise SystemExit(f"{name}: ids differ for {piece!r}")
            warm, timed = texts[: len(texts) // 5], texts[len(texts) // 5 :]
            for piece in warm:
                hf.encode(piece)
                ours.encode(piece)
            row: dict[str, Any] = {"vocabulary": name, "corpus": corpus, "tokens": length}
            row["bytes"] = round(statistics.mean(len(piece.encode()) for piece in timed))
            encoders = {
                "hf_us": called(lambda text: hf.encode(text).ids),
                "hf_fast_us": called(lambda text: hf.encode_batch_fast([text])[0].ids),
                "ours_us": called(ours.encode),
                "cpp_us": lambda texts: module.encode_ns(ours, list(texts)) / 1e9,
            }
            row.update(time_calls(encoders, timed))
            row["ratio"] = row["hf_us"] / row["ours_us"]
            rows.append(row)
            print(
                f"{name:12} {corpus:8} {length:5} tokens  hf {row['hf_us']:8.1f} us "
                f"(without offsets {row['hf_fast_us']:8.1f})  ours {row['ours_us']:7.1f} us  "
                f"ratio {row['ratio']:5.1f}  C++ alone {row['cpp_us']:7.1f} us "
                f"({row['bytes'] / row['cpp_us']:.0f} MB/s)",
                flush=True,
            )
    return rows


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def write_result(output: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows with what is needed to judge and repeat them."""
    import tokenizers

    rounded = [
        {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
        for row in rows
    ]
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python benchmarks/bench_tokenizer.py", *sys.argv[1:]]),
        "hardware": f"{cpu_name()}, {os.cpu_count()} cores",
        "clock": "CPU time of the process",
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "rows": rounded,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", action="append", help="name of a test vocabulary")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "tokenizer.json"
    )
    arguments = parser.parse_args()
    from vocabularies import NPM_NAMES, load_module, tokenizer_json

    module = load_module()
    corpora = corpus_texts()
    rows: list[dict[str, Any]] = []
    for name in arguments.vocabulary or NPM_NAMES:
        measured = measure(name, tokenizer_json(name), module, corpora)
        ratios = [row["ratio"] for row in measured]
        print(
            f"{name}: ratio {min(ratios):.1f} to {max(ratios):.1f}, "
            f"geometric mean {statistics.geometric_mean(ratios):.1f}",
            flush=True,
        )
        rows += measured
        write_result(arguments.output, rows)


if __name__ == "__main__":
    main()
