#include "encode.h"

#include "pretokenize.h"

namespace blink {
namespace {

constexpr std::string_view kLowBlock = "\xE2\x96\x81";

// The symbols of a piece of a character alphabet: characters of the vocabulary, else their bytes as
// <0xNN>, else the unknown id, of which a run is one if fuse_unk says so.
void push_characters(const TokenizerData& data, std::string_view piece,
                     std::vector<uint32_t>& symbols) {
  const Blob& blob = data.blob;
  const auto begin = reinterpret_cast<const uint8_t*>(piece.data());
  const uint8_t* const end = begin + piece.size();
  bool pending_unknown = false;
  for (const uint8_t* p = begin; p < end;) {
    const uint32_t num_bytes = unicode::decode(p, end).num_bytes;
    const auto left = static_cast<size_t>(end - p);
    const uint32_t id =
        data.one_character.find({reinterpret_cast<const char*>(p), num_bytes}, left);
    bool whole = blob.has_flag(kByteFallback);
    for (uint32_t i = 0; i < num_bytes; ++i) whole = whole && blob.byte_ids()[p[i]] != kNoId;
    if (id != kNoId) {
      if (pending_unknown) symbols.push_back(blob.header().unknown_id);
      pending_unknown = false;
      symbols.push_back(id);
    } else if (whole) {
      // A pending unknown is not flushed here: the library puts it after these bytes.
      for (uint32_t i = 0; i < num_bytes; ++i) symbols.push_back(blob.byte_ids()[p[i]]);
    } else if (blob.header().unknown_id != kNoId) {
      if (pending_unknown && !blob.has_flag(kFuseUnknown)) {
        symbols.push_back(blob.header().unknown_id);
      }
      pending_unknown = true;
    }
    p += num_bytes;
  }
  if (pending_unknown) symbols.push_back(blob.header().unknown_id);
}

// The symbols of a piece of bytes; the same for bytes that the vocabulary lacks.
void push_bytes(const TokenizerData& data, std::string_view piece, std::vector<uint32_t>& symbols) {
  const Blob& blob = data.blob;
  bool pending_unknown = false;
  for (const char byte : piece) {
    const uint32_t id = blob.byte_ids()[static_cast<uint8_t>(byte)];
    if (id != kNoId) {
      if (pending_unknown) symbols.push_back(blob.header().unknown_id);
      pending_unknown = false;
      symbols.push_back(id);
    } else if (blob.header().unknown_id != kNoId) {
      if (pending_unknown && !blob.has_flag(kFuseUnknown)) {
        symbols.push_back(blob.header().unknown_id);
      }
      pending_unknown = true;
    }
  }
  if (pending_unknown) symbols.push_back(blob.header().unknown_id);
}

void merge_short_bytes(const TokenizerData& data, std::string_view piece,
                       std::vector<uint32_t>& out) {
  uint32_t symbols[kMaxShortSymbols], ranks[kMaxShortSymbols];
  const auto bytes = reinterpret_cast<const uint8_t*>(piece.data());
  const size_t n = piece.size();
  for (size_t i = 0; i < n; ++i) symbols[i] = data.blob.byte_ids()[bytes[i]];
  for (size_t i = 0; i + 1 < n; ++i) {
    ranks[i] = data.byte_pair_ranks[size_t{bytes[i]} << 8 | bytes[i + 1]];
  }
  const size_t left = merge_short(data.merges, symbols, ranks, n);
  out.insert(out.end(), symbols, symbols + left);
}

// The pieces between the split and the tables. The table of whole pieces is larger than a core's
// cache, so a piece is looked up only when `kDepth` later ones have asked for their lines.
class PieceQueue {
 public:
  PieceQueue(const TokenizerData& data, const char* end, EncodeScratch& scratch,
             std::vector<uint32_t>& out)
      : data_(data), end_(end), scratch_(scratch), out_(out) {}

  void push(std::string_view piece) {
    if (size_ == kDepth) flush();
    pieces_[size_] = piece;
    if (piece.size() <= kMaxShortBytes) {
      probes_[size_] =
          data_.whole_pieces.start_find(piece, static_cast<size_t>(end_ - piece.data()));
    }
    ++size_;
  }

  void flush() {
    for (size_t i = 0; i < size_; ++i) {
      const std::string_view piece = pieces_[i];
      const uint32_t id = piece.size() <= kMaxShortBytes
                              ? data_.whole_pieces.finish_find(probes_[i])
                              : data_.whole_pieces.find(piece, piece.size());
      if (id != kNoId) {
        out_.push_back(id);
      } else {
        merge(piece);
      }
    }
    size_ = 0;
  }

 private:
  static constexpr size_t kDepth = 16;

  void merge(std::string_view piece) {
    if (piece.size() > WordCache::kMaxBytes) {
      return merge_piece(data_, piece, scratch_.merge, out_);
    }
    WordCache::Place place = scratch_.words.find(data_.serial, piece);
    if (place.found()) {
      const std::span<const uint32_t> ids = place.ids();
      out_.insert(out_.end(), ids.begin(), ids.end());
      return;
    }
    const size_t begin = out_.size();
    merge_piece(data_, piece, scratch_.merge, out_);
    place.store(std::span(out_).subspan(begin));
  }

  const TokenizerData& data_;
  const char* end_;  // of the text, up to which may be read
  EncodeScratch& scratch_;
  std::vector<uint32_t>& out_;
  size_t size_ = 0;
  std::string_view pieces_[kDepth];
  PieceTable::Probe probes_[kDepth];
};

// Pushes `text` in pieces that no merge crosses.
void push_cut(const TokenizerData& data, std::string_view text, PieceQueue& queue) {
  const auto end = reinterpret_cast<const uint8_t*>(text.data()) + text.size();
  auto begin = end - text.size();
  uint32_t previous = unicode::kInvalid;
  const auto push = [&queue](const uint8_t* from, const uint8_t* to) {
    if (from < to) {
      queue.push({reinterpret_cast<const char*>(from), static_cast<size_t>(to - from)});
    }
  };
  for (auto p = begin; p < end;) {
    const unicode::Decoded d = unicode::decode(p, end);
    if (!data.joined_pairs.may_join(previous, d.code_point)) {
      push(begin, p);
      begin = p;
    }
    previous = d.code_point;
    p += d.num_bytes;
  }
  push(begin, end);
}

void encode_text(const TokenizerData& data, std::string_view text, EncodeScratch& scratch,
                 std::vector<uint32_t>& out) {
  if (text.empty()) return;
  if (data.blob.has_flag(kAddPrefixSpace) && text.front() != ' ') {
    scratch.prefixed.assign(1, ' ').append(text);
    text = scratch.prefixed;
  }
  const char* const end = text.data() + text.size();
  const auto kind = static_cast<PretokenizerKind>(data.blob.header().pretokenizer);
  PieceQueue queue(data, end, scratch, out);
  if (data.can_cut && kind == PretokenizerKind::kWhole) {
    push_cut(data, text, queue);
    queue.flush();
    return;
  }
  pretokenize::split(kind, text, scratch.masks, [&](const uint8_t* from, const uint8_t* to) {
    queue.push({reinterpret_cast<const char*>(from), static_cast<size_t>(to - from)});
  });
  queue.flush();
}

}  // namespace

void merge_piece(const TokenizerData& data, std::string_view piece, MergeScratch& scratch,
                 std::vector<uint32_t>& out) {
  const bool bytes = !data.characters();
  if (bytes && piece.size() <= kMaxShortSymbols && data.has_all_bytes) {
    return merge_short_bytes(data, piece, out);
  }
  scratch.symbols.clear();
  if (bytes) {
    push_bytes(data, piece, scratch.symbols);
  } else {
    push_characters(data, piece, scratch.symbols);
  }
  if (scratch.symbols.size() > kMaxShortSymbols) {
    merge_long(data.merges, scratch, out);
    return;
  }
  uint32_t ranks[kMaxShortSymbols];
  const size_t n = scratch.symbols.size();
  for (size_t i = 0; i + 1 < n; ++i) {
    ranks[i] = data.merges.rank(scratch.symbols[i], scratch.symbols[i + 1]);
  }
  const size_t left = merge_short(data.merges, scratch.symbols.data(), ranks, n);
  out.insert(out.end(), scratch.symbols.begin(),
             scratch.symbols.begin() + static_cast<std::ptrdiff_t>(left));
}

std::string_view normalize(NormalizerKind kind, std::string_view text, NfcScratch& scratch,
                           std::string& buffer) {
  switch (kind) {
    case NormalizerKind::kNone:
      return text;
    case NormalizerKind::kNfc:
      if (nfc_prefix_bytes(text) == text.size()) return text;
      normalize_nfc(text, scratch, buffer);
      return buffer;
    case NormalizerKind::kSpaceToLowBlock:
    case NormalizerKind::kPrependSpaceToLowBlock:
      buffer.clear();
      if (kind == NormalizerKind::kPrependSpaceToLowBlock && !text.empty()) {
        buffer.append(kLowBlock);
      }
      for (const char byte : text) {
        if (byte == ' ') {
          buffer.append(kLowBlock);
        } else {
          buffer.push_back(byte);
        }
      }
      return buffer;
  }
  return text;
}

void encode_with(const TokenizerData& data, std::string_view text, EncodeOptions options,
                 EncodeScratch& scratch, std::vector<uint32_t>& out) {
  const auto normalizer = static_cast<NormalizerKind>(data.blob.header().normalizer);
  const auto add = [&out](std::span<const uint32_t> ids) {
    out.insert(out.end(), ids.begin(), ids.end());
  };
  if (options.add_special_tokens) add(data.blob.prefix_ids());
  data.raw_tokens.find(text, options.parse_special, scratch.raw_splits);
  for (const TextSplit& raw : scratch.raw_splits) {
    if (raw.id != kNoId) {
      out.push_back(raw.id);
      continue;
    }
    const std::string_view part = normalize(normalizer, text.substr(raw.begin, raw.end - raw.begin),
                                            scratch.nfc, scratch.normalized);
    if (data.normalized_tokens.empty()) {
      encode_text(data, part, scratch, out);
      continue;
    }
    data.normalized_tokens.find(part, options.parse_special, scratch.normalized_splits);
    for (const TextSplit& split : scratch.normalized_splits) {
      if (split.id != kNoId) {
        out.push_back(split.id);
      } else {
        encode_text(data, part.substr(split.begin, split.end - split.begin), scratch, out);
      }
    }
  }
  if (options.add_special_tokens) add(data.blob.suffix_ids());
}

}  // namespace blink
