#include "frontend/logprob_tracker.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "frontend/response_writer.h"

namespace blink {
namespace {

constexpr float kImpossible = -9999.0f;

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

uint64_t count_code_points(std::string_view text) {
  uint64_t count = 0;
  for (const char byte : text) count += is_continuation(byte) ? 0 : 1;
  return count;
}

// Length of the code point that starts with `lead`; 0 if none does.
size_t sequence_bytes(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return 2;
  if (lead < 0xF0) return 3;
  return lead < 0xF5 ? 4 : 0;
}

// Well-formed UTF-8 by itself (Unicode, table 3-7).
bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = sequence_bytes(lead);
    if (length == 0 || i + length > text.size()) return false;
    for (size_t j = 1; j < length; ++j) {
      if (!is_continuation(text[i + j])) return false;
    }
    if (length > 2) {
      const auto second = static_cast<unsigned char>(text[i + 1]);
      if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||
          (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F)) {
        return false;
      }
    }
    i += length;
  }
  return true;
}

void append_separator(std::string& list) {
  if (!list.empty()) list += ',';
}

}  // namespace

void append_logprob(float logprob, std::string& out) {
  const float value = logprob >= kImpossible ? logprob : kImpossible;  // NaN fails too
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  out.append(digits.data(), end);
}

void LogprobTracker::put(const blink_output_record* records, uint32_t count) {
  const std::lock_guard lock(mutex_);
  inbox_.insert(inbox_.end(), records, records + count);
}

void LogprobTracker::take(uint32_t count) {
  const std::lock_guard lock(mutex_);
  taken_.erase(taken_.begin(), taken_.begin() + static_cast<std::ptrdiff_t>(next_));
  next_ = 0;
  const auto end =
      inbox_.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(count, inbox_.size()));
  taken_.insert(taken_.end(), inbox_.begin(), end);
  inbox_.erase(inbox_.begin(), end);
}

void LogprobTracker::skip() {
  if (next_ < taken_.size()) ++next_;
}

void LogprobTracker::add(uint32_t token_id, std::string_view piece) {
  Pending pending{.record = {},
                  .begin_bytes = num_decoded_bytes_,
                  .end_bytes = 0,
                  .offset = num_decoded_points_};
  if (next_ < taken_.size()) pending.record = taken_[next_++];
  pending.record.token_id = token_id;
  num_decoded_bytes_ += piece.size();
  num_decoded_points_ += count_code_points(piece);
  pending.end_bytes = num_decoded_bytes_;
  pending_.push_back(pending);
}

void LogprobTracker::show(uint64_t num_shown_bytes) {
  while (!pending_.empty() && pending_.front().end_bytes <= num_shown_bytes) {
    tell(pending_.front());
    pending_.pop_front();
  }
}

void LogprobTracker::cut(uint64_t num_shown_bytes) {
  while (!pending_.empty() && pending_.front().begin_bytes < num_shown_bytes) {
    tell(pending_.front());
    pending_.pop_front();
  }
  pending_.clear();
}

// A token that is no text by itself is written as its bytes.
void LogprobTracker::append_token(uint32_t token_id, std::string& out) {
  static constexpr char kHex[] = "0123456789abcdef";
  bytes_.clear();
  codec_->append_token_bytes(token_id, bytes_);
  if (is_utf8(bytes_)) {
    append_json_string(bytes_, out);
    return;
  }
  out += is_chat_ ? "\"" : "\"bytes:";
  for (const char signed_byte : bytes_) {
    const auto byte = static_cast<unsigned char>(signed_byte);
    out += "\\\\x";
    out += kHex[byte >> 4];
    out += kHex[byte & 15];
  }
  out += '"';
}

void LogprobTracker::append_chat_token(uint32_t token_id, float logprob, std::string& out) {
  out += "{\"token\":";
  append_token(token_id, out);
  out += ",\"logprob\":";
  append_logprob(logprob, out);
  out += ",\"bytes\":[";
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (i > 0) out += ',';
    append_decimal(static_cast<unsigned char>(bytes_[i]), out);
  }
  out += ']';
}

void LogprobTracker::tell_chat(const blink_output_record& record) {
  append_separator(tokens_);
  append_chat_token(record.token_id, record.logprob, tokens_);
  tokens_ += ",\"top_logprobs\":[";
  for (uint32_t i = 0; i < num_top_ && i < record.num_top; ++i) {
    if (i > 0) tokens_ += ',';
    append_chat_token(record.top_ids[i], record.top_logprobs[i], tokens_);
    tokens_ += '}';
  }
  tokens_ += "]}";
}

void LogprobTracker::tell(const Pending& pending) {
  const blink_output_record& record = pending.record;
  if (is_chat_) return tell_chat(record);
  append_separator(tokens_);
  append_token(record.token_id, tokens_);
  append_separator(token_logprobs_);
  append_logprob(record.logprob, token_logprobs_);
  append_separator(offsets_);
  append_decimal(pending.offset, offsets_);
  append_separator(top_logprobs_);
  top_logprobs_ += '{';
  bool has_chosen = false;
  for (uint32_t i = 0; i < num_top_ && i < record.num_top; ++i) {
    if (i > 0) top_logprobs_ += ',';
    append_token(record.top_ids[i], top_logprobs_);
    top_logprobs_ += ':';
    append_logprob(record.top_logprobs[i], top_logprobs_);
    has_chosen |= record.top_ids[i] == record.token_id;
  }
  if (!has_chosen) {  // the chosen token is always among them, as the last one
    if (top_logprobs_.back() != '{') top_logprobs_ += ',';
    append_token(record.token_id, top_logprobs_);
    top_logprobs_ += ':';
    append_logprob(record.logprob, top_logprobs_);
  }
  top_logprobs_ += '}';
}

std::string_view LogprobTracker::json() {
  if (tokens_.empty()) return {};
  whole_.clear();
  if (is_chat_) {
    whole_ += "{\"content\":[";
    whole_ += tokens_;
    whole_ += "],\"refusal\":null}";
    return whole_;
  }
  whole_ += "{\"tokens\":[";
  whole_ += tokens_;
  whole_ += "],\"token_logprobs\":[";
  whole_ += token_logprobs_;
  whole_ += "],\"top_logprobs\":[";
  whole_ += top_logprobs_;
  whole_ += "],\"text_offset\":[";
  whole_ += offsets_;
  whole_ += "]}";
  return whole_;
}

void LogprobTracker::clear() {
  for (std::string* list : {&tokens_, &token_logprobs_, &top_logprobs_, &offsets_}) list->clear();
}

}  // namespace blink
