/* What a request changes in its row of logits before a token is drawn: penalties, logit bias,
 * minimum length, in this order, as cpu/adjust_logits.hpp does.
 *
 * A kernel of its own counts the tokens of prompt and output, so that each is read once, however
 * many blocks sample the row. The sampler applies the counts to its copy of the row in shared
 * memory; the row itself stays the model's, which logprobs are of. Nothing is kept between steps: a
 * request that was paused, or moved to another row, gets the same logits. Rows that nothing changes
 * cost a look at their flags.
 */
#ifndef BLINK_DEVICE_KERNELS_ADJUST_LOGITS_CUH
#define BLINK_DEVICE_KERNELS_ADJUST_LOGITS_CUH

#include "../../step.h"
#include "sampling_row.cuh"

namespace blink::kernels {

constexpr int kCountThreads = 256, kCountBlocks = 4;  // of a row
constexpr uint32_t kInPrompt = 1u << 31;              // beside the count of a token in the output
constexpr uint32_t kAdjusts =
    BLINK_SAMPLE_PENALTIES | BLINK_SAMPLE_LOGIT_BIAS | BLINK_SAMPLE_MIN_TOKENS;

/* Where prompts and outputs are; null where nobody schedules. */
__device__ __forceinline__ const blink_sampling_history* history_of(const blink_step_state* state) {
  return state != nullptr ? state->history : nullptr;
}

/* Counts the tokens that penalties of a row look at into counts[row][num_vocab], all zero before.
 * Grid (kCountBlocks, rows), kCountThreads threads. */
__device__ __forceinline__ void count_history(const blink_sampling_params* sampling,
                                              const blink_step_state* state, uint32_t* counts,
                                              int num_vocab) {
  let_next_start();
  wait_for_previous();
  const blink_sampling_params& params = sampling[blockIdx.y];
  constexpr uint32_t kWanted = BLINK_SAMPLE_ENABLED | BLINK_SAMPLE_PENALTIES;
  if ((params.flags & kWanted) != kWanted) return;
  const blink_sampling_history* history = history_of(state);
  if (history == nullptr) return;
  const blink_slot_request& request = history->requests[params.slot];
  counts += static_cast<int64_t>(blockIdx.y) * num_vocab;
  const uint32_t first = blockIdx.x * kCountThreads + threadIdx.x, last_id = num_vocab - 1;
  constexpr uint32_t kStride = kCountBlocks * kCountThreads;
  const unsigned char* records = history->outputs + params.slot * history->output_stride_bytes;
  for (uint32_t i = first; i < params.token_index; i += kStride) {
    const unsigned char* record = records + uint64_t{i} * history->output_record_bytes;
    atomicAdd(&counts[min(load_of_ring(reinterpret_cast<const uint32_t*>(record)), last_id)], 1u);
  }
  if (request.repetition_penalty == 1.0f) return;
  const uint32_t* prompt =
      history->prompts + static_cast<uint64_t>(params.slot) * history->prompt_stride_tokens;
  for (uint32_t i = first; i < request.num_prompt_tokens; i += kStride)
    atomicOr(&counts[min(load_of_ring(prompt + i), last_id)], kInPrompt);
}

#if BLINK_HAS_CLUSTERS
/* Changes a warp's part of a row in shared memory and clears the counts it used. Each value has one
 * lane in all three loops, so that they follow each other without a barrier. */
template <typename T>
__device__ __forceinline__ void adjust_part(const RowPart<T>& part,
                                            const blink_sampling_params& params,
                                            const blink_sampling_history& history,
                                            uint32_t* counts) {
  const blink_slot_request& request = history.requests[params.slot];
  const int lane = threadIdx.x % 32;
  auto change = [&](int place, auto&& f) {
    part.held[place] = from_float<T>(f(to_float(part.held[place])));
  };
  auto is_mine = [&](uint32_t id) {
    const int place = static_cast<int>(id) - part.begin;
    return place >= 0 && place < part.end - part.begin && place % 32 == lane;
  };
  if (params.flags & BLINK_SAMPLE_PENALTIES) {
    const float repetition = request.repetition_penalty, presence = request.presence_penalty,
                frequency = request.frequency_penalty;
    for (int place = lane; place < part.end - part.begin; place += 32) {
      const uint32_t seen = counts[part.begin + place];
      if (seen == 0) continue;
      counts[part.begin + place] = 0;
      const uint32_t count = seen & ~kInPrompt;
      change(place, [&](float x) {
        if (repetition != 1.0f) x = x > 0.0f ? x / repetition : x * repetition;
        return count > 0 ? x - frequency * static_cast<float>(count) - presence : x;
      });
    }
  }
  if (params.flags & BLINK_SAMPLE_LOGIT_BIAS) {
    for (uint32_t i = 0; i < request.num_logit_bias; ++i) {
      const uint32_t id = request.logit_bias_ids[i];
      const float bias = request.logit_bias_values[i];
      if (is_mine(id)) change(id - part.begin, [&](float x) { return x + bias; });
    }
  }
  if ((params.flags & BLINK_SAMPLE_MIN_TOKENS) && params.token_index < request.min_output_tokens) {
    for (uint32_t i = 0; i < request.num_stop_token_ids; ++i) {
      const uint32_t id = request.stop_token_ids[i];
      if (is_mine(id)) change(id - part.begin, [](float) { return kMinusInf; });
    }
  }
  __syncwarp();
}
#endif

}  // namespace blink::kernels

#endif  // BLINK_DEVICE_KERNELS_ADJUST_LOGITS_CUH
