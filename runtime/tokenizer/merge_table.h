// Which pairs of symbols merge, and at which rank: a flat open-addressing table in 64-byte lines.
#pragma once

#include <cstdint>
#include <span>

#include "aligned_array.h"
#include "blob.h"

namespace blink {

inline constexpr uint32_t kNoMerge = 0xFFFFFFFF;  // greater than every rank

class MergeTable {
 public:
  MergeTable() = default;

  // `merges` in rank order. Of equal pairs the last one counts, as in the `tokenizers` library.
  explicit MergeTable(std::span<const Merge> merges) {
    while (num_slots_ * 6 < merges.size() * 10) num_slots_ *= 2;
    shift_ = 64 - static_cast<uint32_t>(__builtin_ctzll(num_slots_));
    slots_ = AlignedArray<uint64_t>(num_slots_, kEmpty);
    merged_ = AlignedArray<uint32_t>(merges.size(), 0);
    for (uint32_t rank = 0; rank < merges.size(); ++rank) {
      const Merge& merge = merges[rank];
      merged_[rank] = merge.merged;
      const uint64_t key = key_of(merge.left, merge.right);
      uint64_t slot = first_slot(key);
      while (slots_[slot] != kEmpty && slots_[slot] >> kRankBits != key) slot = next(slot);
      slots_[slot] = key << kRankBits | rank;
    }
  }

  // Rank of the merge of two symbols, or kNoMerge. At most 60 % of the slots are full, so that a
  // miss ends after about three of the eight slots of a line.
  uint32_t rank(uint32_t left, uint32_t right) const {
    const uint64_t key = key_of(left, right);
    for (uint64_t slot = first_slot(key);; slot = next(slot)) {
      const uint64_t entry = slots_[slot];
      if (entry >> kRankBits == key) return static_cast<uint32_t>(entry & ((1u << kRankBits) - 1));
      if (entry == kEmpty) return kNoMerge;
    }
  }

  // The symbol that the merge of this rank makes.
  uint32_t merged(uint32_t rank) const { return merged_[rank]; }

 private:
  // An entry is left (20 bits), right (20 bits), rank (24 bits). No entry is all ones, since
  // kMaxIds keeps every id below 2^20 - 1.
  static constexpr uint32_t kRankBits = 24;
  static constexpr uint64_t kEmpty = ~uint64_t{0};

  static uint64_t key_of(uint32_t left, uint32_t right) { return uint64_t{left} << 20 | right; }
  uint64_t first_slot(uint64_t key) const { return key * 0x9E3779B97F4A7C15u >> shift_; }
  uint64_t next(uint64_t slot) const { return (slot + 1) & (num_slots_ - 1); }

  uint64_t num_slots_ = 64;
  uint32_t shift_ = 58;
  AlignedArray<uint64_t> slots_{64, kEmpty};
  AlignedArray<uint32_t> merged_;
};

}  // namespace blink
