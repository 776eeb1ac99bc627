// Weights packed for products: strips of 8 columns in order of k, 16 bits where that loses nothing.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
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

inline Vector8 splat(float x) { return Vector8{x, x, x, x, x, x, x, x}; }

inline Vector8 load8(const float* p) {
  Vector8 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void store8(float* p, Vector8 v) { std::memcpy(p, &v, sizeof(v)); }

inline VectorU8 load_words(const uint32_t* p) {
  VectorU8 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// One rounding everywhere: a separate multiply and add would make results depend on the compiler's
// mood.
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

constexpr uint32_t kStripColumns = 8;
constexpr size_t kAlignment = 64;  // bytes

struct AlignedDelete {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{kAlignment}); }
};

using AlignedBytes = std::unique_ptr<std::byte[], AlignedDelete>;

inline AlignedBytes allocate_bytes(size_t bytes) {
  return AlignedBytes(static_cast<std::byte*>(
      ::operator new(std::max(bytes, kAlignment), std::align_val_t{kAlignment})));
}

// Strip s holds columns [8 s, 8 s + 8), zeros past the last. fp32: [k][8]. bfloat16: [ceil(k /
// 2)][8] words, the high half the even i, the low half the odd one: a mask and a shift widen them.
struct PackedWeight {
  AlignedBytes storage;
  uint32_t n = 0;
  uint32_t k = 0;
  bool half = false;  // bfloat16, exact

  uint32_t num_strips() const { return (n + kStripColumns - 1) / kStripColumns; }
  size_t strip_words() const { return size_t{half ? (k + 1) / 2 : k} * kStripColumns; }
  const float* wide() const { return reinterpret_cast<const float*>(storage.get()); }
  const uint32_t* words() const { return reinterpret_cast<const uint32_t*>(storage.get()); }
};

// Says whether every number of w[begin, end) is exact in bfloat16.
inline bool exact_in_bf16(const float* w, size_t begin, size_t end) {
  uint32_t low_bits = 0;
  for (size_t i = begin; i < end; ++i) low_bits |= std::bit_cast<uint32_t>(w[i]);
  return (low_bits & 0xFFFFu) == 0;
}

// Eight columns of w over i in [begin, end), as [i][8]; columns past the last are zero.
inline void gather_strip(const float* w, bool transposed, uint32_t n, uint32_t k, uint32_t strip,
                         uint32_t begin, uint32_t end, float* out) {
  const uint32_t first = strip * kStripColumns;
  const uint32_t columns = std::min(kStripColumns, n - first);
  if (columns < kStripColumns) std::memset(out, 0, (end - begin) * kStripColumns * sizeof(float));
  if (transposed) {
    for (uint32_t i = begin; i < end; ++i) {
      std::memcpy(out + (i - begin) * kStripColumns, w + size_t{i} * n + first,
                  columns * sizeof(float));
    }
    return;
  }
  for (uint32_t j = 0; j < columns; ++j) {
    const float* line = w + size_t{first + j} * k;
    for (uint32_t i = begin; i < end; ++i) out[(i - begin) * kStripColumns + j] = line[i];
  }
}

inline void pack_strip(const float* w, bool transposed, uint32_t strip, PackedWeight& packed) {
  constexpr uint32_t kTile = 128;  // of k, even: the tile stays in the first-level cache
  float tile[kTile * kStripColumns];
  float* wide = reinterpret_cast<float*>(packed.storage.get()) + strip * packed.strip_words();
  uint32_t* words = reinterpret_cast<uint32_t*>(wide);
  for (uint32_t begin = 0; begin < packed.k; begin += kTile) {
    const uint32_t end = std::min(packed.k, begin + kTile);
    const size_t at = size_t{packed.half ? begin / 2 : begin} * kStripColumns;
    gather_strip(w, transposed, packed.n, packed.k, strip, begin, end, tile);
    if (!packed.half) {
      std::memcpy(wide + at, tile, (end - begin) * kStripColumns * sizeof(float));
      continue;
    }
    const uint32_t pairs = (end - begin + 1) / 2;
    if ((end - begin) % 2) {
      std::memset(tile + (end - begin) * kStripColumns, 0, kStripColumns * sizeof(float));
    }
    for (uint32_t i = 0; i < pairs; ++i) {
      const float* pair = tile + size_t{i} * 2 * kStripColumns;
      for (uint32_t j = 0; j < kStripColumns; ++j) {
        const uint32_t even = std::bit_cast<uint32_t>(pair[j]);
        const uint32_t odd = std::bit_cast<uint32_t>(pair[kStripColumns + j]);
        words[at + i * kStripColumns + j] = even | (odd >> 16);
      }
    }
  }
}

// Packs one weight with all threads of a team. transposed: w is [k, n] instead of [n, k].
inline PackedWeight pack_weight(Team& team, const float* w, uint32_t n, uint32_t k,
                                bool transposed) {
  PackedWeight packed;
  packed.n = n;
  packed.k = k;
  const uint32_t strips = packed.num_strips();
  const size_t count = size_t{n} * k;
  std::atomic<bool> exact{true};
  const uint32_t size = std::max(1u, strips / (16 * team.num_threads()));
  const uint32_t chunks = (strips + size - 1) / size;
  auto check = [&](Worker& worker) {
    worker.phase(chunks, [&](uint32_t chunk) {
      if (!exact.load(std::memory_order_relaxed)) return;
      const size_t begin = count * chunk / chunks;
      const size_t end = count * (chunk + 1) / chunks;
      if (!exact_in_bf16(w, begin, end)) exact.store(false, std::memory_order_relaxed);
    });
  };
  team.run(check);
  packed.half = exact.load(std::memory_order_relaxed);
  packed.storage = allocate_bytes(strips * packed.strip_words() * sizeof(uint32_t));
  auto pack = [&](Worker& worker) {
    worker.phase(chunks, [&](uint32_t chunk) {
      for (uint32_t s = chunk * size; s < std::min(strips, (chunk + 1) * size); ++s) {
        pack_strip(w, transposed, s, packed);
      }
    });
  };
  team.run(pack);
  return packed;
}

}  // namespace blink::cpu
