/* The machine's own instructions, one small function each: the kernels hold no assembly themselves.
 *
 * A build that has no GPU names a header of its own in BLINK_PTX_HEADER, which does the same in
 * plain C++ (tests/emulation). Names are those of the PTX ISA where a comment gives them. Needs no
 * toolkit header but stdint.h, so that NVRTC compiles it anywhere in a fraction of a second.
 */
#ifndef BLINK_DEVICE_KERNELS_PTX_CUH
#define BLINK_DEVICE_KERNELS_PTX_CUH

#include <stdint.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define BLINK_HAS_WARPGROUP_PRODUCTS 1
#else
#define BLINK_HAS_WARPGROUP_PRODUCTS 0
#endif
/* GPUs before compute capability 9.0 have no clusters. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define BLINK_HAS_CLUSTERS 0
#else
#define BLINK_HAS_CLUSTERS 1
#endif

namespace blink::kernels {

/* Storage of a half-precision value. */
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

}  // namespace blink::kernels

#ifdef BLINK_PTX_HEADER
#include BLINK_PTX_HEADER
#else

namespace blink::kernels {

// Conversions, rounded to the nearest (cvt.rn).
__device__ __forceinline__ float float_of_half(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ bf16 bf16_of_float(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ __forceinline__ fp16 fp16_of_float(float x) {
  fp16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

/* 2^x to about 2 units in the last place; small results are zero. */
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* c[16 x 8] += a[16 x 16] b[16 x 8] of a warp; lane = 4 g + t. a0: row g, columns 2t..; a1: row g +
 * 8; a2: row g, columns 8 + 2t..; a3: row g + 8. b0: rows 2t.., column g; b1: rows 8 + 2t... c0,
 * c1: row g, columns 2t, 2t + 1; c2, c3: row g + 8. */
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1);
/* The same with rows 8..15 of a zero: two accumulators a lane. */
template <typename T>
__device__ __forceinline__ void mma_half(float (&c)[2], uint32_t a0, uint32_t a2, uint32_t b0,
                                         uint32_t b1);
#pragma nv_diagnostic push
#pragma nv_diag_suppress 550  // the unused accumulators
#define BLINK_MMA(type, name)                                                                    \
  template <>                                                                                    \
  __device__ __forceinline__ void mma<type>(float(&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, \
                                            uint32_t a3, uint32_t b0, uint32_t b1) {             \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                          \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                    \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                        \
  }                                                                                              \
  template <>                                                                                    \
  __device__ __forceinline__ void mma_half<type>(float(&c)[2], uint32_t a0, uint32_t a2,         \
                                                 uint32_t b0, uint32_t b1) {                     \
    float unused2, unused3;                                                                      \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                          \
                 ".f32 {%0,%1,%2,%3}, {%4,%8,%5,%8}, {%6,%7}, {%0,%1,%9,%9};"                    \
                 : "+f"(c[0]), "+f"(c[1]), "=f"(unused2), "=f"(unused3)                          \
                 : "r"(a0), "r"(a2), "r"(b0), "r"(b1), "r"(0), "f"(0.0f));                       \
  }
BLINK_MMA(bf16, "bf16")
BLINK_MMA(fp16, "f16")
#undef BLINK_MMA
#pragma nv_diagnostic pop

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/* Four 8 x 8 matrices of halves (ldmatrix.x4): lane 8 i + r gives the address of row r of matrix i;
 * lane 4 g + t gets row g, columns 2t, 2t + 1 of each; transposed: column g, rows 2t, 2t + 1. */
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
/* The same of `kBytes` (4, 8 or 16), without asking L2 for the neighbours. */
template <int kBytes>
__device__ __forceinline__ void copy_piece(uint32_t shared, const void* global, bool keep) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(keep ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global),
                 "n"(kBytes), "r"(keep ? kBytes : 0)
                 : "memory");
  }
}
/* Closes the group of this thread's copies; waits until at most `kPending` groups are unfinished.
 */
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads that stay where they are written, of 16 and 8 bytes.
__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}
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
/* A word of the ring, which the host or a NIC may write (ld.relaxed.sys). */
__device__ __forceinline__ uint32_t load_of_ring(const uint32_t* p) {
  uint32_t word;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
  return word;
}
__device__ __forceinline__ void prefetch_to_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* threadIdx.x, read anew: what is reckoned from it is not kept from earlier. */
__device__ __forceinline__ int thread_read_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
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

#if BLINK_HAS_CLUSTERS

/* The cluster's barrier: what was stored anywhere in it before is seen by all behind it. */
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
/* Two floats at the place of `shared` in the cluster's block `rank`. */
__device__ __forceinline__ float2 load_of_cluster(uint32_t shared, int rank) {
  float2 x;
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %2, %3;"
      "ld.shared::cluster.v2.f32 {%0,%1}, [there];}"
      : "=f"(x.x), "=f"(x.y)
      : "r"(shared), "r"(rank)
      : "memory");
  return x;
}
/* Stores a word there. */
__device__ __forceinline__ void store_in_cluster(uint32_t shared, uint32_t word, int rank) {
  asm volatile(
      "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.u32 [there], "
      "%2;}" ::"r"(shared),
      "r"(rank), "r"(word)
      : "memory");
}

#endif  // BLINK_HAS_CLUSTERS

}  // namespace blink::kernels

#if BLINK_HAS_WARPGROUP_PRODUCTS
#include "ptx_warpgroup.cuh"
#endif

#endif  // BLINK_PTX_HEADER

#endif  // BLINK_DEVICE_KERNELS_PTX_CUH
