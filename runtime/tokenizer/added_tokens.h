// Finds added tokens in text, as the `tokenizers` library does: leftmost, then longest.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "blob.h"

namespace blink {

// A part of a text: an added token, or what lies between two of them.
struct TextSplit {
  size_t begin;
  size_t end;
  uint32_t id;  // kNoId for text
};

class AddedTokenFinder {
 public:
  struct Pattern {
    std::string content;
    uint32_t id;
    uint32_t flags;  // AddedFlag bits
  };

  AddedTokenFinder() = default;

  // Of equal contents the first one counts.
  explicit AddedTokenFinder(std::vector<Pattern> patterns);

  bool empty() const { return patterns_.empty(); }

  // Fills `splits` with what covers `text`, in order. Tokens that are special count as text where
  // `parse_special` is off. Time: text bytes times the longest content at worst.
  void find(std::string_view text, bool parse_special, std::vector<TextSplit>& splits) const;

 private:
  struct Node {
    uint32_t first_edge;
    uint32_t num_edges;
    uint32_t pattern;  // that ends here, or kNoId
  };
  struct Edge {
    uint8_t byte;
    uint32_t node;
  };
  struct Match {
    uint32_t pattern;  // kNoId if none
    size_t end;
  };

  uint32_t build(std::span<const uint32_t> order, size_t depth);
  Match longest_at(std::string_view text, size_t at) const;
  size_t next_start(std::string_view text, size_t at) const;

  std::vector<Pattern> patterns_;
  std::vector<Node> nodes_;
  std::vector<Edge> edges_;
  std::array<uint32_t, 256> roots_{};  // node after a first byte, or kNoId
  int only_first_byte_ = -1;           // if all contents start with the same byte
};

}  // namespace blink
