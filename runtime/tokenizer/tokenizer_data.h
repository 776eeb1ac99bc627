// What a loaded tokenizer holds: the checked blob and the tables that are built from it.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <string>
#include <string_view>
#include <vector>

#include "added_tokens.h"
#include "blob.h"
#include "huge_pages.h"
#include "merge_table.h"
#include "piece_table.h"

namespace blink {

// Which pairs of neighbouring characters stand inside some token that merging can make. Between two
// characters that never do, no merge reaches across, so that text may be cut there: pieces as short
// as words instead of one as long as the text, with the same ids.
class JoinedPairs {
 public:
  explicit JoinedPairs(std::pmr::memory_resource* memory)
      : bits_((size_t{1} << kBits) / 64, memory) {}

  void add(uint32_t first, uint32_t second) {
    const uint64_t bit = bit_of(first, second);
    bits_[bit / 64] |= uint64_t{1} << (bit % 64);
  }

  // False only for pairs that were never added; different pairs may share a bit.
  bool may_join(uint32_t first, uint32_t second) const {
    const uint64_t bit = bit_of(first, second);
    return (bits_[bit / 64] >> (bit % 64) & 1) != 0;
  }

 private:
  static constexpr uint32_t kBits = 20;

  static uint64_t bit_of(uint32_t first, uint32_t second) {
    return ((uint64_t{first} << 32 | second) * 0x9E3779B97F4A7C15u) >> (64 - kBits);
  }

  std::pmr::vector<uint64_t> bits_;
};

struct TokenizerData {
  explicit TokenizerData(Blob checked);

  bool characters() const {
    return blob.header().alphabet == static_cast<uint32_t>(AlphabetKind::kCharacters);
  }

  bool exists(uint32_t id) const {
    return id < blob.header().num_ids && (blob.token_flags(id) & kTokenExists) != 0;
  }

  // Bytes that `id` adds to the output; empty for ids outside the vocabulary.
  std::string_view text_of(uint32_t id) const {
    return id < blob.header().num_ids
               ? std::string_view(text_bytes)
                     .substr(text_offsets[id], text_offsets[id + 1] - text_offsets[id])
               : std::string_view();
  }

  const uint64_t serial;  // differs from every other tokenizer of the process; never 0
  Blob blob;
  bool has_all_bytes = false;  // every byte has an id
  // All tables lie in it one behind the other; nothing is freed before the tokenizer is.
  std::pmr::monotonic_buffer_resource memory{HugePages::kPageBytes, &HugePages::instance()};
  MergeTable merges{blob.merges(), &memory};
  // Pieces that encode to one id: with ignore_merges all of the vocabulary, else the tokens that
  // merging their own bytes gives back.
  PieceTable whole_pieces{&memory};
  PieceTable one_character{&memory};  // characters only: the first symbols of merging
  JoinedPairs joined_pairs{&memory};  // characters only
  bool can_cut = false;               // joined_pairs is complete and no state crosses a cut
  // Bytes only: rank of the ids of [first][second] byte.
  std::pmr::vector<uint32_t> byte_pair_ranks{&memory};
  AddedTokenFinder raw_tokens;                       // found before the text is normalized
  AddedTokenFinder normalized_tokens;                // found after
  std::pmr::vector<uint32_t> text_offsets{&memory};  // into text_bytes; one more than ids
  std::pmr::string text_bytes{&memory};              // what decoding gives
};

}  // namespace blink
