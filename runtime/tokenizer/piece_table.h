// Which byte strings are one token as a whole: a flat table for short ones, a chain for long ones.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <string>
#include <string_view>
#include <vector>

#include "blob.h"

namespace blink {

// Bytes of a short string and its length, so that one comparison of two words decides.
struct ShortKey {
  uint64_t low;
  uint64_t high;  // the last byte is the length
  bool operator==(const ShortKey&) const = default;
};

inline constexpr size_t kMaxShortBytes = 15;

// The key of 1 to 15 bytes at `p`. Reads 16 bytes where `readable` says that there are as many.
inline ShortKey short_key(const char* p, size_t num_bytes, size_t readable) {
  ShortKey key{};
  if (readable >= 16) [[likely]] {
    std::memcpy(&key, p, 16);
    const uint32_t low_bits = num_bytes >= 8 ? 64 : static_cast<uint32_t>(num_bytes) * 8;
    const uint32_t high_bits = num_bytes >= 8 ? static_cast<uint32_t>(num_bytes - 8) * 8 : 0;
    key.low &= low_bits == 64 ? ~uint64_t{0} : (uint64_t{1} << low_bits) - 1;
    key.high &= (uint64_t{1} << high_bits) - 1;
  } else {
    std::memcpy(&key, p, num_bytes);
  }
  key.high |= uint64_t{num_bytes} << 56;
  return key;
}

inline uint64_t hash_of(const ShortKey& key) {
  const __uint128_t product =
      static_cast<__uint128_t>(key.low ^ 0x9E3779B97F4A7C15u) * (key.high ^ 0xD6E8FEB86659FD93u);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

class PieceTable {
 public:
  explicit PieceTable(std::pmr::memory_resource* memory)
      : lines_(1, memory), long_heads_(memory), long_pieces_(memory) {}

  // Makes room for `num_pieces` calls of insert; to be called before the first.
  void reserve(size_t num_pieces) {
    uint64_t num_lines = 16;
    while (num_lines < num_pieces) num_lines *= 2;
    line_mask_ = num_lines - 1;
    lines_.resize(num_lines);
    long_heads_.assign(num_lines / 4, kNoId);
  }

  // A string that is there already keeps its first id.
  void insert(std::string_view piece, uint32_t id) {
    if (piece.empty() || find(piece, piece.size()) != kNoId) return;
    if (piece.size() > kMaxShortBytes) {
      const uint32_t head = static_cast<uint32_t>(long_hash(piece) % long_heads_.size());
      long_pieces_.push_back({std::string(piece), id, long_heads_[head]});
      long_heads_[head] = static_cast<uint32_t>(long_pieces_.size() - 1);
      return;
    }
    const ShortKey key = short_key(piece.data(), piece.size(), piece.size());
    uint64_t at = hash_of(key) & line_mask_;
    while (lines_[at].used == kLineEntries) at = (at + 1) & line_mask_;
    Line& line = lines_[at];
    line.keys[line.used] = key;
    line.ids[line.used] = id;
    ++line.used;
  }

  // A short piece on its way through find: its line is fetched while others are looked at.
  struct Probe {
    ShortKey key;
    uint64_t line;
  };

  // For a piece of 1 to kMaxShortBytes bytes of which `readable` may be read from its start.
  Probe start_find(std::string_view piece, size_t readable) const {
    const ShortKey key = short_key(piece.data(), piece.size(), readable);
    const uint64_t line = hash_of(key) & line_mask_;
    __builtin_prefetch(&lines_[line]);
    return {key, line};
  }

  // The id of the probe's piece, or kNoId.
  uint32_t finish_find(const Probe& probe) const {
    for (uint64_t at = probe.line;; at = (at + 1) & line_mask_) {
      const Line& line = lines_[at];
      // Unused entries have length 0, which no key has.
      for (uint32_t i = 0; i < kLineEntries; ++i) {
        if (line.keys[i] == probe.key) return line.ids[i];
      }
      if (line.used < kLineEntries) return kNoId;
    }
  }

  // The id of a piece of any length, or kNoId.
  uint32_t find(std::string_view piece, size_t readable) const {
    if (piece.size() > kMaxShortBytes) return find_long(piece);
    return finish_find(start_find(piece, readable));
  }

 private:
  static constexpr uint32_t kLineEntries = 3;

  struct alignas(64) Line {
    ShortKey keys[kLineEntries] = {};
    uint32_t ids[kLineEntries] = {kNoId, kNoId, kNoId};
    uint32_t used = 0;
  };
  static_assert(sizeof(Line) == 64);

  struct LongPiece {
    std::string bytes;
    uint32_t id;
    uint32_t next;  // in the chain, or kNoId
  };

  // Only the ends and the length are hashed: long pieces of text are mostly not in the vocabulary,
  // and the comparison ends at once.
  static uint64_t long_hash(std::string_view piece) {
    ShortKey ends;
    std::memcpy(&ends.low, piece.data(), 8);
    std::memcpy(&ends.high, piece.data() + piece.size() - 8, 8);
    ends.low += piece.size() * 0x9E3779B97F4A7C15u;
    return hash_of(ends);
  }

  uint32_t find_long(std::string_view piece) const {
    if (long_heads_.empty()) return kNoId;
    uint32_t at = long_heads_[long_hash(piece) % long_heads_.size()];
    while (at != kNoId && long_pieces_[at].bytes != piece) at = long_pieces_[at].next;
    return at == kNoId ? kNoId : long_pieces_[at].id;
  }

  uint64_t line_mask_ = 0;
  std::pmr::vector<Line> lines_;
  std::pmr::vector<uint32_t> long_heads_;
  std::pmr::vector<LongPiece> long_pieces_;
};

}  // namespace blink
