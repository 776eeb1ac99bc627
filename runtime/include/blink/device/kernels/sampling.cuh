/* Sampling: one block a row of logits, no sort.
 *
 * Greedy is the exact argmax, the lowest id among equals. Otherwise temperature, then top_k, top_p
 * and min_p, each of which keeps a prefix of the order (probability descending, id ascending): the
 * prefix's last key is found by searching the bits of the order-preserving integer form of a logit,
 * two bits a pass. The token is drawn by inverting the cumulative sum of the kept weights in order
 * of id. All sums are formed in a fixed order. A row that holds NaN yields -1.
 */
#ifndef BLINK_DEVICE_KERNELS_SAMPLING_CUH
#define BLINK_DEVICE_KERNELS_SAMPLING_CUH

#include "../../step.h"
#include "types.cuh"

namespace blink::kernels {

constexpr int kSampleThreads = 1024, kSampleWarps = kSampleThreads / 32;
constexpr float kGreedyBelowTemperature = 1e-5f;

/* Unsigned integers in the order of the floats; -0 equals +0. */
__device__ __forceinline__ uint32_t ordered_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Philox4x32-10, Salmon et al. 2011; the first word of the block (counter, 0, 0, 0), in (0, 1). */
__device__ __forceinline__ float philox_uniform(uint64_t seed, uint32_t counter) {
  uint32_t c0 = counter, c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    const uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return (static_cast<float>(c0 >> 8) + 0.5f) * (1.0f / 16777216.0f);
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

/* Walks a row: warp w takes the w-th contiguous part, a lane 8 neighbours at a time. */
template <typename T>
struct RowReader {
  const T* row;
  int num_vocab;
  int part;  // ids a warp takes, a multiple of 256
  bool aligned;

  __device__ RowReader(const T* logits, int index, int vocab) {
    row = logits + static_cast<int64_t>(index) * vocab;
    num_vocab = vocab;
    part = ((vocab + kSampleWarps - 1) / kSampleWarps + 255) / 256 * 256;
    aligned = (reinterpret_cast<uintptr_t>(row) & 15) == 0;
  }
  __device__ int begin(int warp) const { return min(warp * part, num_vocab); }
  __device__ int end(int warp) const { return min((warp + 1) * part, num_vocab); }

  __device__ __forceinline__ static void unpack(const uint4 (&words)[sizeof(T) / 2],
                                                float (&x)[8]) {
    const T* values = reinterpret_cast<const T*>(words);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(values[i]);
  }
  /* 8 logits from `id` on, -inf past the end. */
  __device__ __forceinline__ void read8(int id, float (&x)[8]) const {
    if (aligned && id + 8 <= num_vocab) {
      uint4 words[sizeof(T) / 2];
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i)
        words[i] = reinterpret_cast<const uint4*>(row + id)[i];
      unpack(words, x);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = id + i < num_vocab ? to_float(row[id + i]) : kMinusInf;
    }
  }
  /* f(id, x) for each group of 8 of this lane, in order of id; several loads are in flight. */
  template <typename F>
  __device__ __forceinline__ void for_each8(int warp, int lane, const F& f) const {
    constexpr int kAhead = sizeof(T) == 2 ? 4 : 2;
    const int stop = end(warp);
    int id = begin(warp) + lane * 8;
    if (aligned) {
      for (; id + (kAhead - 1) * 256 + 8 <= stop; id += kAhead * 256) {
        uint4 words[kAhead][sizeof(T) / 2];
#pragma unroll
        for (int a = 0; a < kAhead; ++a)
#pragma unroll
          for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i)
            words[a][i] = reinterpret_cast<const uint4*>(row + id + a * 256)[i];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          float x[8];
          unpack(words[a], x);
          f(id + a * 256, x);
        }
      }
    }
    for (; id < stop; id += 256) {
      float x[8];
      read8(id, x);
      f(id, x);
    }
  }
};

struct SampleShared {
  unsigned long long best[kSampleWarps];
  float mass[3][kSampleWarps];
  uint32_t count[3][kSampleWarps];
  uint32_t nan;
  int32_t chosen;
};

struct PivotSums {
  float mass[3];
  uint32_t count[3];
};

/* For each pivot: how many keys are at least it, and their weight. Equal in all threads. */
template <typename T, typename Weight>
__device__ PivotSums sum_at_least(const RowReader<T>& reader, const uint32_t (&pivot)[3],
                                  const Weight& weight, SampleShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  PivotSums sums = {};
  reader.for_each8(warp, lane, [&](int id, const float(&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t key = id + i < reader.num_vocab ? ordered_key(x[i]) : 0;
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
  __syncthreads();
  if (lane == 0) {
#pragma unroll
    for (int p = 0; p < 3; ++p)
      shared.mass[p][warp] = sums.mass[p], shared.count[p][warp] = sums.count[p];
  }
  __syncthreads();
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    sums.mass[p] = warp_sum(shared.mass[p][lane]);
    sums.count[p] = __reduce_add_sync(0xffffffffu, shared.count[p][lane]);
  }
  return sums;
}

/* The largest key whose sums of at-least satisfy `enough`; `floor` satisfies it by assumption. */
template <typename T, typename Weight, typename Enough>
__device__ uint32_t search_key(const RowReader<T>& reader, const Weight& weight,
                               const Enough& enough, SampleShared& shared) {
  uint32_t found = 0;
#pragma unroll 1
  for (int bit = 30; bit >= 32 - KeyBits<T>::kCount - (KeyBits<T>::kCount & 1); bit -= 2) {
    const uint32_t pivot[3] = {found | 1u << bit, found | 2u << bit, found | 3u << bit};
    const PivotSums sums = sum_at_least(reader, pivot, weight, shared);
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

template <typename T>
__device__ __forceinline__ int draw_token(const RowReader<T>& reader,
                                          const blink_sampling_params& params, float largest,
                                          SampleShared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float factor = kLog2e / params.temperature;
  auto weight = [&](float x) { return x == largest ? 1.0f : exp2f((x - largest) * factor); };

  // The kept prefix: keys above `last_key`, and the first `ties` ids of those equal to it.
  uint32_t last_key = 0, ties = 0xffffffffu;
  float total = 0.0f;
  {
    const uint32_t pivot[3] = {0, 1, 2};
    total = sum_at_least(reader, pivot, weight, shared).mass[0];
  }
  if (params.top_k > 0 && params.top_k < static_cast<uint32_t>(reader.num_vocab)) {
    last_key = search_key(
        reader, weight, [&](float, uint32_t count) { return count >= params.top_k; }, shared);
    constexpr uint32_t kStep = 1u << (32 - KeyBits<T>::kCount - (KeyBits<T>::kCount & 1));
    const uint32_t pivot[3] = {
        last_key, last_key + kStep < last_key ? 0xffffffffu : last_key + kStep, 0xffffffffu};
    const PivotSums sums = sum_at_least(reader, pivot, weight, shared);
    ties = params.top_k - sums.count[1];
    const uint32_t equal = sums.count[0] - sums.count[1];
    const float one = equal > 0 ? (sums.mass[0] - sums.mass[1]) / equal : 0.0f;
    total = sums.mass[1] + one * ties;
  }
  if (params.top_p < 1.0f) {
    const float wanted = params.top_p * total;
    const uint32_t key =
        search_key(reader, weight, [&](float mass, uint32_t) { return mass >= wanted; }, shared);
    if (key >= last_key) {
      constexpr uint32_t kStep = 1u << (32 - KeyBits<T>::kCount - (KeyBits<T>::kCount & 1));
      const uint32_t pivot[3] = {key, key + kStep < key ? 0xffffffffu : key + kStep, 0xffffffffu};
      const PivotSums sums = sum_at_least(reader, pivot, weight, shared);
      const uint32_t equal = sums.count[0] - sums.count[1];
      const float one = equal > 0 ? (sums.mass[0] - sums.mass[1]) / equal : 0.0f;
      const float rest = wanted - sums.mass[1];
      uint32_t needed = one > 0.0f && rest > 0.0f ? static_cast<uint32_t>(ceilf(rest / one)) : 1u;
      needed = max(1u, min(needed, equal));
      ties = key == last_key ? min(ties, needed) : needed;
      last_key = key;
    }
  }

  // Ties ahead of each warp's part, then each part's kept weight.
  uint32_t my_ties = 0;
  reader.for_each8(warp, lane, [&](int id, const float(&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      my_ties += id + i < reader.num_vocab && leading_bits<T>(ordered_key(x[i])) == last_key;
  });
  my_ties = __reduce_add_sync(0xffffffffu, my_ties);
  __syncthreads();
  if (lane == 0) shared.count[0][warp] = my_ties;
  __syncthreads();
  uint32_t ties_before = 0;
  for (int w = 0; w < warp; ++w) ties_before += shared.count[0][w];

  // One lane's 8 neighbours with what they weigh; ties counted in order of id.
  auto kept8 = [&](int id, uint32_t& running_ties, float(&w)[8]) {
    float x[8];
    const bool inside = id < reader.end(warp);
    if (inside) reader.read8(id, x);
    uint32_t equal = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      equal +=
          inside && id + i < reader.num_vocab && leading_bits<T>(ordered_key(x[i])) == last_key;
    uint32_t before = equal;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, before, i);
      if (lane >= i) before += other;
    }
    const uint32_t all = __shfl_sync(0xffffffffu, before, 31);
    uint32_t rank = running_ties + before - equal;
    running_ties += all;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      w[i] = 0.0f;
      if (!inside || id + i >= reader.num_vocab) continue;
      const uint32_t key = leading_bits<T>(ordered_key(x[i]));
      const bool tie = key == last_key;
      if (key > last_key || (tie && rank < ties)) {
        const float v = weight(x[i]);
        if (v >= params.min_p) w[i] = v;
      }
      rank += tie;
    }
  };
  const int begin = reader.begin(warp), rounds = (reader.end(warp) - begin + 255) / 256;
  float mass = 0.0f;
  uint32_t running = ties_before;
  for (int round = 0; round < rounds; ++round) {
    float w[8];
    kept8(begin + round * 256 + lane * 8, running, w);
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) mine += w[i];
    mass += __shfl_sync(0xffffffffu, warp_sum(mine), 0);  // the order of the second walk
  }
  __syncthreads();
  if (lane == 0) shared.mass[0][warp] = mass;
  if (threadIdx.x == 0) shared.chosen = -1;
  __syncthreads();
  float before = 0.0f, all = 0.0f;
  int last_warp = 0;
  for (int w = 0; w < kSampleWarps; ++w) {
    if (w == warp) before = all;
    all += shared.mass[0][w];
    if (shared.mass[0][w] > 0.0f) last_warp = w;
  }
  const float target = philox_uniform(params.seed, params.token_index) * all;
  // Rounding may put the target past the last sum: then the last kept token of the last part is
  // taken.
  const bool here =
      mass > 0.0f && target >= before && (target < before + mass || warp == last_warp);
  if (here) {
    running = ties_before;
    int last_kept = -1, found = -1;
    for (int round = 0; round < rounds && found < 0; ++round) {
      const int id = begin + round * 256 + lane * 8;
      float w[8];
      kept8(id, running, w);
      float mine = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) mine += w[i];
      float inclusive = mine;
#pragma unroll
      for (int i = 1; i < 32; i <<= 1) {
        const float other = __shfl_up_sync(0xffffffffu, inclusive, i);
        if (lane >= i) inclusive += other;
      }
      float at = before + inclusive - mine;
      int candidate = 0x7fffffff, kept = -1;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        at += w[i];
        if (w[i] > 0.0f) {
          kept = id + i;
          if (at > target && candidate == 0x7fffffff) candidate = id + i;
        }
      }
      candidate = __reduce_min_sync(0xffffffffu, candidate);
      last_kept = max(last_kept, __reduce_max_sync(0xffffffffu, kept));
      if (candidate != 0x7fffffff) found = candidate;
      before += __shfl_sync(0xffffffffu, warp_sum(mine), 0);
    }
    if (lane == 0) atomicMax(&shared.chosen, found >= 0 ? found : last_kept);
  }
  __syncthreads();
  return shared.chosen;
}

/* Grid: rows. kSampleThreads threads. */
template <typename T>
__device__ __forceinline__ void sample(const T* logits, const blink_sampling_params* sampling,
                                       int32_t* sampled_ids, int num_vocab) {
  __shared__ SampleShared shared;
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const blink_sampling_params params = sampling[row];
  if ((params.flags & BLINK_SAMPLE_ENABLED) == 0) {
    if (threadIdx.x == 0) sampled_ids[row] = 0;
    return;
  }
  if (threadIdx.x == 0) shared.nan = 0;
  __syncthreads();
  const RowReader<T> reader(logits, row, num_vocab);
  float best_value = kMinusInf;
  int best_id = reader.begin(warp) + lane * 8;  // ids ascend, so `>` keeps the lowest of equals
  bool nan = false;
  const bool any = best_id < reader.end(warp);
  reader.for_each8(warp, lane, [&](int id, const float(&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      nan |= x[i] != x[i];
      if (x[i] > best_value) best_value = x[i], best_id = id + i;
    }
  });
  unsigned long long best = any ? static_cast<unsigned long long>(ordered_key(best_value)) << 32 |
                                      static_cast<uint32_t>(~best_id)
                                : 0;
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, best, i);
    best = other > best ? other : best;
  }
  if (lane == 0) shared.best[warp] = best;
  if (nan) shared.nan = 1;
  __syncthreads();
  best = shared.best[lane];
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, best, i);
    best = other > best ? other : best;
  }
  if (shared.nan != 0) {
    if (threadIdx.x == 0) sampled_ids[row] = -1;
    return;
  }
  int chosen = static_cast<int>(~static_cast<uint32_t>(best));
  if (params.temperature >= kGreedyBelowTemperature) {
    const float largest = to_float(reader.row[chosen]);
    chosen = draw_token(reader, params, largest, shared);
  }
  if (threadIdx.x == 0) sampled_ids[row] = chosen;
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_SAMPLING_CUH
