// The part of a CPU model that no model differs in: memory, packed weights, launch. segments.cpp,
// rendered for a bundle, brings the tables and the step.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "blink/abi.h"
#include "blink/cpu/adjust_logits.hpp"
#include "blink/cpu/attention.hpp"
#include "blink/cpu/experts.hpp"
#include "blink/cpu/gemm.hpp"
#include "blink/cpu/logprobs.hpp"
#include "blink/cpu/parallel.hpp"
#include "blink/cpu/sample.hpp"
#include "blink/step.h"

namespace blink::cpu {

struct PackedSpec {
  uint32_t weight;  // index in the manifest
  uint32_t n;
  uint32_t k;
  uint32_t count;   // matrices one after the other: experts
  bool transposed;  // [k, n] instead of [n, k]
};

struct CacheSpec {
  uint32_t num_kv_heads;
  uint32_t head_dim;
};

struct ExpertsSpec {
  uint32_t per_token;
  uint32_t num_experts;
  uint32_t hidden;
  uint32_t intermediate;
};

struct KeySpec {
  uint32_t kind;  // BLINK_GRAPH_*
  uint32_t batch;
  uint32_t seqlen;
};

class Model;
struct Step;

struct ModelSpec {
  uint32_t num_weights;
  uint32_t vocab_size;
  uint32_t max_step_tokens;
  uint32_t max_batch;
  uint32_t max_pages_per_lane;
  uint32_t page_size_tokens;
  uint64_t arena_bytes;
  uint64_t logits_offset_bytes;  // in the arena
  std::span<const PackedSpec> packed;
  std::span<const CacheSpec> caches;
  std::span<const ExpertsSpec> experts;
  std::span<const KeySpec> keys;
  void (*run_step)(Worker&, const Step&);
};

struct FreeDelete {
  void operator()(void* p) const { std::free(p); }
};

// Zeroed memory that the kernel gives page by page, when first touched.
template <typename T>
using ZeroedArray = std::unique_ptr<T[], FreeDelete>;

template <typename T>
ZeroedArray<T> allocate_zeroed(size_t count) {
  void* memory = std::calloc(std::max<size_t>(count, 1), sizeof(T));
  if (!memory) {
    throw std::runtime_error("no memory for " + std::to_string(count) + " values of " +
                             std::to_string(sizeof(T)) + " bytes");
  }
  return ZeroedArray<T>(static_cast<T*>(memory));
}

class Model {
 public:
  Model(const ModelSpec& spec, const void* const* weights, uint32_t num_weights,
        uint32_t num_kv_pages, uint32_t num_threads)
      : spec_(spec), num_pages_(num_kv_pages) {
    if (num_weights != spec.num_weights) {
      throw std::runtime_error("the model has " + std::to_string(spec.num_weights) +
                               " weights, not " + std::to_string(num_weights));
    }
    if (num_kv_pages < 2) throw std::runtime_error("num_kv_pages must be at least 2 (sink + 1)");
    weights_.assign(weights, weights + num_weights);
    if (std::find(weights_.begin(), weights_.end(), nullptr) != weights_.end()) {
      throw std::runtime_error("a weight's address is null");
    }
    team_ = std::make_unique<Team>(num_threads);
    const char* pad = std::getenv("BLINK_CPU_PAD");
    pad_ = pad && std::strcmp(pad, "1") == 0;
    pack_weights();
    allocate_buffers();
  }

  // A thread may still be on its way through the last step: it must be gone before what it looks
  // at.
  ~Model() { team_.reset(); }

  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const blink_step_buffers& buffers() const { return buffers_; }

  const float* logits() const {
    return reinterpret_cast<const float*>(arena_.get() + spec_.logits_offset_bytes);
  }

  // Runs the step in the buffers. No allocation, no lock.
  int launch(uint32_t key_index);

 private:
  friend struct Step;

  void pack_weights() {
    for (const PackedSpec& p : spec_.packed) {
      const float* from = static_cast<const float*>(weights_[p.weight]);
      for (uint32_t i = 0; i < p.count; ++i) {
        const float* matrix = from + size_t{i} * p.n * p.k;
        packed_.push_back(pack_weight(*team_, matrix, p.n, p.k, p.transposed));
      }
    }
  }

  void allocate_buffers() {
    const size_t tokens = spec_.max_step_tokens;
    const size_t batch = spec_.max_batch;
    const uint32_t threads = team_->num_threads();
    arena_ = allocate_bytes(spec_.arena_bytes);
    std::memset(arena_.get(), 0, spec_.arena_bytes);
    for (const CacheSpec& cache : spec_.caches) {
      const size_t line = size_t{spec_.page_size_tokens} * cache.head_dim;
      caches_.push_back(allocate_zeroed<float>(2 * line * cache.num_kv_heads * num_pages_));
    }
    scores_stride_ = size_t{spec_.max_pages_per_lane} * spec_.page_size_tokens + 16;
    scores_ = allocate_zeroed<float>(scores_stride_ * threads);
    for (const ExpertsSpec& e : spec_.experts) {
      experts_.reserve(spec_.max_step_tokens, e.per_token, e.num_experts, e.hidden, e.intermediate);
    }
    adjust_scratch_.resize(threads);
    sample_scratch_.resize(threads);
    for (SampleScratch& scratch : sample_scratch_) {
      scratch.probabilities.resize(spec_.vocab_size);
      scratch.ids.resize(spec_.vocab_size);
    }
    const size_t ints = 3 * tokens + 5 * batch + 1 + (batch + 1) * spec_.max_pages_per_lane;
    ints_ = allocate_zeroed<int32_t>(ints);
    state_ = allocate_zeroed<blink_step_state>(1);
    sampling_ = allocate_zeroed<blink_sampling_params>(batch);
    logprobs_ = allocate_zeroed<float>(batch * kLogprobFloats);
    int32_t* next = ints_.get();
    auto take = [&next](size_t count) { return std::exchange(next, next + count); };
    buffers_ = blink_step_buffers{
        .state = state_.get(),
        .input_ids = take(tokens),
        .positions = take(tokens),
        .token_row = take(tokens),
        .row_query_start = take(batch + 1),
        .row_kv_len = take(batch),
        .row_lane = take(batch),
        .sample_token = take(batch),
        .page_table = take((batch + 1) * spec_.max_pages_per_lane),
        .sampling = sampling_.get(),
        .sampled_ids = take(batch),
        .sampled_logprobs = logprobs_.get(),
        .max_step_tokens = spec_.max_step_tokens,
        .max_batch = spec_.max_batch,
        .max_pages_per_lane = spec_.max_pages_per_lane,
        .page_size_tokens = spec_.page_size_tokens,
    };
  }

  ModelSpec spec_;
  uint32_t num_pages_;
  bool pad_ = false;
  std::vector<const void*> weights_;
  std::unique_ptr<Team> team_;
  std::vector<PackedWeight> packed_;
  AlignedBytes arena_;
  std::vector<ZeroedArray<float>> caches_;
  size_t scores_stride_ = 0;
  ZeroedArray<float> scores_;
  ExpertsScratch experts_;
  std::vector<SampleScratch> sample_scratch_;  // by thread
  std::vector<AdjustScratch> adjust_scratch_;  // by thread; empty until a request needs it
  ZeroedArray<int32_t> ints_;
  ZeroedArray<blink_step_state> state_;
  ZeroedArray<blink_sampling_params> sampling_;
  ZeroedArray<float> logprobs_;
  blink_step_buffers buffers_{};
};

// What a step's kernels see of the model.
struct Step {
  Model& model;
  const blink_step_buffers& buffers;
  uint32_t num_tokens;
  uint32_t num_rows;

  template <typename T>
  T* value(size_t offset_bytes) const {
    return reinterpret_cast<T*>(model.arena_.get() + offset_bytes);
  }
  const float* weight(uint32_t index) const {
    return static_cast<const float*>(model.weights_[index]);
  }
  const PackedWeight* packed(uint32_t index) const { return &model.packed_[index]; }
  float* cache(uint32_t layer) const { return model.caches_[layer].get(); }
  uint32_t num_pages() const { return model.num_pages_; }
  uint32_t vocab_size() const { return model.spec_.vocab_size; }
  AttentionScratch attention_scratch() const { return {model.scores_.get(), model.scores_stride_}; }
  ExpertsScratch& experts_scratch() const { return model.experts_; }
  SampleScratch& sample_scratch(uint32_t thread) const { return model.sample_scratch_[thread]; }
  AdjustScratch& adjust_scratch(uint32_t thread) const { return model.adjust_scratch_[thread]; }
};

inline int Model::launch(uint32_t key_index) {
  const blink_step_state& state = *buffers_.state;
  if (key_index >= spec_.keys.size()) return 1;
  uint32_t num_tokens = state.num_tokens;
  uint32_t num_rows = state.num_rows;
  if (num_tokens > spec_.max_step_tokens || num_rows > spec_.max_batch) return 1;
  if (pad_) {
    const KeySpec& key = spec_.keys[key_index];
    num_rows = std::max(num_rows, std::min(key.batch, spec_.max_batch));
    const uint32_t full = key.kind == BLINK_GRAPH_DECODE ? key.batch : key.seqlen;
    num_tokens = std::max(num_tokens, std::min(full, spec_.max_step_tokens));
  }
  Job job;
  job.run = [](Worker& worker, const uint64_t* words) {
    Model& model = *reinterpret_cast<Model*>(words[0]);
    const Step step{model, model.buffers_, static_cast<uint32_t>(words[1]),
                    static_cast<uint32_t>(words[2])};
    model.spec_.run_step(worker, step);
  };
  job.words[0] = reinterpret_cast<uint64_t>(this);
  job.words[1] = num_tokens;
  job.words[2] = num_rows;
  team_->start(job);
  // release: sampled_ids before it. pairs: whoever polls completion with acquire
  __atomic_store_n(&buffers_.state->completion, state.launch, __ATOMIC_RELEASE);
  return 0;
}

// Rows of a row kernel, shared among the threads: a phase.
template <typename Body>
void run_rows(Worker& worker, uint32_t num_rows, Body&& body) {
  const RowChunks chunks(num_rows, worker.num_threads());
  worker.phase(chunks.count(),
               [&](uint32_t chunk) { body(chunks.begin(chunk), chunks.end(chunk)); });
}

// What a request does not use costs nothing but the look at its flags.
inline void sample_rows(Worker& worker, const Step& step, const float* logits) {
  const uint32_t vocab = step.vocab_size();
  const blink_step_buffers& buffers = step.buffers;
  worker.phase(step.num_rows, [&](uint32_t row) {
    const blink_sampling_params& params = buffers.sampling[row];
    if (!(params.flags & BLINK_SAMPLE_ENABLED)) return;
    const float* own = logits + size_t{row} * vocab;
    const float* sampled = own;
    if (params.flags != BLINK_SAMPLE_ENABLED) {
      sampled = adjust_logits(own, vocab, params, buffers.state->history,
                              step.adjust_scratch(worker.index()));
    }
    const int32_t id = sample_row(sampled, vocab, params, step.sample_scratch(worker.index()));
    buffers.sampled_ids[row] = id;
    if (params.num_logprobs > 0 && id >= 0) {
      write_logprobs(own, vocab, static_cast<uint32_t>(id), params.num_logprobs - 1,
                     buffers.sampled_logprobs + size_t{row} * kLogprobFloats);
    }
  });
}

// Runs the body of an exported function: an exception becomes 1 and a message.
template <typename Body>
int guard(char* error, uint32_t error_bytes, Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    if (error && error_bytes) {
      const size_t length = std::min<size_t>(std::strlen(e.what()), error_bytes - 1);
      std::memcpy(error, e.what(), length);
      error[length] = 0;
    }
    return 1;
  }
}

}  // namespace blink::cpu
