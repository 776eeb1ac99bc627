// A model whose next token is a hash of seed and history, read back from paged memory: a lost,
// shared or overwritten page changes the tokens.
#ifndef BLINK_TESTS_SCHEDULER_FAKE_MODEL_H
#define BLINK_TESTS_SCHEDULER_FAKE_MODEL_H

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "blink/device/state.cuh"
#include "blink/step.h"
#include "check.h"

namespace blink::testing {

constexpr int32_t kNanToken = -1;

// The model's next token after `history`; kNanToken where this request's logits are NaN.
inline int32_t next_token(uint64_t seed, uint32_t token_index, const std::vector<uint32_t>& history,
                          uint32_t vocab_size) {
  if (seed % 11 == 0 && token_index == seed / 11 % 5) return kNanToken;
  uint64_t hash = mix64(seed + 1);
  for (const uint32_t token : history) hash = mix64(hash + token + 1);
  return static_cast<int32_t>(hash % vocab_size);
}

class FakeModel {
 public:
  FakeModel(const GraphTable& graphs, uint32_t max_step_tokens, uint32_t max_batch,
            uint32_t max_pages_per_lane, uint32_t page_size_tokens, uint32_t num_kv_pages,
            uint32_t vocab_size)
      : graphs_(graphs),
        vocab_size_(vocab_size),
        input_ids_(max_step_tokens),
        positions_(max_step_tokens),
        token_row_(max_step_tokens),
        row_query_start_(max_batch + 1),
        row_kv_len_(max_batch),
        row_lane_(max_batch),
        sample_token_(max_batch),
        page_table_((max_batch + 1) * max_pages_per_lane),
        sampling_(max_batch),
        sampled_ids_(max_batch),
        cache_((num_kv_pages + 1) * page_size_tokens) {
    buffers_.state = &state_;
    buffers_.input_ids = input_ids_.data();
    buffers_.positions = positions_.data();
    buffers_.token_row = token_row_.data();
    buffers_.row_query_start = row_query_start_.data();
    buffers_.row_kv_len = row_kv_len_.data();
    buffers_.row_lane = row_lane_.data();
    buffers_.sample_token = sample_token_.data();
    buffers_.page_table = page_table_.data();
    buffers_.sampling = sampling_.data();
    buffers_.sampled_ids = sampled_ids_.data();
    buffers_.max_step_tokens = max_step_tokens;
    buffers_.max_batch = max_batch;
    buffers_.max_pages_per_lane = max_pages_per_lane;
    buffers_.page_size_tokens = page_size_tokens;
  }

  const blink_step_buffers& buffers() const { return buffers_; }

  // Garbage in every input but the page table: what the scheduler forgets to fill shows.
  void poison_inputs() {
    constexpr int32_t kPoison = 0x5EAD5EAD;
    for (auto* values : {&input_ids_, &positions_, &token_row_, &row_query_start_, &row_kv_len_,
                         &row_lane_, &sample_token_}) {
      std::fill(values->begin(), values->end(), kPoison);
    }
    for (blink_sampling_params& params : sampling_) {
      params.flags = ~0u;
      params.seed = ~uint64_t{0};
    }
  }

  // Runs the graph of a key at its full size, padding included.
  void run(uint32_t key_index) {
    const GraphKey& key = graphs_.keys[key_index];
    const uint32_t num_tokens = key.kind == BLINK_GRAPH_PREFILL ? key.seqlen : key.batch;
    BLINK_CHECK(state_.num_rows <= key.batch && state_.num_tokens <= num_tokens, "step > key");
    BLINK_CHECK(state_.kind == key.kind && state_.key_index == key_index,
                "state names another key");
    std::fill(sampled_ids_.begin(), sampled_ids_.end(),
              0);  // rows that sample nothing leave garbage
    for (uint32_t token = 0; token < num_tokens; ++token) append(token);
    BLINK_CHECK(row_query_start_[0] == 0, "first row does not start at token 0");
    for (uint32_t row = 0; row < key.batch; ++row) sample(row);
    BLINK_CHECK(row_query_start_[key.batch] == static_cast<int32_t>(state_.num_tokens),
                "rows do not end at num_tokens");
    state_.completion = state_.launch;
  }

 private:
  struct Entry {
    uint32_t token;
    uint32_t position;
    uint64_t launch;  // of the step that wrote it; 0: never
  };

  Entry& entry(uint32_t lane, uint32_t position) {
    const uint32_t page_size = buffers_.page_size_tokens;
    BLINK_CHECK(position / page_size < buffers_.max_pages_per_lane, "position past the page table");
    const int32_t page = page_table_[lane * buffers_.max_pages_per_lane + position / page_size];
    BLINK_CHECK(page >= 0 && page * page_size < cache_.size(), "page out of range");
    return cache_[static_cast<uint32_t>(page) * page_size + position % page_size];
  }

  void append(uint32_t token) {
    const int32_t row = token_row_[token];
    if (row < 0) {
      BLINK_CHECK(token >= state_.num_tokens, "padding token among real ones");
      return;
    }
    BLINK_CHECK(token < state_.num_tokens, "real token among padding");
    const uint32_t lane = static_cast<uint32_t>(row_lane_[row]);
    const uint32_t position = static_cast<uint32_t>(positions_[token]);
    BLINK_CHECK(token >= static_cast<uint32_t>(row_query_start_[row]) &&
                    token < static_cast<uint32_t>(row_query_start_[row + 1]),
                "token outside its row");
    BLINK_CHECK(
        page_table_[lane * buffers_.max_pages_per_lane + position / buffers_.page_size_tokens] != 0,
        "a real token goes to the sink page");
    entry(lane, position) =
        Entry{static_cast<uint32_t>(input_ids_[token]), position, state_.launch};
  }

  void sample(uint32_t row) {
    const blink_sampling_params& params = sampling_[row];
    if (row >= state_.num_rows) {
      BLINK_CHECK(row_kv_len_[row] == 0 && params.flags == 0 && sample_token_[row] == 0,
                  "padding row is not empty");
      BLINK_CHECK(row_lane_[row] == static_cast<int32_t>(buffers_.max_batch),
                  "padding row outside the sink lane");
      BLINK_CHECK(row_query_start_[row] == static_cast<int32_t>(state_.num_tokens),
                  "padding row has tokens");
      return;
    }
    const uint32_t kv_len = static_cast<uint32_t>(row_kv_len_[row]);
    const uint32_t lane = static_cast<uint32_t>(row_lane_[row]);
    const int32_t num_new = row_query_start_[row + 1] - row_query_start_[row];
    BLINK_CHECK(num_new >= 1, "a real row has no token");
    BLINK_CHECK(lane < buffers_.max_batch, "a real row in the sink lane");
    std::vector<uint32_t> history;
    for (uint32_t position = 0; position < kv_len; ++position) {
      const Entry& cached = entry(lane, position);
      BLINK_CHECK(cached.launch != 0 && cached.position == position,
                  "cache holds another position at " + std::to_string(position));
      history.push_back(cached.token);
    }
    BLINK_CHECK(sample_token_[row] == row_query_start_[row + 1] - 1, "samples another token");
    BLINK_CHECK(positions_[sample_token_[row]] == static_cast<int32_t>(kv_len) - 1,
                "last token is not at the end of the cache");
    if ((params.flags & BLINK_SAMPLE_ENABLED) == 0) return;
    sampled_ids_[row] = next_token(params.seed, params.token_index, history, vocab_size_);
  }

  const GraphTable& graphs_;
  uint32_t vocab_size_;
  blink_step_state state_{};
  std::vector<int32_t> input_ids_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> token_row_;
  std::vector<int32_t> row_query_start_;
  std::vector<int32_t> row_kv_len_;
  std::vector<int32_t> row_lane_;
  std::vector<int32_t> sample_token_;
  std::vector<int32_t> page_table_;
  std::vector<blink_sampling_params> sampling_;
  std::vector<int32_t> sampled_ids_;
  std::vector<Entry> cache_;
  blink_step_buffers buffers_{};
};

}  // namespace blink::testing

#endif  // BLINK_TESTS_SCHEDULER_FAKE_MODEL_H
