"""Compiles the test modules into the cache, one process each: `python3 -m tests.gpu.compile_cubins
bf16`."""

from __future__ import annotations

import sys

from benchmarks.bench_kernels import bench_needs
from blinkc.engine.cuda_source import render_cuda_source
from tests.gpu.harness import cached_cubin, kernel_needs

if __name__ == "__main__":
    for name in sys.argv[1:]:
        needs = bench_needs() if name == "bench" else kernel_needs(name)
        cached_cubin(render_cuda_source(needs))
