// Log probabilities of the sampled token and of the likeliest ones, from the model's own logits:
// before penalties, bias and temperature.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "blink/abi.h"
#include "blink/cpu/math.hpp"

namespace blink::cpu {

constexpr uint32_t kLogprobFloats = 1 + 2 * BLINK_MAX_TOP_LOGPROBS;  // of a row, step.h

// log(sum(exp(logits))) - top, `top` being the largest logit and finite. In one fixed order.
inline double log_of_sum(const float* logits, uint32_t vocab, float top) {
  constexpr uint32_t kChains = 8;
  std::array<double, kChains> sums{};
  uint32_t i = 0;
  for (; i + kChains <= vocab; i += kChains) {
    for (uint32_t j = 0; j < kChains; ++j) sums[j] += exp_f32(logits[i + j] - top);
  }
  for (; i < vocab; ++i) sums[0] += exp_f32(logits[i] - top);
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return std::log(total);
}

// Writes the logprob of `chosen`, then (id, logprob) of the `num_top` largest logits, lowest id
// first among equals. `out` has kLogprobFloats floats; num_top is at most BLINK_MAX_TOP_LOGPROBS.
// The row holds no NaN.
inline void write_logprobs(const float* logits, uint32_t vocab, uint32_t chosen, uint32_t num_top,
                           float* out) {
  struct Entry {
    float logit;
    uint32_t id;
  };
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  std::array<Entry, BLINK_MAX_TOP_LOGPROBS + 1> best;  // the last one is a place to fall from
  best.fill({kLowest, 0});
  const uint32_t num_kept = num_top > 0 ? num_top : 1;  // the largest is needed anyway
  uint32_t num_found = 0;
  for (uint32_t id = 0; id < vocab; ++id) {
    if (num_found == num_kept && !(logits[id] > best[num_kept - 1].logit)) continue;
    uint32_t place = num_found < num_kept ? num_found++ : num_kept - 1;
    for (; place > 0 && logits[id] > best[place - 1].logit; --place) best[place] = best[place - 1];
    best[place] = {logits[id], id};
  }
  const float top = best[0].logit;
  const double offset = std::isfinite(top) ? top + log_of_sum(logits, vocab, top) : 0.0;
  const auto logprob = [&](float logit) {
    if (!std::isfinite(top)) return logit == top ? 0.0f : kLowest;
    return static_cast<float>(logit - offset);
  };
  out[0] = logprob(logits[chosen]);
  for (uint32_t i = 0; i < num_top; ++i) {
    out[1 + 2 * i] = static_cast<float>(best[i].id);  // exact: ids are below 2^24
    out[2 + 2 * i] = logprob(best[i].logit);
  }
}

}  // namespace blink::cpu
