/* Sampling: a cluster of blocks a row of logits, no sort; each block keeps its share of the row in
 * shared memory, so that the row is read once.
 *
 * Greedy is the exact argmax, the lowest id among equals. Otherwise temperature, then top_k, top_p
 * and min_p, each of which keeps a prefix of the order (probability descending, id ascending): the
 * prefix's last key is found by searching the bits of the order-preserving integer form of a logit,
 * two bits a pass. The token is drawn by inverting the cumulative sum of the kept weights in order
 * of id. All sums are formed in a fixed order. A row that holds NaN yields -1.
 *
 * Penalties, logit bias and minimum length come before all this: adjust_logits.cuh.
 */
#ifndef BLINK_DEVICE_KERNELS_SAMPLING_CUH
#define BLINK_DEVICE_KERNELS_SAMPLING_CUH

#include "adjust_logits.cuh"

namespace blink::kernels {

constexpr float kGreedyBelowTemperature = 1e-5f;

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

/* Draws the row's token; the lane that finds it stores it. */
template <typename T>
__device__ __forceinline__ void draw_token(const RowPart<T>& part,
                                           const blink_sampling_params& params, float largest,
                                           SampleShared& shared, int32_t* sampled_id) {
  const int lane = threadIdx.x % 32, mine = blockIdx.x * kSampleWarps + threadIdx.x / 32;
  const float factor = kLog2e / params.temperature;
  auto weight = [&](float x) { return x == largest ? 1.0f : exp2f((x - largest) * factor); };

  // The kept prefix: keys above `last_key`, and the first `ties` ids of those equal to it.
  uint32_t last_key = 0, ties = 0xffffffffu;
  float total = 0.0f;
  {
    const uint32_t pivot[3] = {0, 1, 2};
    total = sum_at_least(part, pivot, weight, shared).mass[0];
  }
  if (params.top_k > 0 && params.top_k < static_cast<uint32_t>(part.num_vocab)) {
    last_key = search_key(
        part, weight, [&](float, uint32_t count) { return count >= params.top_k; }, shared);
    constexpr uint32_t kStep = 1u << (32 - KeyBits<T>::kCount - (KeyBits<T>::kCount & 1));
    const uint32_t pivot[3] = {
        last_key, last_key + kStep < last_key ? 0xffffffffu : last_key + kStep, 0xffffffffu};
    const PivotSums sums = sum_at_least(part, pivot, weight, shared);
    ties = params.top_k - sums.count[1];
    const uint32_t equal = sums.count[0] - sums.count[1];
    const float one = equal > 0 ? (sums.mass[0] - sums.mass[1]) / equal : 0.0f;
    total = sums.mass[1] + one * ties;
  }
  if (params.top_p < 1.0f) {
    const float wanted = params.top_p * total;
    const uint32_t key =
        search_key(part, weight, [&](float mass, uint32_t) { return mass >= wanted; }, shared);
    if (key >= last_key) {
      constexpr uint32_t kStep = 1u << (32 - KeyBits<T>::kCount - (KeyBits<T>::kCount & 1));
      const uint32_t pivot[3] = {key, key + kStep < key ? 0xffffffffu : key + kStep, 0xffffffffu};
      const PivotSums sums = sum_at_least(part, pivot, weight, shared);
      const uint32_t equal = sums.count[0] - sums.count[1];
      const float one = equal > 0 ? (sums.mass[0] - sums.mass[1]) / equal : 0.0f;
      const float rest = wanted - sums.mass[1];
      uint32_t needed = one > 0.0f && rest > 0.0f ? static_cast<uint32_t>(ceilf(rest / one)) : 1u;
      needed = max(1u, min(needed, equal));
      ties = key == last_key ? min(ties, needed) : needed;
      last_key = key;
    }
  }

  // Ties ahead of each part, then each part's kept weight.
  uint32_t my_ties = 0;
  part.for_each8([&](int id, const float(&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      my_ties += id + i < part.num_vocab && leading_bits<T>(ordered_key(x[i])) == last_key;
  });
  my_ties = __reduce_add_sync(0xffffffffu, my_ties);
  if (lane < kSampleBlocks) store_in_block(&shared.ties[mine], my_ties, lane);
  sample_barrier();
  uint32_t ties_before = 0;
  for (int p = lane; p < mine; p += 32) ties_before += shared.ties[p];
  ties_before = __reduce_add_sync(0xffffffffu, ties_before);

  // One lane's 8 neighbours with what they weigh; ties counted in order of id.
  auto kept8 = [&](int id, uint32_t& running_ties, float(&w)[8]) {
    float x[8];
    const bool inside = id < part.end;
    if (inside) part.read8(id, x);
    uint32_t equal = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      equal += inside && id + i < part.num_vocab && leading_bits<T>(ordered_key(x[i])) == last_key;
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
      if (!inside || id + i >= part.num_vocab) continue;
      const uint32_t key = leading_bits<T>(ordered_key(x[i]));
      const bool tie = key == last_key;
      if (key > last_key || (tie && rank < ties)) {
        const float v = weight(x[i]);
        if (v >= params.min_p) w[i] = v;
      }
      rank += tie;
    }
  };
  const int rounds = (part.end - part.begin + 255) / 256;
  float mass = 0.0f;
  uint32_t running = ties_before;
  for (int round = 0; round < rounds; ++round) {
    float w[8];
    kept8(part.begin + round * 256 + lane * 8, running, w);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += w[i];
    mass += __shfl_sync(0xffffffffu, warp_sum(sum), 0);  // the order of the second walk
  }
  if (lane < kSampleBlocks) store_in_block(&shared.mass[mine], __float_as_uint(mass), lane);
  sample_barrier();  // the last one: from here on a block reads its own memory alone
  float before = 0.0f, all = 0.0f;
  int last_part = 0;
#pragma unroll 8
  for (int p = 0; p < kSampleParts; ++p) {
    if (p == mine) before = all;
    all += shared.mass[p];
    if (shared.mass[p] > 0.0f) last_part = p;
  }
  const float target = philox_uniform(params.seed, params.token_index) * all;
  if (!(all > 0.0f) && mine == 0 && lane == 0) *sampled_id = -1;  // min_p above 1 keeps nothing
  // Rounding may put the target past the last sum: then the last kept token of the last part is
  // taken. Parts meet without a gap, so that one warp finds itself here.
  if (!(mass > 0.0f && target >= before && (target < before + mass || mine == last_part))) return;
  running = ties_before;
  int last_kept = -1, found = -1;
  for (int round = 0; round < rounds && found < 0; ++round) {
    const int id = part.begin + round * 256 + lane * 8;
    float w[8];
    kept8(id, running, w);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += w[i];
    float inclusive = sum;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      const float other = __shfl_up_sync(0xffffffffu, inclusive, i);
      if (lane >= i) inclusive += other;
    }
    float at = before + inclusive - sum;
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
    before += __shfl_sync(0xffffffffu, warp_sum(sum), 0);
  }
  if (lane == 0) *sampled_id = found >= 0 ? found : last_kept;
}

/* Grid (kSampleBlocks, rows), a cluster a row; kSampleThreads threads; kSampleWarps parts of
 * `RowPart::places` values of dynamic shared memory. `counts` is what count_history made. */
template <typename T>
__device__ __forceinline__ void sample(const T* logits, const blink_sampling_params* sampling,
                                       const blink_step_state* state, uint32_t* counts,
                                       int32_t* sampled_ids, int num_vocab) {
  extern __shared__ __align__(128) unsigned char held[];
  __shared__ SampleShared shared;
  let_next_start();
  sample_barrier();  // no block stores into another before that has started
  wait_for_previous();
  const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const blink_sampling_params params = sampling[row];
  if ((params.flags & BLINK_SAMPLE_ENABLED) == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) sampled_ids[row] = 0;
    return;
  }
  if (threadIdx.x == 0) shared.turn = 0;
  const RowPart<T> part(logits, row, num_vocab, held);
#if BLINK_HAS_CLUSTERS
  if (params.flags & kAdjusts) {
    if (const blink_sampling_history* history = history_of(state))
      adjust_part(part, params, *history, counts + static_cast<int64_t>(row) * num_vocab);
  }
#else
  static_cast<void>(state), static_cast<void>(counts);
#endif
  float best_value = kMinusInf;
  int best_id = part.begin + lane * 8;  // ids ascend, so `>` keeps the lowest of equals
  bool nan = false;
  const bool any = best_id < part.end;
  part.for_each8([&](int id, const float(&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      nan |= x[i] != x[i];
      if (x[i] > best_value) best_value = x[i], best_id = id + i;
    }
  });
  // The best of all is all ones where a NaN was seen: no key is as large.
  unsigned long long best = any ? static_cast<unsigned long long>(ordered_key(best_value)) << 32 |
                                      static_cast<uint32_t>(~best_id)
                                : 0;
  if (nan) best = ~0ull;
  best = warp_max(best);
  if (lane < kSampleBlocks) {
    uint32_t* place = reinterpret_cast<uint32_t*>(&shared.best[blockIdx.x * kSampleWarps + warp]);
    store_in_block(place, static_cast<uint32_t>(best), lane);
    store_in_block(place + 1, static_cast<uint32_t>(best >> 32), lane);
  }
  sample_barrier();
  best = 0;
  for (int p = lane; p < kSampleParts; p += 32) best = max(best, shared.best[p]);
  best = warp_max(best);
  const bool leader = blockIdx.x == 0 && threadIdx.x == 0;
  if (best == ~0ull) {
    if (leader) sampled_ids[row] = -1;
    return;
  }
  const int chosen = static_cast<int>(~static_cast<uint32_t>(best));
  if (params.temperature < kGreedyBelowTemperature) {
    if (leader) sampled_ids[row] = chosen;
    return;
  }
  const float largest = float_of_key(static_cast<uint32_t>(best >> 32));
  draw_token(part, params, largest, shared, sampled_ids + row);
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_SAMPLING_CUH
