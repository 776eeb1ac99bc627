// ptx.cuh and ptx_warpgroup.cuh on the emulated device.
#ifndef EMULATION_PTX_H
#define EMULATION_PTX_H

#include <type_traits>

#include "emulation/cuda.h"

namespace blink::kernels {

inline float float_of_half(fp16 x) { return emulation::float_of_half(x.bits); }
inline bf16 bf16_of_float(float x) { return {emulation::bf16_of_float(x)}; }
inline fp16 fp16_of_float(float x) { return {emulation::half_of_float(x)}; }

inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;  // subnormal results are zero; NaN stays
}

struct MmaArguments {
  float* c;
  uint32_t a[4], b[2];
};
template <typename T, int kRows>
void run_mma(void* const* lanes) {
  float* c[32];
  uint32_t a[32][4], b[32][2];
  for (int i = 0; i < 32; ++i) {
    const MmaArguments& one = *static_cast<const MmaArguments*>(lanes[i]);
    c[i] = one.c;
    memcpy(a[i], one.a, sizeof one.a);
    memcpy(b[i], one.b, sizeof one.b);
  }
  emulation::multiply(c, a, b, kRows, std::is_same_v<T, bf16>);
}
template <typename T>
void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
         uint32_t b1) {
  MmaArguments mine{c, {a0, a1, a2, a3}, {b0, b1}};
  emulation::warp_operation("mma", run_mma<T, 16>, &mine);
}
template <typename T>
void mma_half(float (&c)[2], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  MmaArguments mine{c, {a0, 0, a2, 0}, {b0, b1}};
  emulation::warp_operation("mma", run_mma<T, 8>, &mine);
}

inline uint32_t shared_address(const void* p) { return emulation::shared_address(p); }

struct MatrixArguments {
  uint32_t* r;
  uint32_t address;
};
template <bool kTransposed>
void run_load_matrix(void* const* lanes) {
  uint16_t values[4][8][8];
  for (int i = 0; i < 32; ++i) {
    const uint32_t address = static_cast<const MatrixArguments*>(lanes[i])->address;
    memcpy(values[i / 8][i % 8], emulation::shared_memory(address, 16, "ldmatrix"), 16);
  }
  for (int i = 0; i < 32; ++i) {
    const MatrixArguments& one = *static_cast<const MatrixArguments*>(lanes[i]);
    const int g = i / 4, t = i % 4;
    for (int m = 0; m < 4; ++m) {
      const uint16_t low = kTransposed ? values[m][2 * t][g] : values[m][g][2 * t];
      const uint16_t high = kTransposed ? values[m][2 * t + 1][g] : values[m][g][2 * t + 1];
      one.r[m] = static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
    }
  }
}
inline void load_matrix(uint32_t (&r)[4], uint32_t address) {
  MatrixArguments mine{r, address};
  emulation::warp_operation("ldmatrix", run_load_matrix<false>, &mine);
}
inline void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
  MatrixArguments mine{r, address};
  emulation::warp_operation("ldmatrix.trans", run_load_matrix<true>, &mine);
}

inline void copy_async(uint32_t shared, const void* global, bool keep = true) {
  emulation::copy_async(shared, global, 16, keep);
}
template <int kBytes>
void copy_piece(uint32_t shared, const void* global, bool keep) {
  emulation::copy_async(shared, global, kBytes, keep);
}
inline void copy_async_commit() { emulation::copy_async_commit(); }
template <int kPending>
void copy_async_wait() {
  emulation::copy_async_wait(kPending);
}

inline uint4 load_shared16(uint32_t address) {
  uint4 x;
  memcpy(&x, emulation::shared_memory(address, sizeof x, "ld.shared"), sizeof x);
  return x;
}
template <typename Words>
Words load_global(const void* p) {
  emulation::check_global(p, sizeof(Words), "ld.global");
  Words x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline uint4 load_global16(const void* p) { return load_global<uint4>(p); }
inline uint2 load_global8(const void* p) { return load_global<uint2>(p); }
inline uint32_t load_of_ring(const uint32_t* p) { return load_global<uint32_t>(p); }
inline void prefetch_to_l2(const void*) {}

inline int thread_read_anew() { return static_cast<int>(threadIdx.x); }

inline void let_next_start() {}
inline void wait_for_previous() { emulation::running->awaited_previous = true; }

inline void cluster_barrier() { emulation::cluster_barrier(); }
inline float2 load_of_cluster(uint32_t shared, int rank) {
  float2 x;
  memcpy(&x, emulation::cluster_memory(shared, sizeof x, rank, "ld.shared::cluster"), sizeof x);
  return x;
}
inline void store_in_cluster(uint32_t shared, uint32_t word, int rank) {
  memcpy(emulation::cluster_memory(shared, sizeof word, rank, "st.shared::cluster"), &word,
         sizeof word);
}

inline void products_begin() { emulation::products_begin(); }
inline void products_commit() { emulation::products_commit(); }
template <int kPending>
void products_wait() {
  emulation::products_wait(kPending);
}
inline void show_to_products() { emulation::show_to_products(); }
template <int kCount>
void hold(float (&)[kCount]) {}

template <typename T, int kColumns>
struct WarpgroupProduct {
  template <int kRowMajorB = 0>
  static void run(float (&d)[kColumns / 2], uint64_t a, uint64_t b, bool keep) {
    emulation::ProductArguments mine{
        d, nullptr, a, b, kRowMajorB != 0, keep, std::is_same_v<T, bf16>, kColumns};
    emulation::product(mine);
  }
  template <int kRowMajorB = 0>
  static void run(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b, bool keep) {
    emulation::ProductArguments mine{
        d, a, 0, b, kRowMajorB != 0, keep, std::is_same_v<T, bf16>, kColumns};
    emulation::product(mine);
  }
};

}  // namespace blink::kernels

#endif  // EMULATION_PTX_H
