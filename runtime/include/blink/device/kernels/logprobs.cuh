/* Log probabilities of the sampled token and of the likeliest ones, of the model's own logits:
 * before penalties, bias and temperature. As cpu/logprobs.hpp, sums in fp32.
 */
#ifndef BLINK_DEVICE_KERNELS_LOGPROBS_CUH
#define BLINK_DEVICE_KERNELS_LOGPROBS_CUH

#include "../../step.h"
#include "sampling_row.cuh"

namespace blink::kernels {

constexpr int kLogprobThreads = 1024, kLogprobWarps = kLogprobThreads / 32;
constexpr int kMaxTop = BLINK_MAX_TOP_LOGPROBS;

/* The block's largest entry or sum, in all threads; `of_warp` may be used again after a barrier. */
__device__ __forceinline__ unsigned long long block_max(unsigned long long x,
                                                        unsigned long long* of_warp) {
  x = warp_max(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_max(of_warp[threadIdx.x % 32]);
}
__device__ __forceinline__ float block_sum(float x, float* of_warp) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(of_warp[threadIdx.x % 32]);
}

/* Grid (rows), kLogprobThreads threads. Rows that nobody asked of, and those that sampled nothing,
 * are left as they are. */
template <typename T>
__device__ __forceinline__ void write_logprobs(const T* logits,
                                               const blink_sampling_params* sampling,
                                               const int32_t* sampled_ids, float* logprobs,
                                               int num_vocab) {
  __shared__ unsigned long long largest_of_warp[kMaxTop][kLogprobWarps];
  __shared__ float sum_of_warp[kLogprobWarps];
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.x, num_asked = static_cast<int>(sampling[row].num_logprobs);
  const int chosen = sampled_ids[row];
  if ((sampling[row].flags & BLINK_SAMPLE_ENABLED) == 0 || num_asked == 0 || chosen < 0) return;
  const T* values = logits + static_cast<int64_t>(row) * num_vocab;

  // Entries order by logit, then by lowest id: no two are equal. Each thread keeps its largest.
  unsigned long long best[kMaxTop] = {};
  for (int id = threadIdx.x; id < num_vocab; id += kLogprobThreads) {
    unsigned long long entry = static_cast<unsigned long long>(ordered_key(to_float(values[id])))
                                   << 32 |
                               static_cast<uint32_t>(~id);
#pragma unroll
    for (int i = 0; i < kMaxTop; ++i) {
      const unsigned long long lower = min(best[i], entry);
      best[i] = max(best[i], entry);
      entry = lower;
    }
  }
  const int num_top = min(num_asked - 1, kMaxTop);
  unsigned long long top[kMaxTop] = {};
#pragma unroll
  for (int i = 0; i < kMaxTop; ++i) {
    if (i > 0 && i >= num_top) break;  // the largest is needed anyway
    top[i] = block_max(best[0], largest_of_warp[i]);
    if (best[0] != top[i]) continue;
#pragma unroll
    for (int j = 0; j + 1 < kMaxTop; ++j) best[j] = best[j + 1];
    best[kMaxTop - 1] = 0;
  }
  const float largest = float_of_key(static_cast<uint32_t>(top[0] >> 32));
  const bool is_finite = fabsf(largest) < -kMinusInf;
  float sum = 0.0f;
  for (int id = threadIdx.x; is_finite && id < num_vocab; id += kLogprobThreads)
    sum += exp2f((to_float(values[id]) - largest) * kLog2e);
  sum = block_sum(sum, sum_of_warp);
  if (threadIdx.x != 0) return;
  const float offset = logf(sum);
  auto logprob = [&](float x) {
    return is_finite ? x - largest - offset : x == largest ? 0.0f : kMinusInf;
  };
  float* out = logprobs + row * (1 + 2 * kMaxTop);
  out[0] = logprob(to_float(values[chosen]));
#pragma unroll
  for (int i = 0; i < kMaxTop; ++i) {
    if (i >= num_top) break;
    const bool is_there = top[i] != 0;  // else the vocabulary ended
    out[1 + 2 * i] = is_there ? static_cast<float>(~static_cast<uint32_t>(top[i])) : 0.0f;
    out[2 + 2 * i] =
        is_there ? logprob(float_of_key(static_cast<uint32_t>(top[i] >> 32))) : kMinusInf;
  }
}

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_LOGPROBS_CUH
