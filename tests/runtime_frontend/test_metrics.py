"""/metrics read by a strict parser of Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from blinkc import abi

from .fake_server import NAN, Server
from .test_http import exchange

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\n"])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)?\}})? (-?[0-9.e+-]+|\+Inf|-Inf|NaN)")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


@dataclass
class Family:
    kind: str
    samples: dict[tuple[str, str], float] = field(default_factory=dict)


def parse(text: str) -> dict[str, Family]:
    """Read the text; every line must be known, every family whole and in one piece."""
    families: dict[str, Family] = {}
    helped: list[str] = []
    assert text.endswith("\n")
    name = ""
    for line in text.removesuffix("\n").split("\n"):
        if match := re.fullmatch(rf"# HELP ({NAME}) (\S.*)", line):
            helped.append(match[1])
        elif match := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge|histogram)", line):
            name = match[1]
            assert name not in families, f"{name} comes twice"
            assert helped[-1] == name, f"{name} has no help"
            families[name] = Family(match[2])
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            family = families[name]
            assert any(match[1] == name + end for end in SUFFIXES[family.kind]), line
            key = (match[1].removeprefix(name), match[2] or "")
            assert key not in family.samples, line
            family.samples[key] = float(match[3])
    assert len(helped) == len(set(helped)) == len(families)
    return families


def check_histogram(family: Family) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    for (suffix, labels), value in family.samples.items():
        if suffix == "_bucket":
            bound = re.search(r'le="([^"]+)"', labels)
            assert bound is not None
            rest = re.sub(r',?le="[^"]+"', "", labels)
            series.setdefault(rest, []).append((float(bound[1]), value))
    assert series
    for labels, buckets in series.items():
        bounds, counts = zip(*buckets, strict=True)
        assert list(bounds) == sorted(set(bounds)) and math.isinf(bounds[-1])
        assert list(counts) == sorted(counts)
        assert family.samples["_count", labels] == counts[-1]
        assert family.samples["_sum", labels] >= 0


def test_metrics_are_well_formed(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.complete("hello")
    server.complete([65, NAN])
    exchange(server, b"nonsense\r\n")
    families = parse(server.http.get("/metrics").text)
    for name, family in families.items():
        assert re.fullmatch(r"blink_[a-z0-9_]+", name)
        assert (family.kind == "counter") == name.endswith("_total"), name
        assert all(value >= 0 for value in family.samples.values()), name
        if family.kind == "histogram":
            check_histogram(family)
    for name in ("ttft", "tpot", "itl", "e2e"):
        assert families[f"blink_{name}_seconds"].kind == "histogram"
    responses = families["blink_http_responses_total"].samples
    statuses = {labels: value for (_, labels), value in responses.items()}
    assert [statuses[f'status="{status}"'] for status in (200, 400, 500)] == [1, 1, 1]


def test_what_the_ring_says_is_told(make_server: Callable[..., Server]) -> None:
    """Guards that a failed launch can be read: its code and its graph key."""
    server = make_server()
    header = abi.structs()["blink_ring_header"].from_address(server.ring.address)
    header.launch_error, header.launch_error_key = 719, 7
    header.counters.max_wait_steps = 1
    families = parse(server.http.get("/metrics").text)
    for name, value in (("launch_error", 719), ("launch_error_key", 7), ("max_wait_steps", 1)):
        assert families[f"blink_{name}"].samples == {("", ""): value}


def test_parser_sees_what_is_wrong() -> None:
    """The bug: a parser that takes anything."""
    good = "# HELP a_total x\n# TYPE a_total counter\na_total 1\n"
    assert parse(good)["a_total"].samples == {("", ""): 1.0}
    for bad in (
        good[:-1],
        good + good,
        good.replace("# HELP a_total x\n", ""),
        good.replace("a_total 1", "a_total one"),
        good.replace("a_total 1", "b_total 1"),
        good.replace("a_total 1", "a_total{x=1} 1"),
        good + "a_total 1\n",
        good + "\n",
    ):
        try:
            parse(bad)
        except (AssertionError, IndexError, KeyError):
            continue
        raise AssertionError(f"taken: {bad!r}")
