// Matrix products with packed weights: out[rows, n] = x[rows, k] * W[n, k]^T (+ bias).
//
// A weight is packed once, at start, into panels of 16 columns: panel p holds W[16 p + j][i] at [i][j], so the
// product streams it in one direction. Every output element is one chain of fused multiply-adds over
// i = 0 .. k-1, whatever the number of rows and however the work is cut: results are bitwise the same alone and
// in a batch. A weight whose numbers are all exact in bfloat16 (checkpoints often are) is packed in 16 bits,
// which halves the memory traffic and changes no result.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "blink/cpu/parallel.hpp"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace blink::cpu {

using Vector8 = float __attribute__((vector_size(32)));
using VectorU8 = uint32_t __attribute__((vector_size(32)));
using VectorH8 = uint16_t __attribute__((vector_size(16)));

inline Vector8 splat(float x) { return Vector8{x, x, x, x, x, x, x, x}; }

inline Vector8 load8(const float* p) {
  Vector8 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store8(float* p, Vector8 v) { std::memcpy(p, &v, sizeof(v)); }

inline Vector8 load8(const uint16_t* p) {
  VectorH8 h;
  std::memcpy(&h, p, sizeof(h));
  const VectorU8 wide = __builtin_convertvector(h, VectorU8) << 16;
  return std::bit_cast<Vector8>(wide);
}

// One rounding everywhere: a separate multiply and add would make results depend on the compiler's mood.
inline Vector8 fma8(Vector8 a, Vector8 b, Vector8 c) {
#if defined(__AVX2__) && defined(__FMA__)
  return std::bit_cast<Vector8>(_mm256_fmadd_ps(std::bit_cast<__m256>(a), std::bit_cast<__m256>(b),
                                                std::bit_cast<__m256>(c)));
#else
  Vector8 r;
  for (int i = 0; i < 8; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

constexpr uint32_t kPanelColumns = 16;
constexpr uint32_t kBlockK = 1024;       // k of a block: a panel's block stays in the second-level cache
constexpr uint32_t kMaxTileRows = 6;     // 12 accumulators of the 16 vector registers
constexpr size_t kAlignment = 64;        // bytes

struct AlignedDelete {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{kAlignment}); }
};

using AlignedBytes = std::unique_ptr<std::byte[], AlignedDelete>;

inline AlignedBytes allocate_bytes(size_t bytes) {
  return AlignedBytes(static_cast<std::byte*>(
      ::operator new(std::max(bytes, kAlignment), std::align_val_t{kAlignment})));
}

struct PackedWeight {
  AlignedBytes storage;
  uint32_t n = 0;
  uint32_t k = 0;
  bool half = false;  // bfloat16 panels, exact

  uint32_t num_panels() const { return (n + kPanelColumns - 1) / kPanelColumns; }
  template <typename T>
  const T* panel(uint32_t index) const {
    return reinterpret_cast<const T*>(storage.get()) + size_t{index} * k * kPanelColumns;
  }
};

// Says whether every number of w[begin, end) is exact in bfloat16.
inline bool exact_in_bf16(const float* w, size_t begin, size_t end) {
  uint32_t low_bits = 0;
  for (size_t i = begin; i < end; ++i) low_bits |= std::bit_cast<uint32_t>(w[i]);
  return (low_bits & 0xFFFFu) == 0;
}

template <typename T>
inline T narrow(float x) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
  } else {
    return x;
  }
}

template <typename T>
void pack_panel(const float* w, bool transposed, uint32_t n, uint32_t k, uint32_t panel, T* out) {
  const uint32_t first = panel * kPanelColumns;
  const uint32_t columns = std::min(kPanelColumns, n - first);
  constexpr uint32_t kTile = 64;  // of k: reads of 16 rows and writes both stay in the first-level cache
  for (uint32_t begin = 0; begin < k; begin += kTile) {
    const uint32_t end = std::min(k, begin + kTile);
    for (uint32_t j = 0; j < columns; ++j) {
      for (uint32_t i = begin; i < end; ++i) {
        const size_t at = transposed ? size_t{i} * n + first + j : size_t{first + j} * k + i;
        out[size_t{i} * kPanelColumns + j] = narrow<T>(w[at]);
      }
    }
    for (uint32_t i = begin; i < end; ++i) {
      for (uint32_t j = columns; j < kPanelColumns; ++j) out[size_t{i} * kPanelColumns + j] = T{};
    }
  }
}

// Packs one weight with all threads of a team. transposed: w is [k, n] instead of [n, k].
inline PackedWeight pack_weight(Team& team, const float* w, uint32_t n, uint32_t k, bool transposed) {
  PackedWeight packed;
  packed.n = n;
  packed.k = k;
  const uint32_t panels = packed.num_panels();
  const size_t count = size_t{n} * k;
  std::atomic<bool> exact{true};
  auto check = [&](Worker& worker) {
    worker.phase(panels, [&](uint32_t chunk) {
      if (!exact.load(std::memory_order_relaxed)) return;
      const size_t begin = count * chunk / panels;
      const size_t end = count * (chunk + 1) / panels;
      if (!exact_in_bf16(w, begin, end)) exact.store(false, std::memory_order_relaxed);
    });
  };
  team.run(check);
  packed.half = exact.load(std::memory_order_relaxed);
  const size_t elements = size_t{panels} * kPanelColumns * k;
  packed.storage = allocate_bytes(elements * (packed.half ? 2 : 4));
  auto pack = [&](Worker& worker) {
    worker.phase(panels, [&](uint32_t panel) {
      const size_t at = size_t{panel} * k * kPanelColumns;
      if (packed.half) {
        pack_panel(w, transposed, n, k, panel, reinterpret_cast<uint16_t*>(packed.storage.get()) + at);
      } else {
        pack_panel(w, transposed, n, k, panel, reinterpret_cast<float*>(packed.storage.get()) + at);
      }
    });
  };
  team.run(pack);
  return packed;
}

// One tile: kRows rows times kPanels panels over i in [k_begin, k_end). `out` holds the partial sums of the
// blocks before when k_begin > 0; fp32 survives the round trip, so blocks do not change results.
template <typename T, uint32_t kRows, uint32_t kPanels>
inline void gemm_tile(const float* x, size_t x_stride, const T* panels, size_t panel_stride,
                      uint32_t k_begin, uint32_t k_end, Vector8 (&acc)[kRows][2 * kPanels]) {
  for (uint32_t i = k_begin; i < k_end; ++i) {
    Vector8 b[2 * kPanels];
#pragma GCC unroll 8
    for (uint32_t p = 0; p < kPanels; ++p) {
      const T* row = panels + p * panel_stride + size_t{i} * kPanelColumns;
      b[2 * p] = load8(row);
      b[2 * p + 1] = load8(row + 8);
    }
#pragma GCC unroll 8
    for (uint32_t m = 0; m < kRows; ++m) {
      const Vector8 a = splat(x[m * x_stride + i]);
#pragma GCC unroll 8
      for (uint32_t c = 0; c < 2 * kPanels; ++c) acc[m][c] = fma8(a, b[c], acc[m][c]);
    }
  }
}

// Columns of the output this tile owns, the last panel's padding left out.
template <uint32_t kRows, uint32_t kColumns8>
inline void load_tile(const float* out, size_t stride, uint32_t columns,
                      Vector8 (&acc)[kRows][kColumns8]) {
  for (uint32_t m = 0; m < kRows; ++m) {
    float line[8 * kColumns8] = {};
    std::memcpy(line, out + m * stride, columns * sizeof(float));
    for (uint32_t c = 0; c < kColumns8; ++c) acc[m][c] = load8(line + 8 * c);
  }
}

template <uint32_t kRows, uint32_t kColumns8>
inline void store_tile(float* out, size_t stride, uint32_t columns, const float* bias,
                       const Vector8 (&acc)[kRows][kColumns8]) {
  for (uint32_t m = 0; m < kRows; ++m) {
    float line[8 * kColumns8];
    for (uint32_t c = 0; c < kColumns8; ++c) store8(line + 8 * c, acc[m][c]);
    if (bias) {
      for (uint32_t c = 0; c < columns; ++c) line[c] += bias[c];
    }
    std::memcpy(out + m * stride, line, columns * sizeof(float));
  }
}

template <typename T>
struct GemmArgs {
  const PackedWeight* weight;
  const float* x;     // [rows, k]
  size_t x_stride;    // elements from row to row
  float* out;         // [rows, n]
  size_t out_stride;
  const float* bias;  // [n] or null
};

template <typename T, uint32_t kRows, uint32_t kPanels>
void gemm_block(const GemmArgs<T>& a, uint32_t row, uint32_t panel, uint32_t k_begin, uint32_t k_end) {
  const uint32_t k = a.weight->k;
  const uint32_t first = panel * kPanelColumns;
  const uint32_t columns = std::min(kPanels * kPanelColumns, a.weight->n - first);
  const float* x = a.x + row * a.x_stride;
  float* out = a.out + row * a.out_stride + first;
  Vector8 acc[kRows][2 * kPanels];
  if (k_begin == 0) {
    for (auto& line : acc) {
      for (Vector8& v : line) v = splat(0.0f);
    }
  } else {
    load_tile<kRows>(out, a.out_stride, columns, acc);
  }
  gemm_tile<T, kRows, kPanels>(x, a.x_stride, a.weight->template panel<T>(panel), size_t{k} * kPanelColumns,
                               k_begin, k_end, acc);
  const bool last = k_end == k;
  store_tile<kRows>(out, a.out_stride, columns, last && a.bias ? a.bias + first : nullptr, acc);
}

template <typename T>
void gemm_rows(const GemmArgs<T>& a, uint32_t rows, uint32_t row, uint32_t panel, uint32_t k_begin,
               uint32_t k_end) {
  switch (rows) {
    case 1: return gemm_block<T, 1, 1>(a, row, panel, k_begin, k_end);
    case 2: return gemm_block<T, 2, 1>(a, row, panel, k_begin, k_end);
    case 3: return gemm_block<T, 3, 1>(a, row, panel, k_begin, k_end);
    case 4: return gemm_block<T, 4, 1>(a, row, panel, k_begin, k_end);
    case 5: return gemm_block<T, 5, 1>(a, row, panel, k_begin, k_end);
    case 6: return gemm_block<T, 6, 1>(a, row, panel, k_begin, k_end);
  }
}

// Panels [begin, end) for rows [row_begin, row_end).
template <typename T>
void gemm_panels(const GemmArgs<T>& a, uint32_t row_begin, uint32_t row_end, uint32_t begin,
                 uint32_t end) {
  const uint32_t k = a.weight->k;
  const uint32_t rows = row_end - row_begin;
  if (rows == 1) {  // stream: four panels side by side hide the latency of the chains
    uint32_t panel = begin;
    for (; panel + 4 <= end; panel += 4) gemm_block<T, 1, 4>(a, row_begin, panel, 0, k);
    for (; panel < end; ++panel) gemm_block<T, 1, 1>(a, row_begin, panel, 0, k);
    return;
  }
  const uint32_t tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
  for (uint32_t k_begin = 0; k_begin < k; k_begin += kBlockK) {
    const uint32_t k_end = std::min(k, k_begin + kBlockK);
    for (uint32_t panel = begin; panel < end; ++panel) {
      for (uint32_t tile = 0; tile < tiles; ++tile) {  // tiles of equal height: 8 rows are 4 + 4
        const uint32_t first = row_begin + rows * tile / tiles;
        const uint32_t last = row_begin + rows * (tile + 1) / tiles;
        gemm_rows(a, last - first, first, panel, k_begin, k_end);
      }
    }
  }
}

struct GemmChunks {
  uint32_t panels;   // of a chunk
  uint32_t rows;     // of a chunk
  uint32_t across;   // chunks of panels
  uint32_t down;     // chunks of rows
};

inline GemmChunks gemm_chunks(uint32_t rows, uint32_t num_panels, uint32_t num_threads) {
  GemmChunks c{};
  c.rows = std::min(rows, 192u);  // rows whose x block stays in the second-level cache
  c.down = (rows + c.rows - 1) / c.rows;
  const uint32_t wanted = std::max(1u, num_panels / (8 * num_threads));
  c.panels = std::min(std::max(4u, wanted / 4 * 4), num_panels);
  c.across = (num_panels + c.panels - 1) / c.panels;
  return c;
}

template <typename T>
void gemm_typed(Worker& worker, uint32_t rows, const GemmArgs<T>& a) {
  const uint32_t panels = a.weight->num_panels();
  const GemmChunks c = gemm_chunks(rows, panels, worker.num_threads());
  worker.phase(c.across * c.down, [&](uint32_t chunk) {
    const uint32_t panel = chunk / c.down * c.panels;
    const uint32_t row = chunk % c.down * c.rows;
    gemm_panels(a, row, std::min(rows, row + c.rows), panel, std::min(panels, panel + c.panels));
  });
}

// The product, by all threads of the team; a phase.
inline void gemm(Worker& worker, uint32_t rows, const float* x, const PackedWeight& weight,
                 const float* bias, float* out) {
  if (weight.half) {
    gemm_typed<uint16_t>(worker, rows, {&weight, x, weight.k, out, weight.n, bias});
  } else {
    gemm_typed<float>(worker, rows, {&weight, x, weight.k, out, weight.n, bias});
  }
}

}  // namespace blink::cpu
