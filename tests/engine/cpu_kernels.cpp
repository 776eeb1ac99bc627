// The CPU kernels behind plain C functions, for test_cpu_kernels.py.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "blink/cpu/attention.hpp"
#include "blink/cpu/experts.hpp"
#include "blink/cpu/gemm.hpp"
#include "blink/cpu/math.hpp"
#include "blink/cpu/parallel.hpp"
#include "blink/cpu/adjust_logits.hpp"
#include "blink/cpu/logprobs.hpp"
#include "blink/cpu/sample.hpp"

using namespace blink::cpu;

extern "C" int test_gemm(const float* w, uint32_t n, uint32_t k, int transposed, const float* x,
                         uint32_t rows, const float* bias, uint32_t threads, float* out) {
  Team team(threads);
  const PackedWeight packed = pack_weight(team, w, n, k, transposed != 0);
  auto job = [&](Worker& worker) { gemm(worker, rows, x, packed, bias, out); };
  team.run(job);
  return packed.half ? 1 : 0;
}

struct AttentionSizes {
  uint32_t num_tokens, num_q_heads, num_kv_heads, head_dim, page_size, max_pages, num_pages, window;
  float scale, softcap;
};

extern "C" void test_attention(const AttentionSizes* s, const float* q, const float* k,
                               const float* v, const float* sinks, float* cache,
                               const int32_t* positions, const int32_t* token_row,
                               const int32_t* row_lane, const int32_t* page_table, uint32_t threads,
                               float* out) {
  Team team(threads);
  const size_t stride = size_t{s->max_pages} * s->page_size + 16;
  std::vector<float> scores(stride * team.num_threads());
  const AttentionArgs args{.q = q,
                           .k = k,
                           .v = v,
                           .sinks = sinks,
                           .out = out,
                           .cache = cache,
                           .positions = positions,
                           .token_row = token_row,
                           .row_lane = row_lane,
                           .page_table = page_table,
                           .num_tokens = s->num_tokens,
                           .num_q_heads = s->num_q_heads,
                           .num_kv_heads = s->num_kv_heads,
                           .head_dim = s->head_dim,
                           .page_size = s->page_size,
                           .max_pages_per_lane = s->max_pages,
                           .num_pages = s->num_pages,
                           .window = s->window,
                           .scale = s->scale,
                           .softcap = s->softcap};
  auto job = [&](Worker& worker) { paged_attention(worker, args, {scores.data(), stride}); };
  team.run(job);
}

extern "C" void test_experts(const float* x, const int32_t* ids, const float* weights,
                             const float* gate_up, const float* down, uint32_t tokens,
                             uint32_t hidden, uint32_t middle, uint32_t num_experts,
                             uint32_t per_token, uint32_t activation, uint32_t threads,
                             float* out) {
  Team team(threads);
  std::vector<PackedWeight> first;
  std::vector<PackedWeight> second;
  for (uint32_t e = 0; e < num_experts; ++e) {
    const size_t size = size_t{hidden} * middle;
    first.push_back(pack_weight(team, gate_up + e * 2 * size, 2 * middle, hidden, false));
    second.push_back(pack_weight(team, down + e * size, hidden, middle, false));
  }
  ExpertsScratch scratch;
  scratch.reserve(tokens, per_token, num_experts, hidden, middle);
  const ExpertsArgs args{
      x,      ids,    weights, first.data(), second.data(), out,
      tokens, hidden, middle,  num_experts,  per_token,     static_cast<Activation>(activation)};
  auto job = [&](Worker& worker) { moe_experts(worker, args, scratch); };
  team.run(job);
}

// Samples `count` tokens from one row, with token indices 0 .. count-1.
extern "C" void test_sample(const float* logits, uint32_t vocab, uint64_t seed, float temperature,
                            uint32_t top_k, float top_p, float min_p, uint32_t count,
                            int32_t* out) {
  SampleScratch scratch;
  blink_sampling_params params{};
  params.seed = seed;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.min_p = min_p;
  for (uint32_t i = 0; i < count; ++i) {
    params.token_index = i;
    out[i] = sample_row(logits, vocab, params, scratch);
  }
}

// The logits that slot 0 of a ring with these areas is sampled from. Returns the words of the
// counts that were left behind, which must be none.
extern "C" uint32_t test_adjust(const float* logits, uint32_t vocab,
                                const blink_slot_request* request, const uint32_t* prompt,
                                const unsigned char* records, uint32_t record_bytes,
                                uint32_t token_index, uint32_t flags, float* out) {
  static AdjustScratch scratch;  // used again, as a thread's is
  blink_sampling_params params{};
  params.token_index = token_index;
  params.flags = flags;
  const blink_sampling_history history{request, prompt, records, 0, record_bytes, 0};
  const float* adjusted = adjust_logits(logits, vocab, params, &history, scratch);
  std::copy_n(adjusted, vocab, out);
  return static_cast<uint32_t>(
      scratch.counts.size() -
      static_cast<size_t>(std::count(scratch.counts.begin(), scratch.counts.end(), 0u)));
}

extern "C" void test_logprobs(const float* logits, uint32_t vocab, uint32_t chosen,
                              uint32_t num_top, float* out) {
  write_logprobs(logits, vocab, chosen, num_top, out);
}

extern "C" uint32_t test_philox(uint64_t key, uint32_t counter) { return philox4x32(key, counter); }

extern "C" uint32_t test_usable_cpus() { return usable_cpus(); }

namespace {

// Work that checks itself: a phase must see all of the phase before it, every chunk must run once.
struct TeamWork {
  uint32_t phases;
  uint32_t chunks;
  uint32_t run;  // number of the run, from 1
  std::vector<uint32_t> done;
  std::atomic<uint32_t> wrong{0};
};

void work_on(Worker& worker, TeamWork& w, uint32_t run, uint32_t phases, uint32_t chunks) {
  for (uint32_t p = 0; p < phases; ++p) {
    worker.phase(p % 5 == 4 ? 0 : chunks, [&](uint32_t chunk) {
      if ((p * 31 + chunk * 17 + run) % 101 == 0) {
        std::this_thread::sleep_for(
            std::chrono::microseconds(200));  // as if its core were taken away
      }
      const uint32_t before = p - (p % 5 == 0 && p > 0 ? 2 : 1);
      if (p > 0 && w.done[before * chunks + (chunk + 1) % chunks] != run) w.wrong += 1;
      w.done[p * chunks + chunk] += 1;
    });
  }
}

}  // namespace

// Runs phases of uneven work many times, joined or one after the other; returns how many chunks
// went wrong.
extern "C" uint32_t test_team(uint32_t threads, uint32_t runs, uint32_t phases, uint32_t chunks,
                              int joined) {
  TeamWork work{phases, chunks, 0, std::vector<uint32_t>(size_t{phases} * chunks), {}};
  Team team(threads);
  for (uint32_t run = 1; run <= runs; ++run) {
    work.run = run;
    if (joined) {
      auto callable = [&](Worker& worker) { work_on(worker, work, run, phases, chunks); };
      team.run(callable);
    } else {
      Job job;
      job.run = [](Worker& worker, const uint64_t* words) {
        work_on(worker, *reinterpret_cast<TeamWork*>(words[0]), static_cast<uint32_t>(words[1]),
                static_cast<uint32_t>(words[2]), static_cast<uint32_t>(words[3]));
      };
      job.words[0] = reinterpret_cast<uint64_t>(&work);
      job.words[1] = run;
      job.words[2] = phases;
      job.words[3] = chunks;
      team.start(job);
    }
    for (uint32_t p = 0; p < phases; ++p) {
      for (uint32_t c = 0; c < chunks; ++c)
        work.wrong += p % 5 != 4 && work.done[p * chunks + c] != run;
    }
  }
  return work.wrong;
}

// Starts a team and ends it; 1 and what was said when the system gives fewer threads.
extern "C" int test_start_team(uint32_t threads, char* error, uint32_t error_bytes) {
  try {
    Team team(threads);
    return 0;
  } catch (const std::runtime_error& e) {
    std::strncpy(error, e.what(), error_bytes - 1);
    return 1;
  }
}
