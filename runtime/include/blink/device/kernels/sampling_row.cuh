/* A row of logits kept by a cluster of blocks, and sums over it that all its threads agree on: what
 * sampling searches its thresholds with.
 */
#ifndef BLINK_DEVICE_KERNELS_SAMPLING_ROW_CUH
#define BLINK_DEVICE_KERNELS_SAMPLING_ROW_CUH

#include "types.cuh"

namespace blink::kernels {

/* Without clusters one block takes a row, and reads it from memory each time. */
constexpr int kSampleThreads = 512, kSampleWarps = kSampleThreads / 32;
constexpr int kSampleBlocks = BLINK_HAS_CLUSTERS ? 8 : 1;  // of a row, a cluster
constexpr int kSampleParts = kSampleBlocks * kSampleWarps;

/* Unsigned integers in the order of the floats; -0 equals +0. */
__device__ __forceinline__ uint32_t ordered_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float float_of_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/* How many leading bits of an ordered key a logit of this type can differ in. */
template <typename T>
struct KeyBits {
  static constexpr int kCount = 32;
};
template <>
struct KeyBits<bf16> {
  static constexpr int kCount = 16;
};
template <>
struct KeyBits<fp16> {
  static constexpr int kCount = 20;
};

/* A warp's part of a row: the row is cut into kSampleParts contiguous parts, each kept in shared
 * memory, where a lane takes 8 neighbours at a time. */
template <typename T>
struct RowPart {
#if BLINK_HAS_CLUSTERS
  T* held;  // the part, in shared memory (a multiple of 256 places)
#else
  const T* held;  // where the row lies
#endif
  int begin, end;  // ids
  int num_vocab;

  __device__ static int places(int vocab) {
    return ((vocab + kSampleParts - 1) / kSampleParts + 255) / 256 * 256;
  }
  __device__ RowPart(const T* logits, int64_t row_index, int vocab, unsigned char* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, size = places(vocab);
    const int part = blockIdx.x * kSampleWarps + warp;
    num_vocab = vocab;
    begin = min(part * size, vocab);
    end = min(begin + size, vocab);
#if !BLINK_HAS_CLUSTERS
    held = logits + row_index * vocab + begin;
#else
    T* to = reinterpret_cast<T*>(shared) + warp * size;
    held = to;
    const T* from = logits + row_index * vocab + begin;
    const int count = end - begin;
    constexpr int kPiece = 16 / sizeof(T);
    int done = 0;
    if ((reinterpret_cast<uintptr_t>(from) & 15) == 0) {
      done = count / kPiece * kPiece;
      for (int i = lane * kPiece; i < done; i += 32 * kPiece)
        copy_async(shared_address(to + i), from + i);
    }
    copy_async_commit();
    for (int i = done + lane; i < size; i += 32)
      to[i] = i < count ? from[i] : from_float<T>(kMinusInf);
    copy_async_wait<0>();
    __syncwarp();
#endif
  }
  /* 8 logits from `id` on, -inf past the end. */
  __device__ __forceinline__ void read8(int id, float (&x)[8]) const {
#if !BLINK_HAS_CLUSTERS
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = id + i < end ? to_float(held[id - begin + i]) : kMinusInf;
#else
    uint4 words[sizeof(T) / 2];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i)
      words[i] = reinterpret_cast<const uint4*>(held + (id - begin))[i];
    const T* values = reinterpret_cast<const T*>(words);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(values[i]);
#endif
  }
  /* f(id, x) for each group of 8 of this lane, in order of id. */
  template <typename F>
  __device__ __forceinline__ void for_each8(const F& f) const {
#pragma unroll 2
    for (int id = begin + threadIdx.x % 32 * 8; id < end; id += 256) {
      float x[8];
      read8(id, x);
      f(id, x);
    }
  }
};

struct PivotSums {
  float mass[3];
  uint32_t count[3];
};

struct SampleShared {
  unsigned long long best[kSampleParts];
  float mass[kSampleParts];
  uint32_t ties[kSampleParts];
  PivotSums of_warp[kSampleWarps];
  PivotSums of_block[2][kSampleBlocks];  // by turns, so that one barrier a sum is enough
  uint32_t turn;
};

/* The barrier of all blocks of a row. */
__device__ __forceinline__ void sample_barrier() {
#if BLINK_HAS_CLUSTERS
  cluster_barrier();
#else
  __syncthreads();
#endif
}
/* Stores a word at the same place of the row's block `block`. */
__device__ __forceinline__ void store_in_block(void* place, uint32_t word, int block) {
#if BLINK_HAS_CLUSTERS
  store_in_cluster(shared_address(place), word, block);
#else
  static_cast<void>(block);  // the only one
  *static_cast<uint32_t*>(place) = word;
#endif
}

/* For each pivot: how many keys are at least it, and their weight. Equal in all threads. */
template <typename T, typename Weight>
__device__ PivotSums sum_at_least(const RowPart<T>& part, const uint32_t (&pivot)[3],
                                  const Weight& weight, SampleShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  PivotSums sums = {};
  part.for_each8([&](int id, const float(&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t key = id + i < part.num_vocab ? ordered_key(x[i]) : 0;
      const float w = weight(x[i]);
#pragma unroll
      for (int p = 0; p < 3; ++p) {
        if (key >= pivot[p]) sums.mass[p] += w, sums.count[p] += 1;
      }
    }
  });
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    sums.mass[p] = warp_sum(sums.mass[p]);
    sums.count[p] = __reduce_add_sync(0xffffffffu, sums.count[p]);
  }
  if (lane == 0) shared.of_warp[warp] = sums;
  const uint32_t turn = shared.turn;
  __syncthreads();
  if (warp == 0) {
    sums = lane < kSampleWarps ? shared.of_warp[lane] : PivotSums{};
#pragma unroll
    for (int p = 0; p < 3; ++p) {
      sums.mass[p] = warp_sum(sums.mass[p]);
      sums.count[p] = __reduce_add_sync(0xffffffffu, sums.count[p]);
    }
    PivotSums& mine = shared.of_block[turn][blockIdx.x];
    if (lane < kSampleBlocks) {
#pragma unroll
      for (int p = 0; p < 3; ++p) {
        store_in_block(&mine.mass[p], __float_as_uint(sums.mass[p]), lane);
        store_in_block(&mine.count[p], sums.count[p], lane);
      }
    }
    if (lane == 0) shared.turn = turn ^ 1;
  }
  sample_barrier();
  sums = {};
#pragma unroll
  for (int b = 0; b < kSampleBlocks; ++b)
#pragma unroll
    for (int p = 0; p < 3; ++p) {
      sums.mass[p] += shared.of_block[turn][b].mass[p];
      sums.count[p] += shared.of_block[turn][b].count[p];
    }
  return sums;
}

/* The largest key whose sums of at-least satisfy `enough`; `floor` satisfies it by assumption. */
template <typename T, typename Weight, typename Enough>
__device__ uint32_t search_key(const RowPart<T>& part, const Weight& weight, const Enough& enough,
                               SampleShared& shared) {
  uint32_t found = 0;
#pragma unroll 1
  for (int bit = 30; bit >= 32 - KeyBits<T>::kCount - (KeyBits<T>::kCount & 1); bit -= 2) {
    const uint32_t pivot[3] = {found | 1u << bit, found | 2u << bit, found | 3u << bit};
    const PivotSums sums = sum_at_least(part, pivot, weight, shared);
#pragma unroll
    for (int p = 2; p >= 0; --p) {
      if (enough(sums.mass[p], sums.count[p])) {
        found = pivot[p];
        break;
      }
    }
  }
  return found;
}

/* Negative bf16 and fp16 values have their unused low bits set by the complement; searching only
 * the leading bits leaves them clear, and `>=` against such a key is still exact. Equality is
 * tested on the leading bits. */
template <typename T>
__device__ __forceinline__ uint32_t leading_bits(uint32_t key) {
  constexpr int kDrop = 32 - KeyBits<T>::kCount - (KeyBits<T>::kCount & 1);
  return key >> kDrop << kDrop;
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_SAMPLING_ROW_CUH
