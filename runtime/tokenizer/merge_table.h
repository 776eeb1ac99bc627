// Which pairs of symbols merge, and at which rank: a flat open-addressing table in 64-byte lines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <vector>

#include "blob.h"

namespace blink {

inline constexpr uint32_t kNoMerge = 0xFFFFFFFF;  // greater than every rank

class MergeTable {
 public:
  // `merges` in rank order. Of equal pairs the last one counts, as in the `tokenizers` library.
  MergeTable(std::span<const Merge> merges, std::pmr::memory_resource* memory)
      : lines_(memory), merged_(memory) {
    uint64_t num_slots = kLineSlots;
    while (num_slots * 6 < merges.size() * 10) num_slots *= 2;
    shift_ = 64 - static_cast<uint32_t>(__builtin_ctzll(num_slots));
    slot_mask_ = num_slots - 1;
    lines_.resize(num_slots / kLineSlots);
    merged_.reserve(merges.size());
    for (uint32_t rank = 0; rank < merges.size(); ++rank) {
      const Merge& merge = merges[rank];
      merged_.push_back(merge.merged);
      const uint64_t key = key_of(merge.left, merge.right);
      uint64_t slot = first_slot(key);
      while (entry(slot) != kEmpty && entry(slot) >> kRankBits != key) slot = next(slot);
      entry(slot) = key << kRankBits | rank;
    }
  }

  // Rank of the merge of two symbols, or kNoMerge. At most 60 % of the slots are full, so that a
  // miss ends after about three of the eight slots of a line.
  uint32_t rank(uint32_t left, uint32_t right) const {
    const uint64_t key = key_of(left, right);
    for (uint64_t slot = first_slot(key);; slot = next(slot)) {
      const uint64_t found = entry(slot);
      if (found >> kRankBits == key) return static_cast<uint32_t>(found & ((1u << kRankBits) - 1));
      if (found == kEmpty) return kNoMerge;
    }
  }

  // The symbol that the merge of this rank makes.
  uint32_t merged(uint32_t rank) const { return merged_[rank]; }

 private:
  // An entry is left (20 bits), right (20 bits), rank (24 bits). No entry is all ones, since
  // kMaxIds keeps every id below 2^20 - 1.
  static constexpr uint32_t kRankBits = 24;
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static constexpr uint64_t kLineSlots = 8;

  struct alignas(64) Line {
    Line() { std::fill_n(slots, kLineSlots, kEmpty); }
    uint64_t slots[kLineSlots];
  };

  static uint64_t key_of(uint32_t left, uint32_t right) { return uint64_t{left} << 20 | right; }
  uint64_t first_slot(uint64_t key) const { return key * 0x9E3779B97F4A7C15u >> shift_; }
  uint64_t next(uint64_t slot) const { return (slot + 1) & slot_mask_; }
  uint64_t& entry(uint64_t slot) { return lines_[slot / kLineSlots].slots[slot % kLineSlots]; }
  uint64_t entry(uint64_t slot) const { return lines_[slot / kLineSlots].slots[slot % kLineSlots]; }

  uint64_t slot_mask_ = 0;
  uint32_t shift_ = 0;
  std::pmr::vector<Line> lines_;
  std::pmr::vector<uint32_t> merged_;
};

}  // namespace blink
