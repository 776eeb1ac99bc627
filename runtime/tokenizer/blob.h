// The compiled tokenizer on disk; written by blinkc/bundle/compile_tokenizer.py, little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace blink {

inline constexpr uint32_t kTokenizerBlobVersion = 1;
inline constexpr uint32_t kNoId = 0xFFFFFFFF;
inline constexpr uint32_t kMaxIds = (1u << 20) - 1;  // an id fits 20 bits of a merge key
inline constexpr uint32_t kMaxMerges = 1u << 24;     // a rank fits 24 bits of a merge entry

enum class PretokenizerKind : uint32_t {
  kGpt2 = 0,
  kDigitsGpt2 = 1,  // every digit alone, then GPT-2's pattern
  kLlama3 = 2,      // numbers in threes
  kQwen = 3,        // Llama-3's with single digits
  kO200k = 4,
  kDeepSeekV3 = 5,
  kWhole = 6,   // the text between added tokens is one piece
  kTekken = 7,  // o200k's without contractions, with single digits
};
inline constexpr uint32_t kNumPretokenizerKinds = 8;

enum class NormalizerKind : uint32_t {
  kNone = 0,
  kNfc = 1,
  kSpaceToLowBlock = 2,         // ' ' becomes U+2581
  kPrependSpaceToLowBlock = 3,  // after a U+2581 in front, where there is any text
};
inline constexpr uint32_t kNumNormalizerKinds = 4;

enum class AlphabetKind : uint32_t {
  kBytes = 0,       // byte-level BPE: symbols start as bytes
  kCharacters = 1,  // SentencePiece BPE: symbols start as characters, unknown ones as <0xNN>
};
inline constexpr uint32_t kNumAlphabetKinds = 2;

enum BlobFlag : uint32_t {
  kIgnoreMerges = 1 << 0,    // a piece that is in the vocabulary is not split
  kAddPrefixSpace = 1 << 1,  // each text between added tokens starts with a space
  kFuseUnknown = 1 << 2,     // neighbouring unknown symbols give one unknown id
  kByteFallback = 1 << 3,
  kStripLeadingSpace = 1 << 4,  // of all that is decoded
};
inline constexpr uint32_t kAllBlobFlags = (1 << 5) - 1;

enum TokenFlag : uint8_t {
  kTokenExists = 1 << 0,
  kTokenSpecial = 1 << 1,
  kTokenInModel = 1 << 2,  // its bytes can come out of a merge
  kTokenByte = 1 << 3,     // <0xNN>; the bytes of the entry hold the one byte
};

enum AddedFlag : uint32_t {
  kAddedSpecial = 1 << 0,
  kAddedLstrip = 1 << 1,
  kAddedRstrip = 1 << 2,
  kAddedSingleWord = 1 << 3,
  kAddedNormalized = 1 << 4,
};
inline constexpr uint32_t kAllAddedFlags = (1 << 5) - 1;

enum BlobSection : uint32_t {
  kTokenOffsets = 0,  // uint32[num_ids + 1], into kTokenBytes
  kTokenBytes = 1,
  kTokenFlags = 2,   // uint8[num_ids]
  kMerges = 3,       // Merge[num_merges] in rank order
  kByteIds = 4,      // uint32[256]: the id of each byte, or kNoId
  kAddedTokens = 5,  // AddedRecord[num_added], special ones first: on a tie the first one wins
  kAddedBytes = 6,
  kTemplateIds = 7,  // uint32[num_prefix_ids + num_suffix_ids]
};
inline constexpr uint32_t kNumBlobSections = 8;

struct BlobRange {
  uint64_t offset;  // bytes from the start of the blob, a multiple of 64
  uint64_t bytes;
};

struct BlobHeader {
  char magic[8];                         // "BLINKTOK"
  uint32_t version;                      // kTokenizerBlobVersion
  uint32_t header_bytes;                 // sizeof(BlobHeader)
  uint64_t total_bytes;                  // of the blob
  uint32_t crc32;                        // of everything from `reserved0` to the end
  uint32_t reserved0;                    // 0
  uint32_t alphabet;                     // AlphabetKind
  uint32_t pretokenizer;                 // PretokenizerKind
  uint32_t normalizer;                   // NormalizerKind
  uint32_t flags;                        // BlobFlag bits
  uint32_t num_ids;                      // one more than the greatest id
  uint32_t num_merges;                   // merges
  uint32_t num_added;                    // added tokens
  uint32_t num_prefix_ids;               // before the text
  uint32_t num_suffix_ids;               // after the text
  uint32_t unknown_id;                   // for symbols outside the vocabulary, or kNoId
  BlobRange sections[kNumBlobSections];  // by BlobSection
  uint64_t reserved1[7];                 // 0
};
static_assert(sizeof(BlobHeader) == 256);
static_assert(offsetof(BlobHeader, sections) == 72);

struct Merge {
  uint32_t left;
  uint32_t right;
  uint32_t merged;
};
static_assert(sizeof(Merge) == 12);

struct AddedRecord {
  uint32_t id;
  uint32_t flags;           // AddedFlag bits
  uint32_t content_offset;  // into kAddedBytes
  uint32_t content_bytes;   // at least 1
};
static_assert(sizeof(AddedRecord) == 16);

// A blob whose every count, range, id and offset has been checked; owns a copy of the bytes.
class Blob {
 public:
  // Throws TokenizerError that names the field.
  static Blob read(std::span<const std::byte> bytes);

  const BlobHeader& header() const { return header_; }
  std::span<const uint32_t> token_offsets() const { return token_offsets_; }
  std::span<const Merge> merges() const { return merges_; }
  std::span<const uint32_t> byte_ids() const { return byte_ids_; }
  std::span<const AddedRecord> added_tokens() const { return added_tokens_; }
  std::span<const uint32_t> prefix_ids() const {
    return std::span(template_ids_).first(header_.num_prefix_ids);
  }
  std::span<const uint32_t> suffix_ids() const {
    return std::span(template_ids_).subspan(header_.num_prefix_ids);
  }
  bool has_flag(BlobFlag flag) const { return (header_.flags & flag) != 0; }
  uint8_t token_flags(uint32_t id) const { return token_flags_[id]; }
  size_t num_token_bytes() const { return token_bytes_.size(); }  // of all ids
  std::string_view token_bytes(uint32_t id) const {
    return std::string_view(token_bytes_.data(), token_bytes_.size())
        .substr(token_offsets_[id], token_offsets_[id + 1] - token_offsets_[id]);
  }
  std::string_view added_content(const AddedRecord& record) const {
    return std::string_view(added_bytes_.data(), added_bytes_.size())
        .substr(record.content_offset, record.content_bytes);
  }

 private:
  Blob() = default;
  void check_ids() const;

  BlobHeader header_{};
  std::vector<uint32_t> token_offsets_;
  std::vector<char> token_bytes_;
  std::vector<uint8_t> token_flags_;
  std::vector<Merge> merges_;
  std::vector<uint32_t> byte_ids_;
  std::vector<AddedRecord> added_tokens_;
  std::vector<char> added_bytes_;
  std::vector<uint32_t> template_ids_;
};

}  // namespace blink
