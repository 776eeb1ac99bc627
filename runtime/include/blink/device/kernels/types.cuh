/* Storage types, conversions, tensor-core and copy instructions that the kernels share.
 *
 * Needs no toolkit header but stdint.h, so that NVRTC compiles it anywhere in a fraction of a
 * second.
 */
#ifndef BLINK_DEVICE_KERNELS_TYPES_CUH
#define BLINK_DEVICE_KERNELS_TYPES_CUH

#include <stdint.h>

namespace blink::kernels {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

constexpr float kMinusInf = __builtin_bit_cast(float, 0xff800000u);
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
  fp16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
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

/* c[16 x 8] += a[16 x 16] b[16 x 8]; lane = 4 g + t. a0: row g, columns 2t..; a1: row g + 8; a2:
 * row g, columns 8 + 2t..; a3: row g + 8. b0: rows 2t.., column g; b1: rows 8 + 2t... c0, c1: row
 * g, columns 2t, 2t + 1; c2, c3: row g + 8. */
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                          uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<fp16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                          uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#pragma nv_diagnostic push
#pragma nv_diag_suppress 550  // the unused accumulators
/* The same with rows 8..15 of a zero: two accumulators a lane. */
template <typename T>
__device__ __forceinline__ void mma_half(float (&c)[2], uint32_t a0, uint32_t a2, uint32_t b0,
                                         uint32_t b1);
template <>
__device__ __forceinline__ void mma_half<bf16>(float (&c)[2], uint32_t a0, uint32_t a2, uint32_t b0,
                                               uint32_t b1) {
  float unused2, unused3;
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%8,%5,%8}, {%6,%7}, "
      "{%0,%1,%9,%9};"
      : "+f"(c[0]), "+f"(c[1]), "=f"(unused2), "=f"(unused3)
      : "r"(a0), "r"(a2), "r"(b0), "r"(b1), "r"(0), "f"(0.0f));
}
template <>
__device__ __forceinline__ void mma_half<fp16>(float (&c)[2], uint32_t a0, uint32_t a2, uint32_t b0,
                                               uint32_t b1) {
  float unused2, unused3;
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%8,%5,%8}, {%6,%7}, "
      "{%0,%1,%9,%9};"
      : "+f"(c[0]), "+f"(c[1]), "=f"(unused2), "=f"(unused3)
      : "r"(a0), "r"(a2), "r"(b0), "r"(b1), "r"(0), "f"(0.0f));
}

#pragma nv_diagnostic pop

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/* Asynchronous copy of 16 bytes past L1; with `keep` false nothing is read and zeros are written.
 */
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, bool keep = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(keep ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

/* Programmatic dependent launch. Every kernel of a step calls `wait_for_previous` in every thread
 * before it reads or writes anything an earlier kernel touches: then a finished predecessor implies
 * that all earlier kernels finished too, however early it let its successor start. Weights may be
 * read before. */
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900 /* before, kernels of a stream never overlap */
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* 2^x to about 2 units in the last place; small results are zero. */
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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

// Loads that stay where they are written, of 16 and 8 bytes.
__device__ __forceinline__ uint4 load_global16(const void* p) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p)
               : "memory");
  return r;
}
__device__ __forceinline__ uint2 load_global8(const void* p) {
  uint2 r;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p) : "memory");
  return r;
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_TYPES_CUH
