#include "tokenizer.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "encode.h"
#include "tokenizer_data.h"
#include "unicode.h"

namespace blink {
namespace {

constexpr std::string_view kLowBlock = "\xE2\x96\x81";

// A thread that once tokenized a huge text does not keep the memory for it.
constexpr size_t kMaxKeptBytes = size_t{4} << 20;

uint64_t next_serial() {
  static std::atomic<uint64_t> serial{0};
  // Relaxed: only that no two are equal matters.
  return serial.fetch_add(1, std::memory_order_relaxed) + 1;
}

EncodeScratch& thread_scratch() {
  thread_local EncodeScratch scratch;
  return scratch;
}

void trim(EncodeScratch& scratch, size_t text_bytes) {
  // Per byte of text the scratch holds at most about 64 bytes.
  if (text_bytes > kMaxKeptBytes / 64) scratch = EncodeScratch();
}

AddedTokenFinder make_finder(const Blob& blob, bool normalized) {
  std::vector<AddedTokenFinder::Pattern> patterns;
  const auto normalizer = static_cast<NormalizerKind>(blob.header().normalizer);
  NfcScratch scratch;
  std::string buffer;
  for (const AddedRecord& record : blob.added_tokens()) {
    if (((record.flags & kAddedNormalized) != 0) != normalized) continue;
    const std::string_view content = blob.added_content(record);
    const std::string_view text =
        normalized ? normalize(normalizer, content, scratch, buffer) : content;
    patterns.push_back({std::string(text), record.id, record.flags});
  }
  return AddedTokenFinder(std::move(patterns));
}

void fill_texts(TokenizerData& data) {
  const Blob& blob = data.blob;
  const bool characters = data.characters();
  data.text_offsets.reserve(size_t{blob.header().num_ids} + 1);
  data.text_bytes.reserve(blob.num_token_bytes());
  data.text_offsets.push_back(0);
  for (uint32_t id = 0; id < blob.header().num_ids; ++id) {
    std::string_view bytes = blob.token_bytes(id);
    if (!characters || (blob.token_flags(id) & kTokenByte) != 0) {
      data.text_bytes.append(bytes);
    } else {
      for (size_t at = 0; (at = bytes.find(kLowBlock)) != bytes.npos;) {
        data.text_bytes.append(bytes.substr(0, at)).push_back(' ');
        bytes.remove_prefix(at + kLowBlock.size());
      }
      data.text_bytes.append(bytes);
    }
    data.text_offsets.push_back(static_cast<uint32_t>(data.text_bytes.size()));
  }
}

bool is_one_character(std::string_view bytes) {
  const auto p = reinterpret_cast<const uint8_t*>(bytes.data());
  return !bytes.empty() && unicode::decode(p, p + bytes.size()).num_bytes == bytes.size();
}

// Characters only; see JoinedPairs. Unknown symbols fuse across a cut and byte tokens do not spell
// their text, so a vocabulary that has the one or merges the other is not cut.
void fill_joined_pairs(TokenizerData& data) {
  const Blob& blob = data.blob;
  const auto is_byte = [&blob](uint32_t id) { return (blob.token_flags(id) & kTokenByte) != 0; };
  data.can_cut =
      data.has_all_bytes && blob.has_flag(kByteFallback) && !blob.has_flag(kIgnoreMerges);
  std::vector<bool> done(blob.header().num_ids);  // many merges make the same token
  for (const Merge& merge : blob.merges()) {
    if (is_byte(merge.left) || is_byte(merge.right) || is_byte(merge.merged)) data.can_cut = false;
    if (done[merge.merged]) continue;
    done[merge.merged] = true;
    const std::string_view bytes = blob.token_bytes(merge.merged);
    const auto end = reinterpret_cast<const uint8_t*>(bytes.data()) + bytes.size();
    uint32_t previous = unicode::kInvalid;
    for (auto p = end - bytes.size(); p < end;) {
      const unicode::Decoded d = unicode::decode(p, end);
      if (previous != unicode::kInvalid) data.joined_pairs.add(previous, d.code_point);
      previous = d.code_point;
      p += d.num_bytes;
    }
  }
}

void fill_pieces(TokenizerData& data) {
  const Blob& blob = data.blob;
  const bool characters = data.characters();
  const uint32_t num_ids = blob.header().num_ids;
  const auto in_model = [&blob](uint32_t id) {
    return (blob.token_flags(id) & (kTokenInModel | kTokenByte)) == kTokenInModel;
  };
  if (characters) {
    std::vector<uint32_t> ids;
    for (uint32_t id = 0; id < num_ids; ++id) {
      if (in_model(id) && is_one_character(blob.token_bytes(id))) ids.push_back(id);
    }
    data.one_character.reserve(ids.size());
    for (const uint32_t id : ids) data.one_character.insert(blob.token_bytes(id), id);
    fill_joined_pairs(data);
  }
  data.whole_pieces.reserve(num_ids);
  MergeScratch scratch;
  std::vector<uint32_t> ids;
  for (uint32_t id = 0; id < num_ids; ++id) {
    if (!in_model(id)) continue;
    const std::string_view bytes = blob.token_bytes(id);
    if (!blob.has_flag(kIgnoreMerges)) {
      ids.clear();
      merge_piece(data, bytes, scratch, ids);
      if (ids.size() != 1 || ids[0] != id) continue;
    }
    data.whole_pieces.insert(bytes, id);
  }
}

// The text of ids with byte fallback: a run of byte tokens that is not well-formed as a whole
// becomes one U+FFFD for each of its bytes.
void append_characters(const TokenizerData& data, std::span<const uint32_t> ids, bool skip_special,
                       std::string& text) {
  std::string run;
  const auto flush = [&] {
    const auto end = reinterpret_cast<const uint8_t*>(run.data()) + run.size();
    auto p = end - run.size();
    while (p < end && unicode::decode(p, end).code_point != unicode::kInvalid) {
      p += unicode::decode(p, end).num_bytes;
    }
    if (p == end) {
      text += run;
    } else {
      for (size_t i = 0; i < run.size(); ++i) text.append("\xEF\xBF\xBD");
    }
    run.clear();
  };
  for (const uint32_t id : ids) {
    if (!data.exists(id)) continue;
    const uint8_t flags = data.blob.token_flags(id);
    if (skip_special && (flags & kTokenSpecial) != 0) continue;
    if ((flags & kTokenByte) != 0) {
      run.append(data.text_of(id));
      continue;
    }
    if (!run.empty()) flush();
    text.append(data.text_of(id));
  }
  flush();
  if (data.blob.has_flag(kStripLeadingSpace) && text.starts_with(' ')) text.erase(0, 1);
}

}  // namespace

TokenizerData::TokenizerData(Blob checked) : serial(next_serial()), blob(std::move(checked)) {
  const auto byte_ids = blob.byte_ids();
  has_all_bytes = std::find(byte_ids.begin(), byte_ids.end(), kNoId) == byte_ids.end();
  byte_pair_ranks.assign(size_t{1} << 16, kNoMerge);
  for (size_t pair = 0; pair < byte_pair_ranks.size(); ++pair) {
    const uint32_t first = byte_ids[pair >> 8], second = byte_ids[pair & 0xFF];
    if (first != kNoId && second != kNoId) byte_pair_ranks[pair] = merges.rank(first, second);
  }
  raw_tokens = make_finder(blob, false);
  normalized_tokens = make_finder(blob, true);
  fill_texts(*this);
  fill_pieces(*this);
}

Tokenizer::Tokenizer(std::unique_ptr<const TokenizerData> data) : data_(std::move(data)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::load(std::span<const std::byte> compiled) {
  return Tokenizer(std::make_unique<const TokenizerData>(Blob::read(compiled)));
}

void Tokenizer::encode(std::string_view text, EncodeOptions options,
                       std::vector<uint32_t>& out) const {
  EncodeScratch& scratch = thread_scratch();
  encode_with(*data_, text, options, scratch, out);
  trim(scratch, text.size());
}

std::string Tokenizer::decode(std::span<const uint32_t> ids, bool skip_special_tokens) const {
  std::string text;
  if (data_->characters()) {
    append_characters(*data_, ids, skip_special_tokens, text);
    return text;
  }
  Detokenizer detokenizer(*this, skip_special_tokens);
  for (const uint32_t id : ids) detokenizer.append(id, text);
  detokenizer.flush(text);
  return text;
}

std::optional<uint32_t> Tokenizer::id_of(std::string_view token) const {
  const Blob& blob = data_->blob;
  for (const AddedRecord& record : blob.added_tokens()) {
    if (blob.added_content(record) == token) return record.id;
  }
  for (uint32_t id = 0; id < blob.header().num_ids; ++id) {
    if ((blob.token_flags(id) & kTokenExists) != 0 && blob.token_bytes(id) == token) return id;
  }
  return std::nullopt;
}

void Tokenizer::append_token_bytes(uint32_t id, std::string& out) const {
  out.append(data_->text_of(id));
}

uint32_t Tokenizer::num_ids() const { return data_->blob.header().num_ids; }

bool Tokenizer::is_special(uint32_t id) const {
  return id < num_ids() && (data_->blob.token_flags(id) & kTokenSpecial) != 0;
}

}  // namespace blink
