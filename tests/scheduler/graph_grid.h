// A random graph table, and the slow look-up that the fast one is compared with.
#ifndef BLINK_TESTS_SCHEDULER_GRAPH_GRID_H
#define BLINK_TESTS_SCHEDULER_GRAPH_GRID_H

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "blink/device/state.cuh"
#include "random_source.h"

namespace blink::testing {

class RandomGraphs {
 public:
  RandomGraphs(RandomSource& random, uint32_t max_prefill_batch, uint32_t max_prefill_tokens,
               uint32_t max_batch, uint32_t max_seqlen) {
    add_kind(random, BLINK_GRAPH_PREFILL, max_prefill_batch, max_prefill_tokens);
    add_kind(random, BLINK_GRAPH_DECODE, max_batch, max_seqlen);
    table_.keys = keys_.data();
    table_.num_keys = static_cast<uint32_t>(keys_.size());
    table_.prefill = build_grid(BLINK_GRAPH_PREFILL);
    table_.decode = build_grid(BLINK_GRAPH_DECODE);
  }

  const GraphTable& table() const { return table_; }

  // The cheapest key that fits: by tokens first for prefill, by rows first for decode.
  uint32_t look_up(uint32_t kind, uint32_t batch, uint32_t seqlen) const {
    uint32_t best = kNone;
    for (uint32_t i = 0; i < keys_.size(); ++i) {
      const GraphKey& key = keys_[i];
      if (key.kind != kind || key.batch < batch || key.seqlen < seqlen) continue;
      if (best == kNone || cost(key) < cost(keys_[best])) best = i;
    }
    return best;
  }

  // Whether the smallest sizes that fit, each for itself, are a key.
  bool has_exact_key(uint32_t kind, uint32_t batch, uint32_t seqlen) const {
    uint32_t least_batch = kNone;
    uint32_t least_seqlen = kNone;
    for (const GraphKey& key : keys_) {
      if (key.kind != kind) continue;
      if (key.batch >= batch) least_batch = std::min(least_batch, key.batch);
      if (key.seqlen >= seqlen) least_seqlen = std::min(least_seqlen, key.seqlen);
    }
    return std::any_of(keys_.begin(), keys_.end(), [&](const GraphKey& key) {
      return key.kind == kind && key.batch == least_batch && key.seqlen == least_seqlen;
    });
  }

 private:
  static std::pair<uint32_t, uint32_t> cost(const GraphKey& key) {
    return key.kind == BLINK_GRAPH_PREFILL ? std::pair(key.seqlen, key.batch)
                                           : std::pair(key.batch, key.seqlen);
  }

  // A few random sizes and the corner, which takes everything.
  void add_kind(RandomSource& random, uint32_t kind, uint32_t max_batch, uint32_t max_seqlen) {
    std::set<std::pair<uint32_t, uint32_t>> sizes{{max_batch, max_seqlen}};
    const uint32_t count = random.below(6);
    for (uint32_t i = 0; i < count; ++i) {
      sizes.insert({random.between(1, max_batch), random.between(1, max_seqlen)});
    }
    for (const auto& [batch, seqlen] : sizes) keys_.push_back(GraphKey{kind, batch, seqlen});
  }

  GraphGrid build_grid(uint32_t kind) {
    std::set<uint32_t> batches;
    std::set<uint32_t> seqlens;
    for (const GraphKey& key : keys_) {
      if (key.kind != kind) continue;
      batches.insert(key.batch);
      seqlens.insert(key.seqlen);
    }
    std::vector<uint16_t>& index = indices_[kind];
    for (uint32_t tokens = 0; tokens <= *seqlens.rbegin(); ++tokens) {
      index.push_back(
          static_cast<uint16_t>(std::distance(seqlens.begin(), seqlens.lower_bound(tokens))));
    }
    std::vector<uint16_t>& lut = luts_[kind];
    for (uint32_t batch = 0; batch <= *batches.rbegin(); ++batch) {
      for (const uint32_t seqlen : seqlens) {
        const uint32_t key = look_up(kind, batch, seqlen);
        const bool is_exact =
            keys_[key].batch == *batches.lower_bound(batch) && keys_[key].seqlen == seqlen;
        lut.push_back(static_cast<uint16_t>(key | (is_exact ? 0 : kOffCacheBit)));
      }
    }
    GraphGrid grid{};
    grid.lut = lut.data();
    grid.seqlen_bucket_index = index.data();
    grid.num_seqlen_buckets = static_cast<uint32_t>(seqlens.size());
    grid.granule_tokens = 1;
    grid.num_granules = static_cast<uint32_t>(index.size());
    grid.max_batch = *batches.rbegin();
    grid.max_seqlen = *seqlens.rbegin();
    return grid;
  }

  std::vector<GraphKey> keys_;
  std::vector<uint16_t> luts_[2];
  std::vector<uint16_t> indices_[2];
  GraphTable table_{};
};

}  // namespace blink::testing

#endif  // BLINK_TESTS_SCHEDULER_GRAPH_GRID_H
