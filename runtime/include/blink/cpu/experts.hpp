// Mixture of experts: rows are grouped by expert, each expert's weights are streamed once, and each
// token adds its experts' results in the order its routing gave them.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "blink/cpu/gemm.hpp"
#include "blink/cpu/math.hpp"
#include "blink/cpu/parallel.hpp"

namespace blink::cpu {

enum class Activation : uint32_t { kSilu, kGelu, kGeluTanh };

inline float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu:
      return x * sigmoid_f32(x);
    case Activation::kGelu:
      return 0.5f * x * (1.0f + erf_f32(x * 0.70710678118654752f));
    case Activation::kGeluTanh:
      return 0.5f * x * (1.0f + tanh_f32(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  }
  return x;
}

struct ExpertsArgs {
  const float* x;               // [num_tokens, hidden]
  const int32_t* ids;           // [num_tokens, per_token]; num_experts or more: no expert (padding)
  const float* weights;         // [num_tokens, per_token]
  const PackedWeight* gate_up;  // [num_experts], each [2 * intermediate, hidden]
  const PackedWeight* down;     // [num_experts], each [hidden, intermediate]
  float* out;                   // [num_tokens, hidden]
  uint32_t num_tokens;
  uint32_t hidden;
  uint32_t intermediate;
  uint32_t num_experts;
  uint32_t per_token;
  Activation activation;
};

// Sized once for the largest step of any experts layer.
struct ExpertsScratch {
  std::vector<uint32_t> begin;   // [num_experts + 1] first grouped row of each expert
  std::vector<uint32_t> source;  // [tokens * per_token] token of each grouped row
  std::vector<uint32_t> place;   // [tokens * per_token] grouped row of each choice; ~0: none
  std::vector<float> x;          // [tokens * per_token, hidden]
  std::vector<float> gate_up;    // [tokens * per_token, 2 * intermediate]
  std::vector<float> middle;     // [tokens * per_token, intermediate]
  std::vector<float> y;          // [tokens * per_token, hidden]

  void reserve(uint32_t tokens, uint32_t per_token, uint32_t num_experts, uint32_t hidden,
               uint32_t intermediate) {
    const size_t rows = size_t{tokens} * per_token;
    auto grow = [](auto& v, size_t size) {
      if (v.size() < size) v.resize(size);
    };
    grow(begin, num_experts + 1);
    grow(source, rows);
    grow(place, rows);
    grow(x, rows * hidden);
    grow(gate_up, rows * 2 * intermediate);
    grow(middle, rows * intermediate);
    grow(y, rows * hidden);
  }
};

inline void group_by_expert(const ExpertsArgs& a, ExpertsScratch& s) {
  const uint32_t choices = a.num_tokens * a.per_token;
  std::fill_n(s.begin.begin(), a.num_experts + 1, 0u);
  auto chosen = [&](uint32_t i) {
    return static_cast<uint32_t>(a.ids[i]);
  };  // negative: past the end
  for (uint32_t i = 0; i < choices; ++i) {
    if (chosen(i) < a.num_experts) s.begin[chosen(i) + 1] += 1;
  }
  for (uint32_t e = 0; e < a.num_experts; ++e) s.begin[e + 1] += s.begin[e];
  for (uint32_t i = 0; i < choices; ++i) {
    if (chosen(i) >= a.num_experts) {
      s.place[i] = ~0u;
      continue;
    }
    const uint32_t row = s.begin[chosen(i)]++;
    s.place[i] = row;
    s.source[row] = i / a.per_token;
  }
  for (uint32_t e = a.num_experts; e > 0; --e) s.begin[e] = s.begin[e - 1];
  s.begin[0] = 0;
}

// One product for every expert that has rows: a phase over (expert, chunk of strips).
inline void grouped_gemm(Worker& worker, const ExpertsArgs& a, const ExpertsScratch& s,
                         const PackedWeight* weights, const float* x, float* out) {
  const uint32_t strips = weights[0].num_strips();
  const uint32_t size = std::min(strips, 24u);
  const uint32_t across = (strips + size - 1) / size;
  worker.phase(a.num_experts * across, [&](uint32_t chunk) {
    const uint32_t expert = chunk / across;
    const uint32_t rows = s.begin[expert + 1] - s.begin[expert];
    if (rows == 0) return;
    const uint32_t strip = chunk % across * size;
    const PackedWeight& w = weights[expert];
    const GemmArgs g{w, x + size_t{s.begin[expert]} * w.k, out + size_t{s.begin[expert]} * w.n,
                     nullptr};
    gemm_strips(g, 0, rows, strip, std::min(strips, strip + size));
  });
}

inline void combine_experts(const ExpertsArgs& a, const ExpertsScratch& s, uint32_t token) {
  float* out = a.out + size_t{token} * a.hidden;
  std::memset(out, 0, a.hidden * sizeof(float));
  for (uint32_t j = 0; j < a.per_token; ++j) {
    const uint32_t row = s.place[token * a.per_token + j];
    if (row == ~0u) continue;
    const float weight = a.weights[token * a.per_token + j];
    const float* y = s.y.data() + size_t{row} * a.hidden;
    for (uint32_t i = 0; i < a.hidden; ++i) out[i] += weight * y[i];
  }
}

inline void moe_experts(Worker& worker, const ExpertsArgs& a, ExpertsScratch& s) {
  worker.phase(1, [&](uint32_t) { group_by_expert(a, s); });
  // Phases are cut by what the step may hold, never by what was counted: a thread that comes late
  // must cut them alike. The rows past the last grouped one are left out inside.
  const RowChunks grouped(a.num_tokens * a.per_token, worker.num_threads());
  const auto end_of = [&](uint32_t chunk) {
    return std::min(grouped.end(chunk), s.begin[a.num_experts]);
  };
  worker.phase(grouped.count(), [&](uint32_t chunk) {
    for (uint32_t i = grouped.begin(chunk); i < end_of(chunk); ++i) {
      std::memcpy(s.x.data() + size_t{i} * a.hidden, a.x + size_t{s.source[i]} * a.hidden,
                  a.hidden * sizeof(float));
    }
  });
  grouped_gemm(worker, a, s, a.gate_up, s.x.data(), s.gate_up.data());
  worker.phase(grouped.count(), [&](uint32_t chunk) {
    for (uint32_t i = grouped.begin(chunk); i < end_of(chunk); ++i) {
      const float* gate = s.gate_up.data() + size_t{i} * 2 * a.intermediate;
      const float* up = gate + a.intermediate;
      float* middle = s.middle.data() + size_t{i} * a.intermediate;
      for (uint32_t c = 0; c < a.intermediate; ++c) {
        middle[c] = activate(a.activation, gate[c]) * up[c];
      }
    }
  });
  grouped_gemm(worker, a, s, a.down, s.middle.data(), s.y.data());
  const RowChunks tokens(a.num_tokens, worker.num_threads());
  worker.phase(tokens.count(), [&](uint32_t chunk) {
    for (uint32_t t = tokens.begin(chunk); t < tokens.end(chunk); ++t) combine_experts(a, s, t);
  });
}

}  // namespace blink::cpu
