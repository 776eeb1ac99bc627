// A small compiled tokenizer made in C++, so that tests and fuzzers need no file: 256 byte tokens,
// merges over English and Cyrillic bits, and a few added tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "blob.h"

namespace blink::test {

inline uint32_t plain_crc32(std::span<const std::byte> bytes) {
  uint32_t c = 0xFFFFFFFF;
  for (const std::byte byte : bytes) {
    c ^= static_cast<uint32_t>(byte);
    for (int k = 0; k < 8; ++k) c = (c & 1) != 0 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
  }
  return ~c;
}

// Makes size and checksum fit the bytes, so that what comes after them is read.
inline void seal(std::vector<std::byte>& blob) {
  if (blob.size() < sizeof(BlobHeader)) return;
  const uint64_t total_bytes = blob.size();
  std::memcpy(blob.data() + offsetof(BlobHeader, total_bytes), &total_bytes, 8);
  const uint32_t crc = plain_crc32(std::span(blob).subspan(offsetof(BlobHeader, reserved0)));
  std::memcpy(blob.data() + offsetof(BlobHeader, crc32), &crc, 4);
}

struct MiniOptions {
  PretokenizerKind pretokenizer = PretokenizerKind::kLlama3;
  NormalizerKind normalizer = NormalizerKind::kNone;
  AlphabetKind alphabet = AlphabetKind::kBytes;
  uint32_t flags = 0;
};

// Ids 0 to 255 are the bytes; merges follow, then added tokens.
class MiniBlob {
 public:
  explicit MiniBlob(MiniOptions options = {}) : options_(options) {
    const bool characters = options.alphabet == AlphabetKind::kCharacters;
    for (uint32_t b = 0; b < 256; ++b) {
      const uint8_t byte_flag = characters ? uint8_t{kTokenByte} : uint8_t{0};
      add_token(std::string(1, static_cast<char>(b)),
                static_cast<uint8_t>(kTokenExists | kTokenInModel | byte_flag));
      byte_ids_.push_back(b);
    }
    if (characters) {
      for (char c = 'a'; c <= 'z'; ++c) add_token(std::string(1, c), kTokenExists | kTokenInModel);
      add_token("\xE2\x96\x81", kTokenExists | kTokenInModel);
      add_token("\xC3\xA9", kTokenExists | kTokenInModel);
      const uint32_t a = 256, space = 256 + 26;
      merge(a + ('t' - 'a'), a + ('h' - 'a'));
      merge(last(), a + ('e' - 'a'));
      merge(space, last());
      merge(space, space);
    } else {
      merge('t', 'h');
      merge(last(), 'e');
      merge(' ', last());
      merge('a', 'a');
      merge(last(), last());
      merge(last(), last());
      merge(0xD0, 0xB0);
      merge(last(), last());
      merge(' ', ' ');
      merge(last(), last());
      merge(0xF0, 0x9F);
      merge(0x98, 0x80);
    }
    add_added("<|bos|>", kAddedSpecial);
    add_added("<|end|>", kAddedSpecial | kAddedRstrip | kAddedLstrip);
    add_added("<tool>", 0);
    add_added("word", kAddedSingleWord | kAddedNormalized);
  }

  uint32_t last() const { return static_cast<uint32_t>(flags_.size() - 1); }
  uint32_t num_ids() const { return static_cast<uint32_t>(flags_.size()); }
  const std::vector<Merge>& merges() const { return merges_; }

  void merge(uint32_t left, uint32_t right) {
    add_token(tokens_[left] + tokens_[right], kTokenExists | kTokenInModel);
    merges_.push_back({left, right, last()});
  }

  std::vector<std::byte> bytes() const {
    std::vector<uint32_t> offsets{0};
    std::string all;
    for (const std::string& token : tokens_) {
      all += token;
      offsets.push_back(static_cast<uint32_t>(all.size()));
    }
    const std::vector<uint32_t> template_ids{added_[0].id, added_[1].id};
    BlobHeader header{};
    std::memcpy(header.magic, "BLINKTOK", 8);
    header.version = kTokenizerBlobVersion;
    header.header_bytes = sizeof(BlobHeader);
    header.alphabet = static_cast<uint32_t>(options_.alphabet);
    header.pretokenizer = static_cast<uint32_t>(options_.pretokenizer);
    header.normalizer = static_cast<uint32_t>(options_.normalizer);
    header.flags = options_.flags;
    header.num_ids = num_ids();
    header.num_merges = static_cast<uint32_t>(merges_.size());
    header.num_added = static_cast<uint32_t>(added_.size());
    header.num_prefix_ids = 1;
    header.num_suffix_ids = 1;
    header.unknown_id = kNoId;
    std::vector<std::byte> blob(sizeof(BlobHeader));
    const auto append = [&](BlobSection section, const void* data, size_t num_bytes) {
      header.sections[section] = {blob.size(), num_bytes};
      const size_t at = blob.size();
      blob.resize(at + (num_bytes + 63) / 64 * 64);
      if (num_bytes != 0) std::memcpy(blob.data() + at, data, num_bytes);
    };
    append(kTokenOffsets, offsets.data(), offsets.size() * 4);
    append(kTokenBytes, all.data(), all.size());
    append(kTokenFlags, flags_.data(), flags_.size());
    append(kMerges, merges_.data(), merges_.size() * sizeof(Merge));
    append(kByteIds, byte_ids_.data(), byte_ids_.size() * 4);
    append(kAddedTokens, added_.data(), added_.size() * sizeof(AddedRecord));
    append(kAddedBytes, added_bytes_.data(), added_bytes_.size());
    append(kTemplateIds, template_ids.data(), template_ids.size() * 4);
    std::memcpy(blob.data(), &header, sizeof(header));
    seal(blob);
    return blob;
  }

 private:
  void add_token(std::string bytes, uint8_t flags) {
    tokens_.push_back(std::move(bytes));
    flags_.push_back(flags);
  }

  void add_added(const std::string& content, uint32_t flags) {
    const bool special = (flags & kAddedSpecial) != 0;
    add_token(content, static_cast<uint8_t>(kTokenExists | (special ? kTokenSpecial : 0)));
    added_.push_back({last(), flags, static_cast<uint32_t>(added_bytes_.size()),
                      static_cast<uint32_t>(content.size())});
    added_bytes_ += content;
  }

  MiniOptions options_;
  std::vector<std::string> tokens_;
  std::vector<uint8_t> flags_;
  std::vector<Merge> merges_;
  std::vector<uint32_t> byte_ids_;
  std::vector<AddedRecord> added_;
  std::string added_bytes_;
};

// One tokenizer of every kind.
inline std::vector<MiniOptions> all_kinds() {
  std::vector<MiniOptions> kinds;
  for (uint32_t kind = 0; kind < static_cast<uint32_t>(PretokenizerKind::kWhole); ++kind) {
    kinds.push_back({.pretokenizer = static_cast<PretokenizerKind>(kind)});
  }
  kinds.push_back({.pretokenizer = PretokenizerKind::kTekken});
  kinds.push_back({.pretokenizer = PretokenizerKind::kQwen, .normalizer = NormalizerKind::kNfc});
  kinds.push_back({.pretokenizer = PretokenizerKind::kGpt2, .flags = kAddPrefixSpace});
  kinds.push_back({.flags = kIgnoreMerges});
  kinds.push_back({.pretokenizer = PretokenizerKind::kWhole,
                   .normalizer = NormalizerKind::kPrependSpaceToLowBlock,
                   .alphabet = AlphabetKind::kCharacters,
                   .flags = kByteFallback | kFuseUnknown | kStripLeadingSpace});
  kinds.push_back({.pretokenizer = PretokenizerKind::kWhole,
                   .normalizer = NormalizerKind::kSpaceToLowBlock,
                   .alphabet = AlphabetKind::kCharacters,
                   .flags = kByteFallback | kFuseUnknown});
  return kinds;
}

}  // namespace blink::test
