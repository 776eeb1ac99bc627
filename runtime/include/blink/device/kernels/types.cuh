/* Conversions and reductions of a warp that the kernels share. */
#ifndef BLINK_DEVICE_KERNELS_TYPES_CUH
#define BLINK_DEVICE_KERNELS_TYPES_CUH

#include "ptx.cuh"

namespace blink::kernels {

constexpr float kMinusInf = __builtin_bit_cast(float, 0xff800000u);
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(fp16 x) { return float_of_half(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return bf16_of_float(x);
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
  return fp16_of_float(x);
}

/* Two values in one register, the first in the low half. */
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  return static_cast<uint32_t>(from_float<T>(low).bits) |
         static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template <typename T>
__device__ __forceinline__ float low_float(uint32_t pair) {
  return to_float(T{static_cast<uint16_t>(pair)});
}
template <typename T>
__device__ __forceinline__ float high_float(uint32_t pair) {
  return to_float(T{static_cast<uint16_t>(pair >> 16)});
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

/* Halves by the hardware's reduction: two instructions where shuffles took ten. */
__device__ __forceinline__ unsigned long long warp_max(unsigned long long x) {
  const uint32_t high = __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(x >> 32));
  const bool among = static_cast<uint32_t>(x >> 32) == high;
  const uint32_t low = __reduce_max_sync(0xffffffffu, among ? static_cast<uint32_t>(x) : 0u);
  return static_cast<unsigned long long>(high) << 32 | low;
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_TYPES_CUH
