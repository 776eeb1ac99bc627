"""A kernel with the faults that compute-sanitizer looks for; sanitize.sh starts with it.

It writes behind its buffer (memcheck) and reads without a barrier what other warps wrote
(racecheck). A tool that misses them here watches none of this project's kernels.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import c_uint64

from blink_runtime.cuda_driver import Context, DeviceBuffer, Module, Stream
from blink_runtime.cuda_graphs import Launch, launch
from blinkc.errors import BlinkError
from tests.gpu.harness import cached_cubin

THREADS = 128
SOURCE = """
extern "C" __global__ void faulty(int* out) {
  __shared__ int seen[THREADS];
  seen[threadIdx.x] = threadIdx.x;
  out[threadIdx.x + 1] = seen[(threadIdx.x + 64) % THREADS];
}
""".replace("THREADS", str(THREADS))


def run() -> None:
    """Launch it once.

    Raises:
        BlinkError: the tool ended the context.
    """
    with Context():
        stream, out = Stream(), DeviceBuffer(4 * THREADS, "the canary's result")
        function = Module(cached_cubin(SOURCE), "the canary").function("faulty")
        args = (c_uint64(out.address),)
        launch(Launch(function, (1, 1, 1), THREADS, 0, args, early=False), stream)
        stream.synchronize()


if __name__ == "__main__":
    # A process that fails by itself would hide what the tool says.
    with suppress(BlinkError):
        run()
