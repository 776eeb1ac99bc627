/* What rendered row kernels are made of: scalar operations and reductions of a block or a warp.
 *
 * A row kernel runs one block a row (and, where no statement reads another's result, several blocks a
 * row). Sums are formed in an order that depends on the block's size alone.
 */
#ifndef BLINK_DEVICE_KERNELS_ROW_CUH
#define BLINK_DEVICE_KERNELS_ROW_CUH

#include "types.cuh"

namespace blink::kernels {

struct Sum {
  static __device__ float identity() { return 0.0f; }
  static __device__ float apply(float a, float b) { return a + b; }
};
struct Product {
  static __device__ float identity() { return 1.0f; }
  static __device__ float apply(float a, float b) { return a * b; }
};
struct Largest {  // a NaN survives, as in ONNX
  static __device__ float identity() { return kMinusInf; }
  static __device__ float apply(float a, float b) { return a != a || a > b ? a : b; }
};
struct Smallest {
  static __device__ float identity() { return -kMinusInf; }
  static __device__ float apply(float a, float b) { return a != a || a < b ? a : b; }
};

template <typename Op>
__device__ __forceinline__ float reduce_warp(float x) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) x = Op::apply(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

/* The block's result in every thread. `scratch` holds 32 floats; blockDim.x is a multiple of 32. */
template <typename Op>
__device__ __forceinline__ float reduce_block(float x, float* scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  x = reduce_warp<Op>(x);
  __syncthreads();
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return reduce_warp<Op>(lane < num_warps ? scratch[lane] : Op::identity());
}

/* Clamps an index read from data; negative values count from the end. limit 0: taken as it is. */
__device__ __forceinline__ int clamp_index(int i, int limit) {
  if (limit == 0) return i;
  if (i < 0) i += limit;
  return min(max(i, 0), limit - 1);
}

__device__ __forceinline__ int floor_mod(int a, int b) {
  const int r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
__device__ __forceinline__ float floor_mod(float a, float b) {
  const float r = fmodf(a, b);
  return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? r + b : r;
}
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
template <typename N>
__device__ __forceinline__ N sign_of(N x) {
  return x > N(0) ? N(1) : x < N(0) ? N(-1) : x;
}
template <typename N>
__device__ __forceinline__ N least(N a, N b) {
  return b < a ? b : a;
}
template <typename N>
__device__ __forceinline__ N greatest(N a, N b) {
  return a < b ? b : a;
}

/* Ranks candidates: larger value first (a NaN largest), then the lower index. Packed so that an unsigned
 * maximum picks the first. */
__device__ __forceinline__ unsigned long long rank_key(float value, int index) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  const uint32_t key =
      value != value ? 0xffffffffu : (bits & 0x80000000u ? ~bits : bits | 0x80000000u);
  return static_cast<unsigned long long>(key) << 32 | static_cast<uint32_t>(~index);
}
__device__ __forceinline__ unsigned long long largest_in_warp(unsigned long long x) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, x, i);
    x = other > x ? other : x;
  }
  return x;
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_ROW_CUH
