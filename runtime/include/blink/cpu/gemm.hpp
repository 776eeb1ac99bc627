// Matrix products with packed weights: out[rows, n] = x[rows, k] * W[n, k]^T (+ bias).
//
// A weight is packed once, at start, into strips of 8 columns, each in order of k, so that the
// product streams it in one direction. Every output element is one chain of fused multiply-adds
// over i = 0 .. k-1, whatever the number of rows and however the work is cut: results are bitwise
// the same alone and in a batch. A weight whose numbers are all exact in bfloat16 (checkpoints
// often are) is packed in 16 bits, which halves the memory traffic and changes no result. DESIGN.md
// beside this file says why tiles have the shapes they have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "blink/cpu/packed_weight.hpp"
#include "blink/cpu/parallel.hpp"

namespace blink::cpu {

constexpr uint32_t kStreamStrips = 8;  // side by side for one row: hides the latency of the chains
constexpr uint32_t kMaxTileRows = 6;   // times 2 strips: 12 accumulators of 16 vector registers
constexpr uint32_t kMaxHalfTileRows = 4;  // straight from 16 bits, which takes two registers more
constexpr uint32_t kGroupStrips = 6;      // whole tiles of 2 or 3
constexpr uint32_t kManyRows = 96;     // from here on, 16-bit strips are widened once for all tiles
constexpr uint32_t kBlockK = 1024;     // even; of a few rows: strips stay in the second-level cache
constexpr uint32_t kManyBlockK = 256;  // even; of many rows: two widened strips, 16 KiB

// What a tile works on: some rows times some strips, over i in [0, count) of a block.
struct TileArgs {
  const float* x;       // first row, first i of the block
  size_t x_stride;      // floats from row to row
  const void* strips;   // first strip, first i of the block (even)
  size_t strip_stride;  // words from strip to strip
  uint32_t count;
  const std::byte* ahead;  // strips to fetch meanwhile, as far apart
  size_t ahead_step;       // bytes of them for each i
};

template <uint32_t kRows, uint32_t kStrips>
using Accumulators = Vector8[kRows][kStrips];

template <uint32_t kRows, uint32_t kStrips>
inline void add_products(const float* x, size_t x_stride, const Vector8 (&b)[kStrips],
                         Accumulators<kRows, kStrips>& acc) {
#pragma GCC unroll 8
  for (uint32_t m = 0; m < kRows; ++m) {
    const Vector8 a = splat(x[m * x_stride]);
#pragma GCC unroll 8
    for (uint32_t c = 0; c < kStrips; ++c) acc[m][c] = fma8(a, b[c], acc[m][c]);
  }
}

template <uint32_t kRows, uint32_t kStrips>
inline void wide_tile(const TileArgs& t, Accumulators<kRows, kStrips>& acc) {
  const float* strips = static_cast<const float*>(t.strips);
  for (uint32_t i = 0; i < t.count; ++i) {
    Vector8 b[kStrips];
#pragma GCC unroll 8
    for (uint32_t c = 0; c < kStrips; ++c) {
      __builtin_prefetch(t.ahead + c * t.strip_stride * 4 + i * t.ahead_step, 0, 2);
      b[c] = load8(strips + c * t.strip_stride + size_t{i} * kStripColumns);
    }
    add_products<kRows, kStrips>(t.x + i, t.x_stride, b, acc);
  }
}

template <uint32_t kRows, uint32_t kStrips>
inline void half_tile(const TileArgs& t, Accumulators<kRows, kStrips>& acc) {
  const uint32_t* strips = static_cast<const uint32_t*>(t.strips);
  auto step = [&](uint32_t i, bool odd) {
    Vector8 b[kStrips];
#pragma GCC unroll 8
    for (uint32_t c = 0; c < kStrips; ++c) {
      if (!odd) __builtin_prefetch(t.ahead + c * t.strip_stride * 4 + i * t.ahead_step, 0, 2);
      const VectorU8 w = load_words(strips + c * t.strip_stride + size_t{i / 2} * kStripColumns);
      b[c] = std::bit_cast<Vector8>(odd ? w << 16 : w & 0xFFFF0000u);
    }
    add_products<kRows, kStrips>(t.x + i, t.x_stride, b, acc);
  };
  uint32_t i = 0;
  for (; i + 2 <= t.count; i += 2) {
    step(i, false);
    step(i + 1, true);
  }
  if (i < t.count) step(i, false);
}

struct GemmArgs {
  const PackedWeight& weight;
  const float* x;     // [rows, k]
  float* out;         // [rows, n]
  const float* bias;  // [n] or null
};

// One tile of the output over one block of k. `out` holds the sums of the blocks before; fp32
// survives the round trip, so blocks do not change results.
template <bool kHalf, uint32_t kRows, uint32_t kStrips>
void run_tile(const GemmArgs& g, uint32_t row, uint32_t strip, uint32_t begin, const TileArgs& t) {
  const uint32_t first = strip * kStripColumns;
  const uint32_t columns = std::min(kStrips * kStripColumns, g.weight.n - first);
  float* out = g.out + size_t{row} * g.weight.n + first;
  Accumulators<kRows, kStrips> acc;
  float line[kStrips * kStripColumns];
  for (uint32_t m = 0; m < kRows; ++m) {
    if (begin > 0) std::memcpy(line, out + size_t{m} * g.weight.n, columns * sizeof(float));
    for (uint32_t c = 0; c < kStrips; ++c) {
      acc[m][c] = begin > 0 ? load8(line + c * kStripColumns) : splat(0.0f);
    }
  }
  if constexpr (kHalf) {
    half_tile<kRows, kStrips>(t, acc);
  } else {
    wide_tile<kRows, kStrips>(t, acc);
  }
  const bool last = begin + t.count == g.weight.k;
  for (uint32_t m = 0; m < kRows; ++m) {
    for (uint32_t c = 0; c < kStrips; ++c) store8(line + c * kStripColumns, acc[m][c]);
    if (last && g.bias) {
      for (uint32_t c = 0; c < columns; ++c) line[c] += g.bias[first + c];
    }
    std::memcpy(out + size_t{m} * g.weight.n, line, columns * sizeof(float));
  }
}

template <bool kHalf, uint32_t kRows>
void run_strips(const GemmArgs& g, uint32_t strips, uint32_t row, uint32_t strip, uint32_t begin,
                const TileArgs& t) {
  switch (strips) {
    case 1:
      return run_tile<kHalf, kRows, 1>(g, row, strip, begin, t);
    case 2:
      return run_tile<kHalf, kRows, 2>(g, row, strip, begin, t);
    case 3:
      if constexpr (kRows <= 4) return run_tile<kHalf, kRows, 3>(g, row, strip, begin, t);
      break;
    case 4:
      if constexpr (kRows <= 2) return run_tile<kHalf, kRows, 4>(g, row, strip, begin, t);
      break;
    case 8:
      if constexpr (kRows <= 1) return run_tile<kHalf, kRows, 8>(g, row, strip, begin, t);
      break;
  }
}

template <bool kHalf>
void run_rows_of_tile(const GemmArgs& g, uint32_t rows, uint32_t strips, uint32_t row,
                      uint32_t strip, uint32_t begin, const TileArgs& t) {
  switch (rows) {
    case 1:
      return run_strips<kHalf, 1>(g, strips, row, strip, begin, t);
    case 2:
      return run_strips<kHalf, 2>(g, strips, row, strip, begin, t);
    case 3:
      return run_strips<kHalf, 3>(g, strips, row, strip, begin, t);
    case 4:
      return run_strips<kHalf, 4>(g, strips, row, strip, begin, t);
    case 5:
      return run_strips<kHalf, 5>(g, strips, row, strip, begin, t);
    case 6:
      return run_strips<kHalf, 6>(g, strips, row, strip, begin, t);
  }
}

// Strips of a tile with so many rows: 8 to 12 chains, enough to keep two multiply-add units busy.
// 16-bit strips need two registers more, so that 4 rows times 3 would spill.
inline uint32_t tile_strips(uint32_t rows, uint32_t left, bool half) {
  static constexpr uint32_t kWide[] = {0, 8, 4, 3, 3, 2, 2};
  static constexpr uint32_t kHalf[] = {0, 8, 4, 3, 2, 2, 2};
  uint32_t wanted = half ? kHalf[rows] : kWide[rows];
  while (wanted > left) wanted = wanted == 8 ? 4 : wanted - 1;
  return wanted;
}

// Strips [begin, end) for a few rows, straight from the packed weight. A group of strips serves all
// tiles before the next comes from memory.
inline void gemm_few(const GemmArgs& g, uint32_t row_begin, uint32_t row_end, uint32_t begin,
                     uint32_t end) {
  const PackedWeight& w = g.weight;
  const uint32_t rows = row_end - row_begin;
  const uint32_t most = w.half ? kMaxHalfTileRows : kMaxTileRows;
  const uint32_t tiles = (rows + most - 1) / most;
  const uint32_t block = rows == 1 ? w.k : kBlockK;
  const uint32_t group = rows == 1 ? kStreamStrips : kGroupStrips;
  for (uint32_t i = 0; i < w.k; i += block) {
    const uint32_t count = std::min(block, w.k - i);
    for (uint32_t first = begin; first < end; first += group) {
      const uint32_t last = std::min(end, first + group);
      for (uint32_t tile = 0; tile < tiles; ++tile) {  // of equal height: 6 rows are 3 + 3
        const uint32_t row = row_begin + rows * tile / tiles;
        const uint32_t height = row_begin + rows * (tile + 1) / tiles - row;
        const float* x = g.x + size_t{row} * w.k + i;
        // The tiles of a group share the fetching of the next group, in equal parts.
        const size_t step = last < end ? (w.half ? 16 : 32) / tiles : 0;
        const size_t ahead = last < end ? group * w.strip_words() : 0;
        for (uint32_t strip = first; strip < last;) {
          const uint32_t strips = tile_strips(height, last - strip, w.half);
          const size_t at = strip * w.strip_words() + size_t{w.half ? i / 2 : i} * kStripColumns;
          const uint32_t* strips_at = w.words() + at;
          const auto* fetch = reinterpret_cast<const std::byte*>(strips_at + ahead);
          const TileArgs t{x,   w.k, strips_at, w.strip_words(), count, fetch + tile * step * count,
                           step};
          if (w.half) {
            run_rows_of_tile<true>(g, height, strips, row, strip, i, t);
          } else {
            run_rows_of_tile<false>(g, height, strips, row, strip, i, t);
          }
          strip += strips;
        }
      }
    }
  }
}

// Widens i in [begin, begin + count) of one strip.
inline void widen_strip(const PackedWeight& w, uint32_t strip, uint32_t begin, uint32_t count,
                        float* out) {
  const uint32_t* words = w.words() + strip * w.strip_words() + size_t{begin / 2} * kStripColumns;
  for (uint32_t i = 0; i < count; i += 2) {
    const VectorU8 pair = load_words(words + size_t{i / 2} * kStripColumns);
    store8(out + size_t{i} * kStripColumns, std::bit_cast<Vector8>(pair & 0xFFFF0000u));
    store8(out + size_t{i + 1} * kStripColumns, std::bit_cast<Vector8>(pair << 16));
  }
}

// Strips [begin, end) for many rows: two strips of a block stay in the first-level cache for all
// tiles.
inline void gemm_many(const GemmArgs& g, uint32_t row_begin, uint32_t row_end, uint32_t begin,
                      uint32_t end) {
  const PackedWeight& w = g.weight;
  alignas(kAlignment) float widened[2 * kManyBlockK * kStripColumns];
  const uint32_t rows = row_end - row_begin;
  const uint32_t tiles = (rows + kMaxTileRows - 1) / kMaxTileRows;
  for (uint32_t i = 0; i < w.k; i += kManyBlockK) {
    const uint32_t count = std::min(kManyBlockK, w.k - i);
    for (uint32_t strip = begin; strip < end; strip += 2) {
      const uint32_t strips = std::min(2u, end - strip);
      const float* from = w.wide() + strip * w.strip_words() + size_t{i} * kStripColumns;
      size_t stride = w.strip_words();
      if (w.half) {
        from = widened;
        stride = size_t{kManyBlockK} * kStripColumns;
        for (uint32_t c = 0; c < strips; ++c) {
          widen_strip(w, strip + c, i, count, widened + c * stride);
        }
      }
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        const uint32_t row = row_begin + rows * tile / tiles;
        const uint32_t height = row_begin + rows * (tile + 1) / tiles - row;
        const TileArgs t{g.x + size_t{row} * w.k + i,
                         w.k,
                         from,
                         stride,
                         count,
                         reinterpret_cast<const std::byte*>(from),
                         0};
        run_rows_of_tile<false>(g, height, strips, row, strip, i, t);
      }
    }
  }
}

inline void gemm_strips(const GemmArgs& g, uint32_t row_begin, uint32_t row_end, uint32_t begin,
                        uint32_t end) {
  if (row_end - row_begin < kManyRows) {
    gemm_few(g, row_begin, row_end, begin, end);
  } else {
    gemm_many(g, row_begin, row_end, begin, end);
  }
}

// How the output is cut for the threads.
struct GemmChunks {
  uint32_t strips;  // of a chunk
  uint32_t rows;    // of a chunk
  uint32_t across;  // chunks of strips
  uint32_t down;    // chunks of rows

  GemmChunks(uint32_t num_rows, uint32_t num_strips, uint32_t num_threads) {
    rows = std::min(num_rows, 32 * kMaxTileRows);  // their x block stays in the second-level cache
    down = (num_rows + rows - 1) / rows;
    const uint32_t unit = num_rows == 1 ? kStreamStrips : kGroupStrips;
    strips = unit * std::max(1u, num_strips / (8 * num_threads * unit));
    across = (num_strips + strips - 1) / strips;
  }
};

// The product, by all threads of the team; a phase.
inline void gemm(Worker& worker, uint32_t rows, const float* x, const PackedWeight& weight,
                 const float* bias, float* out) {
  if (rows == 0) return;  // on every thread alike
  const GemmArgs g{weight, x, out, bias};
  const uint32_t strips = weight.num_strips();
  const GemmChunks c(rows, strips, worker.num_threads());
  worker.phase(c.across * c.down, [&](uint32_t chunk) {
    const uint32_t strip = chunk / c.down * c.strips;
    const uint32_t row = chunk % c.down * c.rows;
    gemm_strips(g, row, std::min(rows, row + c.rows), strip, std::min(strips, strip + c.strips));
  });
}

}  // namespace blink::cpu
