// What changes one row of logits before it is sampled: penalties, logit bias, minimum length, in
// this order.
//
// Nothing is kept between steps: what was generated is read from the ring's areas, so that a
// request that was paused, or shares its batch with others, gets the same logits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "blink/cpu/sample.hpp"
#include "blink/step.h"

namespace blink::cpu {

struct AdjustScratch {
  std::vector<float> logits;     // [vocab]
  std::vector<uint32_t> counts;  // [vocab], all zero between two rows
};

// The tokens of one slot before the one that is sampled.
class SlotHistory {
 public:
  SlotHistory(const blink_sampling_history& history, uint32_t slot, uint32_t num_output_tokens,
              uint32_t vocab)
      : prompt_(history.prompts + static_cast<uint64_t>(slot) * history.prompt_stride_tokens),
        output_(history.outputs + slot * history.output_stride_bytes),
        record_bytes_(history.output_record_bytes),
        num_prompt_tokens_(history.requests[slot].num_prompt_tokens),
        num_output_tokens_(num_output_tokens),
        last_id_(vocab - 1) {}

  template <typename Body>
  void for_each_prompt_token(Body&& body) const {
    for (uint32_t i = 0; i < num_prompt_tokens_; ++i) body(read(prompt_ + i));
  }

  template <typename Body>
  void for_each_output_token(Body&& body) const {
    const unsigned char* record = output_;
    for (uint32_t i = 0; i < num_output_tokens_; ++i, record += record_bytes_) {
      body(read(reinterpret_cast<const uint32_t*>(record)));
    }
  }

 private:
  // Relaxed, as the front end may write where it should not; the clamp keeps that harmless.
  uint32_t read(const uint32_t* word) const {
    return std::min(__atomic_load_n(word, __ATOMIC_RELAXED), last_id_);
  }

  const uint32_t* prompt_;
  const unsigned char* output_;
  uint32_t record_bytes_;
  uint32_t num_prompt_tokens_;
  uint32_t num_output_tokens_;
  uint32_t last_id_;
};

// The repetition penalty divides positive logits, and multiplies others, of every token in prompt
// or output (Keskar et al., "CTRL"); then each token of the output loses frequency_penalty times
// its count and presence_penalty once. `counts` is all zero before and after.
inline void apply_penalties(float* logits, const blink_slot_request& request,
                            const SlotHistory& history, uint32_t* counts) {
  constexpr uint32_t kInPrompt = 1u << 31;
  const float repetition = request.repetition_penalty;
  const bool heeds_prompt = repetition != 1.0f;
  history.for_each_output_token([&](uint32_t id) { ++counts[id]; });
  if (heeds_prompt) history.for_each_prompt_token([&](uint32_t id) { counts[id] |= kInPrompt; });
  const auto apply_once = [&](uint32_t id) {
    if (counts[id] == 0) return;
    const uint32_t count = counts[id] & ~kInPrompt;
    counts[id] = 0;
    float logit = logits[id];
    if (heeds_prompt) logit = logit > 0.0f ? logit / repetition : logit * repetition;
    if (count > 0) {
      logit -= request.frequency_penalty * static_cast<float>(count);
      logit -= request.presence_penalty;
    }
    logits[id] = logit;
  };
  history.for_each_output_token(apply_once);
  if (heeds_prompt) history.for_each_prompt_token(apply_once);
}

// Returns the logits to sample the row from: `logits`, or a changed copy in `scratch`. No
// allocation once warm. Costs a copy of the row and, with penalties, one reading of the history.
inline const float* adjust_logits(const float* logits, uint32_t vocab,
                                  const blink_sampling_params& params,
                                  const blink_sampling_history* history, AdjustScratch& scratch) {
  if (history == nullptr) return logits;
  const blink_slot_request& request = history->requests[params.slot];
  scratch.logits.resize(vocab);
  float* adjusted = scratch.logits.data();
  std::memcpy(adjusted, logits, size_t{vocab} * sizeof(float));
  if (params.flags & BLINK_SAMPLE_PENALTIES) {
    scratch.counts.resize(vocab);
    const SlotHistory tokens(*history, params.slot, params.token_index, vocab);
    apply_penalties(adjusted, request, tokens, scratch.counts.data());
  }
  if (params.flags & BLINK_SAMPLE_LOGIT_BIAS) {
    for (uint32_t i = 0; i < request.num_logit_bias; ++i) {
      const uint32_t id = request.logit_bias_ids[i];
      if (id < vocab) adjusted[id] += request.logit_bias_values[i];
    }
  }
  if ((params.flags & BLINK_SAMPLE_MIN_TOKENS) && params.token_index < request.min_output_tokens) {
    for (uint32_t i = 0; i < request.num_stop_token_ids; ++i) {
      const uint32_t id = request.stop_token_ids[i];
      if (id < vocab) adjusted[id] = -std::numeric_limits<float>::infinity();
    }
  }
  return adjusted;
}

}  // namespace blink::cpu
