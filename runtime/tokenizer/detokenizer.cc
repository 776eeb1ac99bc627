#include "tokenizer.h"
#include "tokenizer_data.h"

namespace blink {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// Whether `byte` can follow the `num_held` bytes at `held`, which begin one code point: the
// well-formed byte sequences of Unicode, table 3-7.
bool continues(const uint8_t* held, uint8_t num_held, uint8_t byte) {
  if (num_held > 1) return (byte & 0xC0) == 0x80;
  switch (held[0]) {
    case 0xE0:
      return byte >= 0xA0 && byte <= 0xBF;
    case 0xED:
      return byte >= 0x80 && byte <= 0x9F;
    case 0xF0:
      return byte >= 0x90 && byte <= 0xBF;
    case 0xF4:
      return byte >= 0x80 && byte <= 0x8F;
    default:
      return (byte & 0xC0) == 0x80;
  }
}

// Length of the code point that starts with `byte`; 0 if none does.
uint8_t sequence_bytes(uint8_t byte) {
  if (byte < 0x80) return 1;
  if (byte < 0xC2) return 0;
  if (byte < 0xE0) return 2;
  if (byte < 0xF0) return 3;
  return byte < 0xF5 ? 4 : 0;
}

}  // namespace

// An ill-formed beginning becomes one U+FFFD as a whole, as Rust's from_utf8_lossy does; from byte
// tokens, one for each byte.
void Detokenizer::replace_held(std::string& out) {
  const uint8_t count = tokenizer_->data().characters() ? num_held_ : num_held_ > 0;
  for (uint8_t i = 0; i < count; ++i) out.append(kReplacement);
  num_held_ = 0;
}

void Detokenizer::append_bytes(std::string_view bytes, std::string& out) {
  for (const char signed_byte : bytes) {
    const auto byte = static_cast<uint8_t>(signed_byte);
    if (num_held_ > 0) {
      if (continues(held_, num_held_, byte)) {
        held_[num_held_++] = byte;
        if (num_held_ == sequence_bytes(held_[0])) {
          out.append(reinterpret_cast<const char*>(held_), num_held_);
          num_held_ = 0;
        }
        continue;
      }
      replace_held(out);
    }
    const uint8_t length = sequence_bytes(byte);
    if (length == 1) {
      out.push_back(signed_byte);
    } else if (length == 0) {
      out.append(kReplacement);
    } else {
      held_[num_held_++] = byte;
    }
  }
}

void Detokenizer::append(uint32_t id, std::string& out) {
  if (skip_special_tokens_ && tokenizer_->is_special(id)) return;
  const TokenizerData& data = tokenizer_->data();
  if (!data.characters()) return append_bytes(data.text_of(id), out);
  if (!data.exists(id)) return;
  std::string_view text = data.text_of(id);
  if ((data.blob.token_flags(id) & kTokenByte) != 0) {
    // A byte that is a space by itself counts as one.
    if (strip_leading_space(text)) return;
    return append_bytes(text, out);
  }
  replace_held(out);
  strip_leading_space(text);
  out.append(text);
}

// Takes the one space off that some decoders take off the front of all output.
bool Detokenizer::strip_leading_space(std::string_view& text) {
  if (!at_start_ || text.empty()) return false;
  at_start_ = false;
  if (!tokenizer_->data().blob.has_flag(kStripLeadingSpace) || text.front() != ' ') return false;
  text.remove_prefix(1);
  return true;
}

void Detokenizer::flush(std::string& out) {
  replace_held(out);
  at_start_ = true;
}

}  // namespace blink
