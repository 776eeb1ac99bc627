// The last merged words of a thread: pieces that are more than one token come again and again.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace blink {

class WordCache {
 public:
  static constexpr size_t kMaxBytes = 31;
  static constexpr size_t kMaxIds = 21;

  // Where a piece of at most kMaxBytes bytes is or would be. `serial` names the tokenizer.
  class Place {
   public:
    bool found() const { return found_; }
    std::span<const uint32_t> ids() const { return {entry_->ids, entry_->num_ids}; }

    // Puts the piece there, in place of what was. Longer results are not kept.
    void store(std::span<const uint32_t> ids) {
      if (ids.size() > kMaxIds) return;
      entry_->key = key_;
      entry_->serial = serial_;
      entry_->num_ids = static_cast<uint32_t>(ids.size());
      std::memcpy(entry_->ids, ids.data(), ids.size_bytes());
    }

   private:
    friend class WordCache;
    struct Key {
      uint64_t words[4];  // the bytes, zeros, and the length in the last byte
      bool operator==(const Key&) const = default;
    };
    struct alignas(64) Entry {
      Key key = {};
      uint64_t serial = 0;  // 0: empty
      uint32_t num_ids = 0;
      uint32_t ids[kMaxIds] = {};
    };
    static_assert(sizeof(Entry) == 128);

    Key key_;
    uint64_t serial_;
    Entry* entry_;
    bool found_;
  };

  Place find(uint64_t serial, std::string_view piece) {
    if (entries_.empty()) entries_.resize(kNumEntries);
    Place place;
    place.key_ = {};
    std::memcpy(place.key_.words, piece.data(), piece.size());
    place.key_.words[3] |= uint64_t{piece.size()} << 56;
    place.serial_ = serial;
    const uint64_t* words = place.key_.words;
    uint64_t hash = (words[0] ^ words[3] * kMultiplier) * kMultiplier;
    hash = (hash ^ hash >> 32 ^ words[1]) * kMultiplier;
    hash = (hash ^ hash >> 32 ^ words[2]) * kMultiplier;
    place.entry_ = &entries_[hash >> (64 - kIndexBits)];
    place.found_ = place.entry_->serial == serial && place.entry_->key == place.key_;
    return place;
  }

 private:
  static constexpr uint32_t kIndexBits = 11;
  static constexpr size_t kNumEntries = size_t{1} << kIndexBits;  // 256 KiB a thread
  static constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15u;

  std::vector<Place::Entry> entries_;
};

}  // namespace blink
