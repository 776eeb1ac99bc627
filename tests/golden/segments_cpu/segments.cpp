// Made by blinkc 0.1.0 from templates/segments.cpp.jinja. The CPU target's model: tiny.
// clang-format off
#include <cmath>
#include <cstdint>
#include <memory>

#include "blink/cpu/attention.hpp"
#include "blink/cpu/experts.hpp"
#include "blink/cpu/gemm.hpp"
#include "blink/cpu/math.hpp"
#include "blink/cpu/model.h"
#include "blink/cpu/model.hpp"
#include "blink/cpu/parallel.hpp"
#include "blink/cpu/row_ops.hpp"

namespace blink::cpu {
namespace {

// segment0: 
struct segment0_args {
  const int32_t* x0;
  float* y0;
  float* y1;
  float* y2;
  float* y3;
  float* v0;
  float* v1;
  const float* w0;
  const float* w1;
  const PackedWeight* w2_nk;
};

void segment0_row0(const segment0_args& a, uint32_t begin, uint32_t end) {
  for (size_t row = begin; row < end; ++row) {
    [[maybe_unused]] const int32_t* __restrict x0 = a.x0 + row;
    [[maybe_unused]] float* __restrict y0 = a.y0 + row * 12;
    [[maybe_unused]] float* __restrict v1 = a.v1 + row * 12;
    alignas(32) float t0[12];
    alignas(32) float t1[1];
    alignas(32) float t2[1];
    for (int32_t i0 = 0; i0 < 12; ++i0) {
      const float value = a.w0[int64_t{index_i32(x0[0], 24)} * 12 + i0]; t0[i0] = value; y0[i0] = value;
    }
    {
      SumLanes acc;
      acc.add(12, [&]([[maybe_unused]] int32_t i0) { return (t0[i0] * t0[i0]); });
      t1[0] = acc.result();
    }
    t2[0] = rsqrt_f32(((t1[0] / 1.2e+01f) + 1.0e-06f));
    for (int32_t i0 = 0; i0 < 12; ++i0) {
      v1[i0] = ((t0[i0] * t2[0]) * a.w1[i0]);
    }
  }
}

void segment0_row1(const segment0_args& a, uint32_t begin, uint32_t end) {
  for (size_t row = begin; row < end; ++row) {
    [[maybe_unused]] const float* __restrict v0 = a.v0 + row * 32;
    [[maybe_unused]] float* __restrict y2 = a.y2 + row * 8;
    [[maybe_unused]] float* __restrict y1 = a.y1 + row * 16;
    [[maybe_unused]] float* __restrict y3 = a.y3 + row * 8;
    for (int32_t i0 = 0; i0 < 16; ++i0) {
      y1[i0] = v0[i0];
    }
    for (int32_t i0 = 0; i0 < 8; ++i0) {
      y2[i0] = v0[i0 + 16];
    }
    for (int32_t i0 = 0; i0 < 8; ++i0) {
      y3[i0] = v0[i0 + 24];
    }
  }
}

void run_segment0(Worker& worker, [[maybe_unused]] uint32_t num_tokens,
                            [[maybe_unused]] uint32_t num_rows, const segment0_args& a) {
  run_rows(worker, num_tokens, [&](uint32_t begin, uint32_t end) { segment0_row0(a, begin, end); });
  gemm(worker, num_tokens, a.v1, *a.w2_nk, nullptr, a.v0);
  run_rows(worker, num_tokens, [&](uint32_t begin, uint32_t end) { segment0_row1(a, begin, end); });
}

// segment1: 
struct segment1_args {
  const float* x0;
  const float* x1;
  const int32_t* x2;
  float* y0;
  float* v0;
  float* v1;
  float* v2;
  const PackedWeight* w0_nk;
  const PackedWeight* w1_nk;
};

void segment1_row0(const segment1_args& a, uint32_t begin, uint32_t end) {
  for (size_t row = begin; row < end; ++row) {
    [[maybe_unused]] const float* __restrict x0 = a.x0 + row * 12;
    [[maybe_unused]] const float* __restrict v0 = a.v0 + row * 12;
    [[maybe_unused]] float* __restrict v2 = a.v2 + row * 12;
    for (int32_t i0 = 0; i0 < 12; ++i0) {
      v2[i0] = (x0[i0] + v0[i0]);
    }
  }
}

void segment1_row1(const segment1_args& a, uint32_t begin, uint32_t end) {
  for (size_t row = begin; row < end; ++row) {
    [[maybe_unused]] const int32_t* __restrict x2 = a.x2 + row;
    [[maybe_unused]] const float* __restrict v2 = a.v2 + row * 12;
    [[maybe_unused]] float* __restrict v1 = a.v1 + row * 12;
    for (int32_t i0 = 0; i0 < 12; ++i0) {
      v1[i0] = a.v2[int64_t{x2[0]} * 12 + i0];
    }
  }
}

void run_segment1(Worker& worker, [[maybe_unused]] uint32_t num_tokens,
                            [[maybe_unused]] uint32_t num_rows, const segment1_args& a) {
  gemm(worker, num_tokens, a.x1, *a.w0_nk, nullptr, a.v0);
  run_rows(worker, num_tokens, [&](uint32_t begin, uint32_t end) { segment1_row0(a, begin, end); });
  run_rows(worker, num_rows, [&](uint32_t begin, uint32_t end) { segment1_row1(a, begin, end); });
  gemm(worker, num_rows, a.v1, *a.w1_nk, nullptr, a.y0);
}

void run_step(Worker& worker, const Step& step) {
  run_segment0(worker, step.num_tokens, step.num_rows,
    { .x0 = step.buffers.input_ids, .y0 = step.value<float>(3840), .y1 = step.value<float>(2048), .y2 = step.value<float>(4608), .y3 = step.value<float>(5120), .v0 = step.value<float>(0), .v1 = step.value<float>(3072), .w0 = step.weight(0), .w1 = step.weight(1), .w2_nk = step.packed(0) });
  paged_attention(worker,
    AttentionArgs{ .q = step.value<float>(2048), .k = step.value<float>(4608), .v = step.value<float>(5120), .sinks = nullptr, .out = step.value<float>(0), .cache = step.cache(0), .positions = step.buffers.positions, .token_row = step.buffers.token_row, .row_lane = step.buffers.row_lane, .page_table = step.buffers.page_table, .num_tokens = step.num_tokens, .num_q_heads = 2, .num_kv_heads = 1, .head_dim = 8, .page_size = 4, .max_pages_per_lane = 4, .num_pages = step.num_pages(), .window = 0, .scale = 3.5355338e-01f, .softcap = 0.0e+00f },
    step.attention_scratch());
  run_segment1(worker, step.num_tokens, step.num_rows,
    { .x0 = step.value<float>(3840), .x1 = step.value<float>(0), .x2 = step.buffers.sample_token, .y0 = step.value<float>(2560), .v0 = step.value<float>(1024), .v1 = step.value<float>(2816), .v2 = step.value<float>(1792), .w0_nk = step.packed(1), .w1_nk = step.packed(2) });
  sample_rows(worker, step, step.value<float>(2560));
}

constexpr PackedSpec kPacked[] = {
  { .weight = 2, .n = 32, .k = 12, .count = 1, .transposed = false },
  { .weight = 3, .n = 12, .k = 16, .count = 1, .transposed = false },
  { .weight = 0, .n = 24, .k = 12, .count = 1, .transposed = false },
};

constexpr CacheSpec kCaches[] = {
  { .num_kv_heads = 1, .head_dim = 8 },
};

constexpr std::array<ExpertsSpec, 0> kExperts = { {
} };

constexpr KeySpec kKeys[] = {
  { .kind = 0, .batch = 2, .seqlen = 16 },
  { .kind = 1, .batch = 2, .seqlen = 16 },
};

constexpr ModelSpec kSpec = {
  .num_weights = 4,
  .vocab_size = 24,
  .max_step_tokens = 16,
  .max_batch = 2,
  .max_pages_per_lane = 4,
  .page_size_tokens = 4,
  .arena_bytes = 5632,
  .logits_offset_bytes = 2560,
  .packed = kPacked,
  .caches = kCaches,
  .experts = kExperts,
  .keys = kKeys,
  .run_step = run_step,
};

}  // namespace
}  // namespace blink::cpu

struct blink_cpu_model {
  blink::cpu::Model model;
};

extern "C" int blink_cpu_model_create(const void* const* weights, uint32_t num_weights,
                                      uint32_t num_kv_pages, uint32_t num_threads,
                                      blink_cpu_model** out, char* error, uint32_t error_bytes) {
  return blink::cpu::guard(error, error_bytes, [&] {
    *out = new blink_cpu_model{
        blink::cpu::Model(blink::cpu::kSpec, weights, num_weights, num_kv_pages, num_threads)};
  });
}

extern "C" const blink_step_buffers* blink_cpu_model_buffers(blink_cpu_model* model) {
  return &model->model.buffers();
}

extern "C" int blink_cpu_model_launch(blink_cpu_model* model, uint32_t key_index) {
  return model->model.launch(key_index);
}

extern "C" const float* blink_cpu_model_logits(const blink_cpu_model* model) {
  return model->model.logits();
}

extern "C" void blink_cpu_model_destroy(blink_cpu_model* model) { delete model; }
