// Sampling of one row of logits: temperature, top_k, top_p, min_p, in this order; counter-based
// random numbers.
//
// Tokens are ranked by logit, largest first, lowest id first among equals. top_k keeps the first k;
// top_p keeps the shortest prefix of what is left whose probability reaches top_p (at least one
// token); min_p drops tokens less likely than min_p times the most likely. The draw inverts the
// distribution over the kept tokens in order of id, with one number that depends on (seed, token
// index) only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "blink/cpu/math.hpp"
#include "blink/step.h"

namespace blink::cpu {

constexpr float kGreedyTemperature = 1e-5f;  // below it, sampling is argmax

// First word of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
inline uint32_t philox4x32(uint64_t key, uint32_t counter) {
  uint32_t c0 = counter, c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// In (0, 1), 24 bits.
inline double uniform(uint64_t seed, uint32_t token_index) {
  return ((philox4x32(seed, token_index) >> 8) + 0.5) * 0x1p-24;
}

struct SampleScratch {
  std::vector<float> probabilities;  // [vocab]
  std::vector<uint32_t> ids;         // [vocab]
};

struct Best {
  int32_t id;  // -1: a logit is NaN
  float logit;
};

// Largest logit, lowest id among equals.
inline Best arg_max(const float* logits, uint32_t vocab) {
  float top = logits[0];
  bool bad = false;
  for (uint32_t i = 0; i < vocab; ++i) {
    top = top < logits[i] ? logits[i] : top;
    bad |= logits[i] != logits[i];
  }
  if (bad) return {-1, 0.0f};
  uint32_t id = 0;
  while (logits[id] != top) ++id;
  return {static_cast<int32_t>(id), top};
}

// Draws in order of id from the tokens that `keep` accepts.
template <typename Keep>
int32_t draw(const float* p, uint32_t vocab, double u, int32_t fallback, Keep keep) {
  double total = 0.0;
  for (uint32_t i = 0; i < vocab; ++i) total += keep(i) ? p[i] : 0.0f;
  const double target = u * total;
  double reached = 0.0;
  int32_t last = fallback;
  for (uint32_t i = 0; i < vocab; ++i) {
    if (!keep(i) || p[i] <= 0.0f) continue;
    reached += p[i];
    last = static_cast<int32_t>(i);
    if (reached > target) break;
  }
  return last;  // rounding may leave target unreached: then the last kept token
}

// Orders as many of `ids` as needed and returns how many the nucleus holds.
template <typename Before>
size_t nucleus_size(std::vector<uint32_t>& ids, size_t count, const float* p, float top_p,
                    Before before) {
  double total = 0.0;
  for (size_t i = 0; i < count; ++i) total += p[ids[i]];
  const double target = static_cast<double>(top_p) * total;
  double reached = 0.0;
  size_t sorted = 0;
  for (size_t step = 64; sorted < count; step *= 4) {
    const size_t end = std::min(count, sorted + step);
    auto first = ids.begin() + static_cast<std::ptrdiff_t>(sorted);
    auto middle = ids.begin() + static_cast<std::ptrdiff_t>(end);
    auto last = ids.begin() + static_cast<std::ptrdiff_t>(count);
    if (middle != last) std::nth_element(first, middle, last, before);
    std::sort(first, middle, before);
    for (; sorted < end; ++sorted) {
      reached += p[ids[sorted]];
      if (reached >= target) return sorted + 1;
    }
  }
  return count;
}

// Samples one row; -1 when its logits hold NaN. `scratch` is the thread's own. No allocation once
// warm. Penalties and logit bias act on the logits before this: adjust_logits.hpp.
inline int32_t sample_row(const float* logits, uint32_t vocab, const blink_sampling_params& params,
                          SampleScratch& scratch) {
  const Best best = arg_max(logits, vocab);
  const bool greedy = !(params.temperature >= kGreedyTemperature);
  if (best.id < 0 || greedy || !std::isfinite(best.logit)) return best.id;

  scratch.probabilities.resize(vocab);
  float* p = scratch.probabilities.data();
  const float top = best.logit;
  for (uint32_t i = 0; i < vocab; ++i) p[i] = exp_f32((logits[i] - top) / params.temperature);

  const float floor = params.min_p > 0.0f ? params.min_p : 0.0f;  // the most likely has p = 1
  const double u = uniform(params.seed, params.token_index);
  const bool cut_k = params.top_k > 0 && params.top_k < vocab;
  const bool cut_p = params.top_p < 1.0f;
  if (!cut_k && !cut_p) {
    return draw(p, vocab, u, best.id, [&](uint32_t i) { return p[i] >= floor; });
  }

  auto before = [&](uint32_t a, uint32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  scratch.ids.resize(vocab);
  for (uint32_t i = 0; i < vocab; ++i) scratch.ids[i] = i;
  size_t count = vocab;
  if (cut_k) {
    count = params.top_k;
    const auto middle = scratch.ids.begin() + static_cast<std::ptrdiff_t>(count);
    std::nth_element(scratch.ids.begin(), middle, scratch.ids.end(), before);
  }
  if (cut_p) count = nucleus_size(scratch.ids, count, p, params.top_p, before);
  const auto kept = scratch.ids.begin() + static_cast<std::ptrdiff_t>(count);
  const uint32_t edge = *std::max_element(scratch.ids.begin(), kept, before);
  return draw(p, vocab, u, best.id, [&](uint32_t i) { return p[i] >= floor && !before(edge, i); });
}

}  // namespace blink::cpu
