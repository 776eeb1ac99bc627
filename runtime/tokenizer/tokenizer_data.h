// What a loaded tokenizer holds: the checked blob and the tables that are built from it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "added_tokens.h"
#include "blob.h"
#include "merge_table.h"
#include "piece_table.h"

namespace blink {

struct TokenizerData {
  explicit TokenizerData(Blob checked);

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
  MergeTable merges;
  // Pieces that encode to one id: with ignore_merges all of the vocabulary, else the tokens that
  // merging their own bytes gives back.
  PieceTable whole_pieces;
  PieceTable vocabulary;                  // characters only: the first symbols of merging
  std::vector<uint32_t> byte_pair_ranks;  // bytes only: rank of the ids of [first][second] byte
  AddedTokenFinder raw_tokens;            // found before the text is normalized
  AddedTokenFinder normalized_tokens;     // found after
  std::vector<uint32_t> text_offsets;     // into text_bytes; one more than ids
  std::string text_bytes;                 // what decoding gives
};

}  // namespace blink
