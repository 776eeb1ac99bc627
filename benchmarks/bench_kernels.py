"""Times the CUDA kernels alone, in captured graphs: sizes of Llama-3-8B and Qwen3-30B-A3B -> a
table.

Run on the GPU machine: `PYTHONPATH=.:runtime python3 benchmarks/bench_kernels.py [PART]...`, parts
gemv, narrow, attention, sample, experts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blink_runtime.cuda_graphs import Launch

from blinkc.engine.cuda_instances import (
    GEMV_INSTANCES,
    NARROW_INSTANCES,
    GemvInstance,
    NarrowInstance,
)
from blinkc.engine.cuda_source import CudaNeeds, render_cuda_source

TUNING = tuple(
    GemvInstance(
        name=f"tune_t{t}_r{r}_{'s' if s else 'x'}_w{w}_d{d}",
        tiles=t,
        row_tiles=r,
        input_shared=s,
        warps=w,
        depth=d,
    )
    for t, r, s, w, d in (
        (2, 1, True, 16, 8),
        (2, 1, True, 8, 12),
        (4, 1, False, 8, 6),
        (4, 2, False, 8, 5),
        (4, 2, False, 16, 2),
    )
)
TUNING_NARROW = tuple(
    NarrowInstance(columns=columns, groups=groups, splits=splits, stages=stages)
    for columns, groups, stages in (
        (16, 1, 6), (16, 1, 12), (32, 1, 5), (32, 1, 11), (64, 1, 9), (64, 2, 5),
    )
    for splits in (1, 2, 4)
)  # fmt: skip
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


def bench_needs() -> CudaNeeds:
    """Return what the benchmark's module holds."""
    return CudaNeeds(
        dtype="bf16",
        heads=((128, 4), (64, 4)),
        logits_dtype="bf16",
        activation="silu",
        gemv=GEMV_INSTANCES + TUNING,
        narrow=NARROW_INSTANCES + TUNING_NARROW,
    )


class Bench:
    """A context, a module and a way to time launches."""

    def __init__(self) -> None:
        import torch

        from blink_runtime.cuda_driver import Context, Module, Stream
        from blink_runtime.cuda_kernels import CudaKernels
        from tests.gpu.harness import cached_cubin

        torch.zeros(1, device="cuda")
        self.context = Context()
        self.stream = Stream()
        self.module = Module(cached_cubin(render_cuda_source(bench_needs())), "bench")
        self.kernels = CudaKernels(self.module, self.context.spec)
        self.results: list[dict[str, object]] = []

    def time_us(self, launches: Sequence[Launch], repeats: int = 10) -> float:
        """Return the median time of a captured graph of `launches`."""
        from blink_runtime.cuda_driver import Event
        from blink_runtime.cuda_graphs import Capture, GraphExec, launch

        with Capture(self.stream) as capture:
            for item in launches:
                launch(item, self.stream)
        assert capture.graph is not None
        run = GraphExec(capture.graph, device_launch=False, name="bench")
        times = []
        for i in range(repeats + 3):
            start, end = Event(), Event()
            start.record(self.stream)
            run.launch(self.stream)
            end.record(self.stream)
            if i >= 3:
                times.append(end.milliseconds_since(start) * 1000)
        run.close()
        capture.graph.close()
        return statistics.median(times)

    def report(self, name: str, us: float, floor_us: float = 0.0, **facts: object) -> None:
        """Print and keep one line."""
        share = f"  {100 * floor_us / us:5.1f} % of the floor's speed" if floor_us else ""
        print(f"{name:60s} {us:9.2f} us{share}", flush=True)
        self.results.append({"name": name, "us": us, "floor_us": floor_us, **facts})


def bench_gemv(bench: Bench) -> None:
    """Time the products of 8 Llama-3-8B layers, each layer with weights of its own."""
    import torch

    layers = 8
    weights = [
        [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for n, k in LLAMA]
        for _ in range(layers)
    ]
    floor = sum(n * k * 2 for n, k in LLAMA) * layers / 4.3e12 * 1e6
    for m, names in (
        (1, ("resident", "_s_")),
        (4, ("gemv_8", "_r1_x")),
        (8, ("gemv_8", "_r1_x")),
        (16, ("gemv_16", "_r2_")),
    ):
        x = torch.randn(m, 14336, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(m, 28672, device="cuda", dtype=torch.bfloat16)
        for instance in GEMV_INSTANCES + TUNING:
            if not any(name in instance.name for name in names):
                continue
            launches = [
                bench.kernels.gemv(x.data_ptr(), w.data_ptr(), 0, out.data_ptr(), m, n, k, instance)
                for layer in weights
                for w, (n, k) in zip(layer, LLAMA, strict=True)
            ]
            try:
                bench.report(
                    f"gemv m={m} {instance.name} 8 layers", bench.time_us(launches), floor, m=m
                )
            except Exception as error:  # a variant that does not fit is a result too
                print(instance.name, error)
            if m in (1, 16) and instance.name.startswith("gemv_"):
                for i, (n, k) in enumerate(LLAMA):
                    one = launches[i :: len(LLAMA)]
                    bench.report(
                        f"   n={n} k={k} each",
                        bench.time_us(one) / layers,
                        n * k * 2 / 4.3e12 * 1e6,
                    )
        y = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for n, _ in LLAMA]
        graph = torch.cuda.CUDAGraph()
        inputs = {k: x[:, :k].contiguous() for _, k in LLAMA}
        for _ in range(2):
            for w, (_, k), o in zip(weights[0], LLAMA, y, strict=True):
                torch.mm(inputs[k], w.T, out=o)
        with torch.cuda.graph(graph):
            for layer in weights:
                for w, (_, k), o in zip(layer, LLAMA, y, strict=True):
                    torch.mm(inputs[k], w.T, out=o)
        times = []
        for _ in range(10):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            times.append(a.elapsed_time(b) * 1000)
        bench.report(f"gemv m={m} torch.mm 8 layers", statistics.median(times), floor, m=m)


def bench_narrow(bench: Bench) -> None:
    """Time every instance for 16, 32 and 64 rows; layers follow each other as in a step."""
    import torch

    from blink_runtime.cuda_kernels import choose_narrow

    layers = 12
    for n, k in (*LLAMA, (128256, 4096), (5120, 2048), (2048, 4096)):
        weights = [
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
            for _ in range(layers if n < 100000 else 2)
        ]
        for m in (16, 32, 64):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            chosen = choose_narrow(m, n, k, bench.kernels.num_multiprocessors)
            for instance in NARROW_INSTANCES + TUNING_NARROW:
                if instance.columns != m or k // 64 < 4 * instance.splits:
                    continue
                launches = [
                    bench.kernels.narrow(
                        x.data_ptr(), w.data_ptr(), 0, out.data_ptr(), m, n, k, instance
                    )
                    for w in weights
                ]
                try:
                    us = bench.time_us(launches) / len(weights)
                except Exception as error:  # a variant that does not fit is a result too
                    print(instance.name, error)
                    continue
                mark = " (chosen)" if instance == chosen else ""
                bench.report(
                    f"{n}x{k} m={m} {instance.name}{mark}", us, n * k * 2 / 4.3e12 * 1e6, m=m
                )


def bench_attention(bench: Bench) -> None:
    """Time attention of Llama-3-8B's shape."""
    import torch

    from blink_runtime.cuda_kernels import AttentionShape
    from tests.gpu.harness import KernelHarness, PagedStep

    harness = KernelHarness.__new__(KernelHarness)
    harness.dtype = torch.bfloat16
    shape = AttentionShape(num_q_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    for batch, length in ((1, 128), (1, 1024), (1, 4000), (16, 1100), (64, 1100)):
        step = PagedStep(harness, [1] * batch, [length] * batch, 8, 128)
        seqlen = -(-length // 256) * 256
        q = torch.randn(batch, 32, 128, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(q)
        partial = torch.empty(
            bench.kernels.decode_partial_bytes(shape, batch, seqlen) // 4 + 4, device="cuda"
        )
        arrivals = torch.zeros(batch * 8, dtype=torch.int32, device="cuda")
        launches = (
            bench.kernels.decode_attention(
                step.addresses(),
                shape,
                q.data_ptr(),
                step.new_k.data_ptr(),
                step.new_v.data_ptr(),
                out.data_ptr(),
                step.kv.data_ptr(),
                0,
                partial.data_ptr(),
                arrivals.data_ptr(),
                batch,
                seqlen,
            )
            * 8
        )
        torch.cuda.synchronize()
        bench.report(
            f"decode attention batch={batch} length={length}",
            bench.time_us(launches) / 8,
            batch * length * 2 * 8 * 128 * 2 / 4.3e12 * 1e6,
        )
    for new, total in (
        ([64], [64]),
        ([512], [512]),
        ([2048], [2048]),
        ([1024, 1024], [1024, 1024]),
    ):
        step = PagedStep(harness, new, total, 8, 128)
        count = sum(new)
        q = torch.randn(count, 32, 128, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(q)
        launches = (
            bench.kernels.prefill_attention(
                step.addresses(),
                shape,
                q.data_ptr(),
                step.new_k.data_ptr(),
                step.new_v.data_ptr(),
                out.data_ptr(),
                step.kv.data_ptr(),
                0,
                len(new),
                count,
            )
            * 8
        )
        torch.cuda.synchronize()
        flops = sum(4 * n * n / 2 * 32 * 128 for n in new)
        bench.report(f"prefill attention {new}", bench.time_us(launches) / 8, flops / 790e12 * 1e6)


def bench_sample(bench: Bench) -> None:
    """Time sampling of Llama-3's vocabulary, greedy and with top_k and top_p."""
    import torch

    from tests.gpu.harness import KernelHarness, PagedStep
    from tests.gpu.test_kernels import params

    harness = KernelHarness.__new__(KernelHarness)
    harness.dtype = torch.bfloat16
    for rows in (1, 64):
        for name, setting in (
            ("greedy", params()),
            ("drawn", params(1.0)),
            ("top_p", params(1.0, 0.9)),
            ("top_k, top_p", params(1.0, 0.9, 0, 50)),
        ):
            logits = (torch.randn(rows, 128256, device="cuda") * 3).to(torch.bfloat16)
            raw = torch.frombuffer(bytearray(bytes(setting) * rows), dtype=torch.uint8).cuda()
            ids = torch.zeros(rows, dtype=torch.int32, device="cuda")
            paged = PagedStep(harness, [1], [1], 1, 64)
            step = paged.addresses(raw.data_ptr(), ids.data_ptr())
            counts = torch.zeros(rows, 128256, dtype=torch.int32, device="cuda")
            launches = bench.kernels.sample(
                step, logits.data_ptr(), counts.data_ptr(), rows, 128256
            )
            torch.cuda.synchronize()
            bench.report(f"sample rows={rows} {name}", bench.time_us(launches * 4) / 4)


def bench_experts(bench: Bench) -> None:
    """Time the experts of Qwen3-30B-A3B's shape; 8 layers' weights in turn."""
    import torch

    from blink_runtime.cuda_experts import ExpertsShape
    from tests.gpu.experts_step import ExpertsStep
    from tests.gpu.harness import KernelHarness

    harness = KernelHarness.__new__(KernelHarness)
    harness.dtype = torch.bfloat16
    shape = ExpertsShape(num_experts=128, num_choices=8, hidden_size=2048, intermediate_size=768)
    layers = [
        (
            torch.randn(128, 1536, 2048, device="cuda", dtype=torch.bfloat16),
            torch.randn(128, 2048, 768, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(4)
    ]
    for tokens in (1, 4, 16, 64, 512, 2048):
        step = ExpertsStep(harness, shape, tokens)
        launches = [
            item for gate_up, down in layers for item in step.launches(bench.kernels, gate_up, down)
        ]
        torch.cuda.synchronize()
        distinct = len(set(step.ids.flatten().tolist()))
        bytes_floor = distinct * 3 * 768 * 2048 * 2 / 4.3e12 * 1e6
        flops_floor = tokens * 8 * 3 * 768 * 2048 * 2 / 790e12 * 1e6
        bench.report(
            f"experts tokens={tokens} distinct={distinct}",
            bench.time_us(launches) / len(layers),
            max(bytes_floor, flops_floor),
        )


def main() -> None:
    """Run the named parts, all without a name."""
    parts = {
        "gemv": bench_gemv,
        "narrow": bench_narrow,
        "attention": bench_attention,
        "sample": bench_sample,
        "experts": bench_experts,
    }
    import torch

    if not torch.cuda.is_available():
        sys.exit("bench_kernels.py: it needs an NVIDIA GPU and a PyTorch for CUDA")
    bench = Bench()
    for name in sys.argv[1:] or parts:
        parts[name](bench)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "kernels.json").write_text(json.dumps(bench.results, indent=1))


if __name__ == "__main__":
    main()
