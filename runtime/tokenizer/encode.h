// Text to ids: the stages between the added tokens and the merges.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bpe.h"
#include "byte_class.h"
#include "nfc.h"
#include "tokenizer.h"
#include "tokenizer_data.h"
#include "word_cache.h"

namespace blink {

// Memory of one thread; kept between requests.
struct EncodeScratch {
  std::vector<TextSplit> raw_splits;
  std::vector<TextSplit> normalized_splits;
  std::string normalized;
  std::string prefixed;
  TextMasks masks;
  NfcScratch nfc;
  MergeScratch merge;
  WordCache words;
};

void encode_with(const TokenizerData& data, std::string_view text, EncodeOptions options,
                 EncodeScratch& scratch, std::vector<uint32_t>& out);

// Appends the ids of one piece by merging alone, without the table of whole pieces.
void merge_piece(const TokenizerData& data, std::string_view piece, MergeScratch& scratch,
                 std::vector<uint32_t>& out);

// The normalized form of `text`: `text` itself, or `buffer`.
std::string_view normalize(NormalizerKind kind, std::string_view text, NfcScratch& scratch,
                           std::string& buffer);

}  // namespace blink
