"""The benchmarks' own arithmetic: what is printed must be what was measured."""

from __future__ import annotations

import os
import threading
import time
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import host_facts
from benchmarks.bench_gpu import embedding_weights, graphs_said, weight_bytes
from benchmarks.bench_host_load import HostLoad, ratio_interval
from benchmarks.gpu_bars import BARS, judge
from benchmarks.report import groups_of, svg


def test_thread_times_tell_the_busy_one() -> None:
    has_spun, may_end = threading.Event(), threading.Event()

    def spin() -> None:
        deadline = time.thread_time() + 0.1
        while time.thread_time() < deadline:
            pass
        has_spun.set()
        may_end.wait()

    before = host_facts.thread_times()
    busy, idle = threading.Thread(target=spin), threading.Thread(target=may_end.wait)
    busy.start()
    idle.start()
    assert has_spun.wait(60)
    used = host_facts.used_by_threads(before, host_facts.thread_times(), 1.0)
    by_id = {int(name.rsplit("/", 1)[1]): share for name, share in used.items()}
    assert by_id[busy.native_id or 0] > 8  # percent of a core for a second: at least 10, in ticks
    assert by_id[idle.native_id or 0] < 5
    assert list(used.values()) == sorted(used.values(), reverse=True)
    may_end.set()
    busy.join()
    idle.join()


def test_steal_is_the_eighth_number() -> None:
    stat = "cpu  10 20 30 40 50 60 70 800 90 100\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    assert host_facts.steal_s(stat) == 800 / os.sysconf("SC_CLK_TCK")
    assert host_facts.steal_s() >= 0


def test_reserved_cores_are_whole() -> None:
    """A load on the other hardware thread of a reserved core would not be a reservation."""
    pairs = {core: {core, core ^ 1} for core in range(16)}
    far = {core: {core, (core + 8) % 16} for core in range(16)}
    assert host_facts.reserve_cores(4, set(range(16)), pairs) == {0, 1, 2, 3}
    assert host_facts.reserve_cores(4, set(range(16)), far) == {0, 1, 8, 9}
    assert host_facts.reserve_cores(2, {3, 5, 7}, {}) == {3, 5}
    with pytest.raises(ValueError, match="leave none"):
        host_facts.reserve_cores(4, {0, 1, 2, 3}, {})


def test_host_load_uses_the_cores_it_was_given() -> None:
    core = max(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    with HostLoad({core}, 2) as load:
        children = [p.pid for p in load._processes]
        assert [os.sched_getaffinity(pid or 0) for pid in children] == [{core}] * 2
    assert load.cpu_s > 0
    assert os.sched_getaffinity(0) == before
    assert not any(process.is_alive() for process in load._processes)


def test_ratio_interval_holds_the_truth() -> None:
    draw = np.random.default_rng(3)
    idle = draw.normal(10, 0.5, 600)
    same = ratio_interval(list(idle), list(draw.normal(10, 0.5, 600)))
    assert same["low_percent"] < 0 < same["high_percent"]
    slower = ratio_interval(list(idle), list(idle * 1.2))
    assert slower["low_percent"] < 20 < slower["high_percent"]
    assert slower["grown_percent"] == pytest.approx(20)
    assert slower["low_percent"] > 5


def small_launches() -> dict[str, Any]:
    def weight(*shape: int) -> dict[str, Any]:
        return {"shape": list(shape), "dtype": "bf16", "name": "w"}

    def product(number: int) -> dict[str, Any]:
        return {"op": "gemm", "weight": ["weight", number]}

    weights = [weight(1000, 8), weight(16, 8), weight(4, 6, 8), weight(1000, 8)]
    return {"weights": weights, "vocab_size": 1000, "steps": [product(1), product(3)]}


def test_weight_bytes_count_what_a_step_reads() -> None:
    """An embedding table counts a row a token, experts only those chosen."""
    launches = small_launches()
    assert embedding_weights(launches) == {0}
    dense = 2 * (16 * 8 + 1000 * 8)
    assert weight_bytes(launches, 1, 1) == dense + 2 * 8 + 2 * 6 * 8
    assert weight_bytes(launches, 16, 99) == dense + 2 * 8 * 16 + 2 * 4 * 6 * 8


def test_graphs_are_read_from_the_log() -> None:
    line = "800 graphs of 319 nodes in 6.5 s, 820 MiB; 0 products measured in 0.1 s"
    found = graphs_said(["ready", line])
    assert found == {"num_graphs": 800, "graphs_s": 6.5, "graph_bytes": 820 * 2**20}
    assert graphs_said(["ready"]) == {}
    rows = judge({"first_token": {"cached": {**found, "first_token_s": 20.0}}})
    assert [row["measured"] for row in rows] == [6.5, 820 * 2**20 / 1e9, 20.0]


def parts() -> dict[str, Any]:
    shape = {"tpot_ms": {"p50": 4.0}, "ttft_ms": {"p50": 8.0}, "tokens_per_s": 3300.0}
    return {
        "serve": {"chained": {"bs1": shape, "c16": shape, "c64": shape}},
        "compare": {"a": {"added_percent": 0.2}, "b": {"added_percent": -3.0}},
        "host_load": {
            "reserved": {
                m: {"grown_percent": 7.0, "idle_p99_ms": 5.0, "loaded_p99_ms": 5.4}
                for m in ("tpot", "ttft")
            }
        },
    }


def test_bars_are_judged_on_their_side() -> None:
    rows = {row["what"]: row for row in judge(parts())}
    assert len(rows) == 7  # without the parts that were not run
    met = [row["met"] for row in rows.values()]
    assert met == [True, False, True, True, True, False, False]
    assert rows["chained over back-to-back replay, the worst key, %"]["measured"] == 0.2
    assert judge({}) == []
    assert len({bar.what for bar in BARS}) == len(BARS)


def test_report_draws_every_figure() -> None:
    result = {"bars": judge(parts()), "parts": parts(), "date": "2026-01-01", "path": "<http>"}
    groups = groups_of(result)
    assert len(groups) == 7 + 2
    root = ElementTree.fromstring(svg(groups, "a < b"))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert "a < b" in texts
    assert sum("falls short" in text for text in texts) == 3
    rectangles = [e for e in root.iter() if e.tag.endswith("rect")]
    assert len(rectangles) == 1 + sum(len(group.bars) for group in groups)
    assert all(0 <= float(r.get("x", 0)) <= 900 for r in rectangles)


def test_routing_ids_are_recognised() -> None:
    from benchmarks.count_experts import routing_ids

    ids = np.array([[3, 1, 2], [7, 0, 5]])
    for dtype in (np.int32, np.int64):
        raw = ids.astype(dtype).tobytes() + b"\xff" * 200
        found = routing_ids(raw, 2, 3, 8)
        assert found is not None and (found == ids).all()
    assert routing_ids(np.array([[3, 1, 3]], np.int32).tobytes(), 1, 3, 8) is None
    assert routing_ids(np.array([[3, 1, 9]], np.int32).tobytes(), 1, 3, 8) is None
    assert routing_ids(np.random.default_rng(0).bytes(64), 2, 3, 8) is None
