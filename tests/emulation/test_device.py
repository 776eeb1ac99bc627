"""The emulated device itself: it computes what the instructions say, and faults where a GPU would
fail or leave a result to chance."""

from __future__ import annotations

from ctypes import c_uint64

import pytest

from blink_runtime.cuda_graphs import Launch
from tests.emulation.harness import EmulatedHarness
from tests.emulation.module import EmulatedFunction, EmulatedModule, KernelFault

torch = pytest.importorskip("torch")

SOURCE = """
#include "blink/device/kernels/warpgroup.cuh"
using namespace blink::kernels;

// A product of a tile that is all ones by itself: out gets 16.
template <bool kShow, bool kFence, bool kWait, bool kSame>
__device__ void ones(int32_t* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_previous();
  const uint32_t tile = (shared_address(shared) + 1023) & ~1023u;
  for (int i = threadIdx.x; i < 64 * 8; i += blockDim.x)
    copy_async(tile + i * 16, out + 512, true);
  copy_async_commit();
  copy_async_wait<0>();
  if (kShow) show_to_products();
  __syncthreads();
  float sum[8];
  if (kFence) products_begin();
  if (kSame || threadIdx.x < 96) {
    WarpgroupProduct<bf16, 16>::run(sum, k_major(tile), k_major(tile), false);
    products_commit();
    if (kWait) products_wait<0>();
  }
  for (int i = 0; i < 8; ++i) out[(threadIdx.x % 32) * 8 + i] = static_cast<int32_t>(sum[i]);
}

extern "C" {

__global__ void convert(const float* x, uint16_t* bf16s, uint16_t* halves) {
  wait_for_previous();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  bf16s[i] = from_float<bf16>(x[i]).bits;
  halves[i] = from_float<fp16>(x[i]).bits;
}
__global__ void widen(const uint16_t* halves, float* x) {
  wait_for_previous();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  x[i] = to_float(fp16{halves[i]});
}

// out: for each lane, a shuffle of each kind, a reduction of each kind, a transposed matrix load.
__global__ void exchanges(int32_t* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_previous();
  const int lane = threadIdx.x;
  uint16_t* matrix = reinterpret_cast<uint16_t*>(shared);  // four of 8 x 8, numbered
  for (int i = lane; i < 256; i += 32) matrix[i] = i;
  __syncwarp();
  uint32_t r[4];
  load_matrix_transposed(r, shared_address(matrix + lane * 8));
  out += lane * 8;
  out[0] = __shfl_xor_sync(0xffffffffu, lane, 5);
  out[1] = __shfl_up_sync(0xffffffffu, lane, 4);
  out[2] = __shfl_sync(0xffffffffu, lane, 7);
  out[3] = __reduce_max_sync(0xffffffffu, lane ^ 21);
  out[4] = __any_sync(0xffffffffu, lane == 9);
  out[5] = __byte_perm(0x33221100u, 0x77665544u, 0x7632);
  out[6] = r[2] & 0xffff;
  out[7] = r[2] >> 16;
}

__global__ void returns_early(int32_t* out) { out[0] = 1; }
__global__ void barrier_of_some(int32_t* out) {
  wait_for_previous();
  if (threadIdx.x < 40) __syncthreads();
}
__global__ void shuffle_of_some(int32_t* out) {
  wait_for_previous();
  if (threadIdx.x == 3) return;
  out[0] = __shfl_sync(0xffffffffu, 1, 0);
}
__global__ void lanes_part(int32_t* out) {
  wait_for_previous();
  if (threadIdx.x & 1) __syncwarp();
  out[0] = __shfl_sync(0xffffffffu, 1, 0);
}
__global__ void load_past_end(int32_t* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_previous();
  out[0] = load_shared16(shared_address(shared) + 1024).x;
}
__global__ void store_past_end(int32_t* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_previous();
  if (threadIdx.x == 0) shared[1024 + 8] = 1;
}
__global__ void load_crooked(int32_t* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_previous();
  out[0] = load_shared16(shared_address(shared) + 8).x;
}
__global__ void store_at_null(int32_t* out) {
  wait_for_previous();
  reinterpret_cast<volatile int32_t*>(64)[threadIdx.x] = 1;
}
__global__ void copy_from_nowhere(int32_t* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_previous();
  copy_async(shared_address(shared), out - 4);
  copy_async_wait<0>();
}
__global__ void copy_too_early(int32_t* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  copy_async(shared_address(shared) + threadIdx.x * 16, out);
  copy_async_commit();
  copy_async_wait<0>();
  wait_for_previous();
}
__global__ void copy_not_awaited(int32_t* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_previous();
  copy_async(shared_address(shared) + threadIdx.x * 16, out);
  copy_async_commit();
}
__global__ void copy_read_at_once(int32_t* out) {
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_previous();
  copy_async(shared_address(shared) + threadIdx.x * 16, out + threadIdx.x * 4);
  copy_async_commit();
  const int32_t got = load_shared16(shared_address(shared) + threadIdx.x * 16).x;
  copy_async_wait<0>();
  out[threadIdx.x * 4 + 1] = got;
}
// The barrier between writing and reading is missing where `out[0]` says so.
__global__ void neighbours(int32_t* out) {
  __shared__ int32_t values[64];
  wait_for_previous();
  const bool with_barrier = out[0] != 0;
  __syncthreads();
  values[threadIdx.x] = threadIdx.x;
  if (with_barrier) __syncthreads();
  out[threadIdx.x + 1] = values[63 - threadIdx.x];
}
__global__ void lanes_without_syncwarp(int32_t* out) {
  __shared__ int32_t values[64];
  wait_for_previous();
  values[threadIdx.x] = threadIdx.x;
  out[threadIdx.x + 1] = values[threadIdx.x ^ 1];
}
__global__ void writes_beside(int32_t* out) {
  wait_for_previous();
  out[256] = 1;
}
__global__ __cluster_dims__(2, 1, 1) void stores_before_start(int32_t* out) {
  __shared__ uint32_t word;
  wait_for_previous();
  store_in_cluster(shared_address(&word), 1, blockIdx.x ^ 1);
}
__global__ __cluster_dims__(2, 1, 1) void leaves_while_read(int32_t* out) {
  __shared__ float2 words;
  wait_for_previous();
  words = make_float2(1.0f, 2.0f);
  cluster_barrier();
  out[blockIdx.x * 64 + threadIdx.x] = load_of_cluster(shared_address(&words), blockIdx.x ^ 1).y;
}
__global__ __cluster_dims__(2, 1, 1) void reads_of_cluster(int32_t* out) {
  __shared__ float2 words[64];
  wait_for_previous();
  words[threadIdx.x] = make_float2(1.0f, blockIdx.x * 64 + threadIdx.x);
  cluster_barrier();
  const int other = 63 - threadIdx.x;
  out[blockIdx.x * 64 + threadIdx.x] =
      load_of_cluster(shared_address(&words[other]), blockIdx.x % 2 ^ 1).y;
  cluster_barrier();
}
__global__ __launch_bounds__(32) void few_threads(int32_t* out) { wait_for_previous(); }

__global__ void product_of_ones(int32_t* out) { ones<true, true, true, true>(out); }
__global__ void product_not_shown(int32_t* out) { ones<false, true, true, true>(out); }
__global__ void product_unfenced(int32_t* out) { ones<true, false, true, true>(out); }
__global__ void product_not_awaited(int32_t* out) { ones<true, true, false, true>(out); }
__global__ void product_of_some_warps(int32_t* out) { ones<true, true, true, false>(out); }
}
"""
FAULTS = {
    "returns_early": "returned without wait_for_previous",
    "barrier_of_some": "nobody can go on: 40 threads wait at __syncthreads, 24 have returned",
    "shuffle_of_some": "returned while|after lanes of the warp have returned|nobody can go on",
    "lanes_part": "other lanes of the warp are at|returned while",
    "load_past_end": "ld.shared of 16 bytes at 1024 of 1024 bytes of dynamic shared memory",
    "store_past_end": "byte 8 behind 1024 bytes of dynamic shared memory was written",
    "load_crooked": "not on their boundary",
    "store_at_null": "touched 0x[0-9a-f]+, where nothing is",
    "copy_from_nowhere": "in no buffer",
    "copy_too_early": "before wait_for_previous",
    "copy_not_awaited": "before its asynchronous copies were waited for",
    "stores_before_start": "in a block that has not started",
    "leaves_while_read": "in a block that has returned",
    "few_threads": "64 threads, compiled for 32",
    "product_not_shown": "before it was shown to products",
    "product_unfenced": "without wgmma.fence",
    "product_not_awaited": "before its warpgroup products were waited for",
    "product_of_some_warps": "warps of one warpgroup ran 1 and 0 products",
}


@pytest.fixture(scope="module")
def module() -> EmulatedModule:
    return EmulatedModule(SOURCE)


@pytest.fixture
def kernels(module: EmulatedModule) -> EmulatedHarness:
    return EmulatedHarness(module, "bf16", num_multiprocessors=1, seed=1)


def run(
    kernels: EmulatedHarness, name: str, *tensors: torch.Tensor, grid: int = 1, block: int = 64,
    shared_bytes: int = 1024,
) -> None:  # fmt: skip
    args = tuple(c_uint64(t.data_ptr()) for t in tensors)
    kernels.run(
        [Launch(EmulatedFunction(name), (grid, 1, 1), block, shared_bytes, args)]  # type: ignore[arg-type]
    )


def words(kernels: EmulatedHarness, count: int = 1024) -> torch.Tensor:
    return kernels.place(torch.zeros(count, dtype=torch.int32))


def test_conversions_round_as_torch(kernels: EmulatedHarness) -> None:
    """Every half, and floats of every exponent and sign with odd fractions."""
    bits = torch.arange(-(2**31), 2**31, 65521, dtype=torch.int64)[:65536].to(torch.int32)
    ties = torch.arange(65536, dtype=torch.int64) * 65536 + 32768
    ties = torch.where(ties >= 2**31, ties - 2**32, ties).to(torch.int32)
    x = kernels.place(torch.cat([bits, ties]).view(torch.float32))
    real = ~torch.isnan(x)
    halves, bf16s = (kernels.place(torch.zeros(131072, dtype=torch.int16)) for _ in range(2))
    run(kernels, "convert", x, bf16s, halves, grid=512, block=256)
    assert torch.equal(bf16s[real], x.to(torch.bfloat16).view(torch.int16)[real])
    assert torch.equal(halves[real], x.to(torch.float16).view(torch.int16)[real])
    assert torch.isnan(bf16s.view(torch.bfloat16)[~real]).all()
    assert torch.isnan(halves.view(torch.float16)[~real]).all()
    every = kernels.place(torch.arange(65536).to(torch.int16))
    wide = kernels.place(torch.zeros(65536))
    run(kernels, "widen", every, wide, grid=256, block=256)
    assert torch.equal(wide.nan_to_num(7.0), every.view(torch.float16).float().nan_to_num(7.0))


def test_lanes_exchange(kernels: EmulatedHarness) -> None:
    out = words(kernels)
    run(kernels, "exchanges", out, block=32)
    for lane, row in enumerate(out[:256].view(32, 8).tolist()):
        g, t = divmod(lane, 4)
        assert row == [
            lane ^ 5, lane - 4 if lane >= 4 else lane, 7, 31, 1, 0x77663322,
            128 + 2 * t * 8 + g, 128 + (2 * t + 1) * 8 + g,
        ]  # fmt: skip


def test_clusters_exchange(kernels: EmulatedHarness) -> None:
    out = words(kernels)
    run(kernels, "reads_of_cluster", out, grid=4)
    once = [*range(127, 63, -1), *range(63, -1, -1)]
    assert out[:128].tolist() == once
    assert out[128:256].tolist() == [x + 128 for x in once]


def test_products(kernels: EmulatedHarness) -> None:
    out = words(kernels)
    out[512:] = 0x3F803F80  # two ones of bf16
    run(kernels, "product_of_ones", out, block=128, shared_bytes=64 * 128 + 1024)
    assert out[:256].tolist() == [16] * 256


@pytest.mark.parametrize("name", FAULTS)
def test_faults(kernels: EmulatedHarness, name: str) -> None:
    out = words(kernels)
    if name == "copy_too_early":
        kernels.of_previous(out)
    is_product = name.startswith("product")
    with pytest.raises(KernelFault, match=rf"^{name}: .*({FAULTS[name]})"):
        run(
            kernels, name, out, grid=2, block=128 if is_product else 64,
            shared_bytes=64 * 128 + 1024 if is_product else 1024,
        )  # fmt: skip
    run(kernels, "reads_of_cluster", out, grid=2)  # the next launch is as good as ever


def test_missing_barriers_show(kernels: EmulatedHarness) -> None:
    """Over a few seeds each: another order of warps, of lanes, and of asynchronous work."""

    def wrong(name: str, first: int, want: list[int], at: slice) -> int:
        count = 0
        for _ in range(8):
            out = words(kernels)
            out[:256] = torch.arange(256) * first
            out[0] = first
            run(kernels, name, out)
            count += out[at].tolist() != want
        return count

    mirrored = list(range(63, -1, -1))
    assert wrong("neighbours", 1, mirrored, slice(1, 65)) == 0
    assert wrong("neighbours", 0, mirrored, slice(1, 65)) == 8
    assert wrong("lanes_without_syncwarp", 0, [i ^ 1 for i in range(64)], slice(1, 65)) == 8
    assert wrong("copy_read_at_once", 1, [1, *range(4, 256, 4)], slice(1, 257, 4)) == 8


def test_writes_beside_a_buffer_show(kernels: EmulatedHarness) -> None:
    out = words(kernels, 256)
    with pytest.raises(AssertionError, match="wrote beside a buffer of 1024 bytes"):
        run(kernels, "writes_beside", out)
