/* What rendered row kernels are made of: scalar operations and reductions of a block or a warp.
 *
 * A row kernel runs one block a row (and, where no statement reads another's result, several blocks
 * a row). Sums are formed in an order that depends on the block's size alone.
 */
#ifndef BLINK_DEVICE_KERNELS_ROW_CUH
#define BLINK_DEVICE_KERNELS_ROW_CUH

#include "types.cuh"

namespace blink::kernels {

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif

/* Operations named as the expression printer names them. */
__device__ __forceinline__ int32_t index_i32(int32_t i, int32_t limit) {
  if (i < 0) i += limit;  // negative values count from the end
  return min(max(i, 0), limit - 1);
}
__device__ __forceinline__ int32_t div_i32(int32_t a, int32_t b) { return b == 0 ? 0 : a / b; }
__device__ __forceinline__ int32_t fmod_i32(int32_t a, int32_t b) { return b == 0 ? 0 : a % b; }
__device__ __forceinline__ int32_t mod_i32(int32_t a, int32_t b) {
  const int32_t r = fmod_i32(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
__device__ __forceinline__ float mod_f32(float a, float b) {
  const float r = fmodf(a, b);
  return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? r + b : r;
}
__device__ __forceinline__ int32_t pow_i32(int32_t a, int32_t b) {
  int32_t result = 1;
  for (; b > 0; b >>= 1, a *= a) {
    if (b & 1) result *= a;
  }
  return result;
}
__device__ __forceinline__ float min_f32(float a, float b) { return b < a ? b : a; }
__device__ __forceinline__ float max_f32(float a, float b) { return a < b ? b : a; }
__device__ __forceinline__ int32_t min_i32(int32_t a, int32_t b) { return b < a ? b : a; }
__device__ __forceinline__ int32_t max_i32(int32_t a, int32_t b) { return a < b ? b : a; }
__device__ __forceinline__ float rsqrt_f32(float x) { return 1.0f / sqrtf(x); }
__device__ __forceinline__ float sigmoid_f32(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float sign_f32(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
__device__ __forceinline__ int32_t sign_i32(int32_t x) { return (x > 0) - (x < 0); }
template <typename T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

/* Neighbours that lie on a boundary of their own size, at most 16 bytes a move. */
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth < 16 ? sizeof(T) * kWidth : 16) Vector {
  T v[kWidth];
};
template <int kWidth, typename T>
__device__ __forceinline__ Vector<T, kWidth> load_vector(const T* p) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(p);
}
template <typename T, int kWidth>
__device__ __forceinline__ void store_vector(T* p, const Vector<T, kWidth>& x) {
  *reinterpret_cast<Vector<T, kWidth>*>(p) = x;
}

/* Asks for a small weight before the previous kernel is awaited; the step's matrices drive it out
 * of L2. */
template <typename T>
__device__ __forceinline__ void prefetch_weight(const T* p, int count) {
  const int bytes = count * static_cast<int>(sizeof(T));
  for (int i = threadIdx.x * 128; i < bytes; i += blockDim.x * 128)
    prefetch_to_l2(reinterpret_cast<const char*>(p) + i);
}

template <typename N>
struct Bounds;
template <>
struct Bounds<float> {
  static __device__ float lowest() { return kMinusInf; }
  static __device__ float highest() { return -kMinusInf; }
};
template <>
struct Bounds<int32_t> {
  static __device__ int32_t lowest() { return -2147483647 - 1; }
  static __device__ int32_t highest() { return 2147483647; }
};

/* Reductions. A NaN survives max and min, as in ONNX. */
template <typename N>
struct Sum {
  static __device__ N identity() { return N(0); }
  static __device__ N apply(N a, N b) { return a + b; }
};
template <typename N>
struct Product {
  static __device__ N identity() { return N(1); }
  static __device__ N apply(N a, N b) { return a * b; }
};
template <typename N>
struct Largest {
  static __device__ N identity() { return Bounds<N>::lowest(); }
  static __device__ N apply(N a, N b) { return a != a || a > b ? a : b; }
};
template <typename N>
struct Smallest {
  static __device__ N identity() { return Bounds<N>::highest(); }
  static __device__ N apply(N a, N b) { return a != a || a < b ? a : b; }
};

template <typename Op, typename N>
__device__ __forceinline__ N reduce_warp(N x) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) x = Op::apply(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

/* The block's result in every thread. blockDim.x is a multiple of 32. */
template <typename Op, typename N>
__device__ __forceinline__ N reduce_block(N x, void* scratch) {
  N* partial = static_cast<N*>(scratch);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, num_warps = blockDim.x / 32;
  x = reduce_warp<Op>(x);
  __syncthreads();
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  return reduce_warp<Op>(lane < num_warps ? partial[lane] : Op::identity());
}

/* Ranks candidates: larger value first (a NaN largest), then the lower index. Packed so that an
 * unsigned maximum picks the first. */
__device__ __forceinline__ unsigned long long rank_key(float value, int index) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  const uint32_t key =
      value != value ? 0xffffffffu : (bits & 0x80000000u ? ~bits : bits | 0x80000000u);
  return static_cast<unsigned long long>(key) << 32 | static_cast<uint32_t>(~index);
}
__device__ __forceinline__ float ranked_value(unsigned long long rank) {
  const uint32_t key = static_cast<uint32_t>(rank >> 32);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ int32_t ranked_index(unsigned long long rank) {
  return static_cast<int32_t>(~static_cast<uint32_t>(rank));
}
}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_ROW_CUH
