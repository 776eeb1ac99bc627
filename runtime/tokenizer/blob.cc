#include "blob.h"

#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "tokenizer.h"

namespace blink {
namespace {

static_assert(std::endian::native == std::endian::little, "the blob is read in place");

constexpr uint32_t kMaxTokenBytes = 1u << 16;
constexpr uint32_t kMaxTemplateIds = 64;

[[noreturn]] void fail(const std::string& what) {
  throw TokenizerError("compiled tokenizer: " + what);
}

void require(bool holds, const char* what) {
  if (!holds) fail(what);
}

// Slicing by 8: a plain byte-wise table would take longer than all the rest of loading.
using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c & 1) != 0 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
    tables[0][i] = c;
  }
  for (uint32_t i = 0; i < 256; ++i) {
    for (size_t t = 1; t < 8; ++t) {
      tables[t][i] = tables[0][tables[t - 1][i] & 0xFF] ^ (tables[t - 1][i] >> 8);
    }
  }
  return tables;
}

constexpr CrcTables kCrc = make_crc_tables();

uint32_t crc32(std::span<const std::byte> bytes) {
  uint32_t c = 0xFFFFFFFF;
  size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + i, 8);
    word ^= c;
    c = 0;
    for (size_t k = 0; k < 8; ++k) c ^= kCrc[7 - k][word >> (8 * k) & 0xFF];
  }
  for (; i < bytes.size(); ++i) {
    c = kCrc[0][(c ^ static_cast<uint32_t>(bytes[i])) & 0xFF] ^ (c >> 8);
  }
  return ~c;
}

template <typename T>
std::vector<T> copy_section(std::span<const std::byte> bytes, const BlobHeader& header,
                            BlobSection section, uint64_t count, const char* name) {
  const BlobRange range = header.sections[section];
  if (range.offset % 64 != 0 || range.offset < sizeof(BlobHeader) || range.offset > bytes.size() ||
      range.bytes > bytes.size() - range.offset || range.bytes % sizeof(T) != 0 ||
      range.bytes / sizeof(T) != count) {
    fail(std::string("section ") + name + " has a bad offset or size");
  }
  std::vector<T> values(count);
  if (count != 0) std::memcpy(values.data(), bytes.data() + range.offset, range.bytes);
  return values;
}

BlobHeader read_header(std::span<const std::byte> bytes) {
  require(bytes.size() >= sizeof(BlobHeader), "shorter than its header");
  BlobHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  require(std::memcmp(header.magic, "BLINKTOK", 8) == 0, "not a compiled tokenizer");
  if (header.version != kTokenizerBlobVersion) {
    fail("version " + std::to_string(header.version) + ", this runtime reads version " +
         std::to_string(kTokenizerBlobVersion) + "; compile the bundle again");
  }
  require(header.header_bytes == sizeof(BlobHeader), "header has another size");
  require(header.total_bytes == bytes.size(), "truncated, or with bytes after its end");
  require(header.crc32 == crc32(bytes.subspan(offsetof(BlobHeader, reserved0))),
          "checksum does not match");
  require(header.alphabet < kNumAlphabetKinds, "unknown alphabet kind");
  require(header.pretokenizer < kNumPretokenizerKinds, "unknown pre-tokenizer kind");
  require(header.normalizer < kNumNormalizerKinds, "unknown normalizer kind");
  require((header.flags & ~kAllBlobFlags) == 0, "unknown flags");
  require(header.num_ids <= kMaxIds, "too many ids");
  require(header.num_merges <= kMaxMerges, "too many merges");
  require(header.num_added <= header.num_ids, "more added tokens than ids");
  require(header.num_prefix_ids <= kMaxTemplateIds && header.num_suffix_ids <= kMaxTemplateIds,
          "too many template ids");
  return header;
}

}  // namespace

Blob Blob::read(std::span<const std::byte> bytes) {
  Blob blob;
  const BlobHeader header = blob.header_ = read_header(bytes);
  blob.token_offsets_ = copy_section<uint32_t>(bytes, header, kTokenOffsets,
                                               uint64_t{header.num_ids} + 1, "token_offsets");
  blob.token_bytes_ = copy_section<char>(bytes, header, kTokenBytes,
                                         header.sections[kTokenBytes].bytes, "token_bytes");
  blob.token_flags_ =
      copy_section<uint8_t>(bytes, header, kTokenFlags, header.num_ids, "token_flags");
  blob.merges_ = copy_section<Merge>(bytes, header, kMerges, header.num_merges, "merges");
  blob.byte_ids_ = copy_section<uint32_t>(bytes, header, kByteIds, 256, "byte_ids");
  blob.added_tokens_ =
      copy_section<AddedRecord>(bytes, header, kAddedTokens, header.num_added, "added_tokens");
  blob.added_bytes_ = copy_section<char>(bytes, header, kAddedBytes,
                                         header.sections[kAddedBytes].bytes, "added_bytes");
  blob.template_ids_ = copy_section<uint32_t>(
      bytes, header, kTemplateIds, header.num_prefix_ids + header.num_suffix_ids, "template_ids");
  blob.check_ids();
  return blob;
}

// Every id that encoding or decoding can meet is below num_ids and every range inside its section.
void Blob::check_ids() const {
  const uint32_t num_ids = header_.num_ids;
  require(token_offsets_.front() == 0 && token_offsets_.back() == token_bytes_.size(),
          "token offsets do not cover the token bytes");
  for (uint32_t id = 0; id < num_ids; ++id) {
    const uint32_t begin = token_offsets_[id], end = token_offsets_[id + 1];
    require(begin <= end && end - begin <= kMaxTokenBytes, "token offsets out of order");
    require((token_flags_[id] & kTokenByte) == 0 || end - begin == 1, "byte token without byte");
  }
  for (const Merge& merge : merges_) {
    require(merge.left < num_ids && merge.right < num_ids && merge.merged < num_ids,
            "merge with an id outside the vocabulary");
  }
  for (uint32_t id : byte_ids_) {
    require(id == kNoId || id < num_ids, "byte id outside the vocabulary");
  }
  require(header_.unknown_id == kNoId || header_.unknown_id < num_ids,
          "unknown id outside the vocabulary");
  for (const AddedRecord& record : added_tokens_) {
    require(record.id < num_ids && (record.flags & ~kAllAddedFlags) == 0, "bad added token");
    require(record.content_bytes >= 1 && record.content_bytes <= kMaxTokenBytes &&
                record.content_offset <= added_bytes_.size() &&
                record.content_bytes <= added_bytes_.size() - record.content_offset,
            "added token outside its section");
  }
  for (uint32_t id : template_ids_) require(id < num_ids, "template id outside the vocabulary");
}

}  // namespace blink
