#include "frontend/response_writer.h"

#include <array>
#include <charconv>

namespace blink {
namespace {

void append_number(uint64_t value, std::string& out) {
  std::array<char, 20> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  out.append(digits.data(), end);
}

void append_quoted(std::string_view text, std::string& out) {
  out += '"';
  append_json_escaped(text, out);
  out += '"';
}

void append_quoted_or_null(std::string_view text, std::string& out) {
  if (text.empty()) {
    out += "null";
  } else {
    append_quoted(text, out);
  }
}

// U+0085, U+2028 and U+2029 end a line for some readers of event streams (Python's str.splitlines
// among them), so they are escaped. Returns the bytes taken from `text`, 0 where it does not begin
// with one.
size_t escape_line_break(std::string_view text, std::string_view before, std::string& out) {
  std::string_view escape;
  size_t length = 3;
  if (text.starts_with("\xC2\x85")) {
    escape = "\\u0085";
    length = 2;
  } else if (text.starts_with("\xE2\x80\xA8")) {
    escape = "\\u2028";
  } else if (text.starts_with("\xE2\x80\xA9")) {
    escape = "\\u2029";
  } else {
    return 0;
  }
  out.append(before).append(escape);
  return length;
}

}  // namespace

void append_json_escaped(std::string_view text, std::string& out) {
  static constexpr char kHex[] = "0123456789abcdef";
  size_t start = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte >= 0x20 && byte != '"' && byte != '\\' && byte != 0xC2 && byte != 0xE2) continue;
    if (byte >= 0x80) {
      const size_t length = escape_line_break(text.substr(i), text.substr(start, i - start), out);
      if (length == 0) continue;
      i += length - 1;
      start = i + 1;
      continue;
    }
    out.append(text.substr(start, i - start));
    start = i + 1;
    switch (byte) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        out += "\\u00";
        out += kHex[byte >> 4];
        out += kHex[byte & 15];
    }
  }
  out.append(text.substr(start));
}

std::string json_from_error(const ApiError& error) {
  std::string out = "{\"error\":{\"message\":";
  append_quoted(error.message, out);
  out += ",\"type\":";
  append_quoted(error.type, out);
  out += ",\"param\":";
  append_quoted_or_null(error.param, out);
  out += ",\"code\":";
  append_quoted_or_null(error.code, out);
  out += "}}";
  return out;
}

ResponseWriter::ResponseWriter(Options options) : options_(std::move(options)) {
  head_ = "data: {\"id\":";
  append_quoted(options_.id, head_);
  head_ += ",\"object\":";
  head_ += options_.is_chat ? "\"chat.completion.chunk\"" : "\"text_completion\"";
  head_ += ",\"created\":";
  append_number(static_cast<uint64_t>(options_.created_s), head_);
  head_ += ",\"model\":";
  append_quoted(options_.model, head_);
  head_ += ",\"choices\":[";
  const std::string usage = options_.includes_usage ? ",\"usage\":null}\n\n" : "}\n\n";
  if (options_.is_chat) {
    first_text_ = head_ + "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"";
    next_text_ = head_ + "{\"index\":0,\"delta\":{\"content\":\"";
    text_tail_ = "\"},\"logprobs\":null,\"finish_reason\":null}]" + usage;
  } else {
    first_text_ = next_text_ = head_ + "{\"index\":0,\"text\":\"";
    text_tail_ = "\",\"logprobs\":null,\"finish_reason\":null}]" + usage;
  }
}

void ResponseWriter::append_text_event(std::string_view text, std::string& out) {
  out += has_begun_ ? next_text_ : first_text_;
  append_json_escaped(text, out);
  out += text_tail_;
  has_begun_ = true;
}

void ResponseWriter::append_usage(Usage usage, std::string& out) const {
  out += "\"usage\":{\"prompt_tokens\":";
  append_number(usage.num_prompt_tokens, out);
  out += ",\"completion_tokens\":";
  append_number(usage.num_output_tokens, out);
  out += ",\"total_tokens\":";
  append_number(static_cast<uint64_t>(usage.num_prompt_tokens) + usage.num_output_tokens, out);
  out += '}';
}

void ResponseWriter::append_final_events(std::string_view finish_reason, Usage usage,
                                         std::string& out) {
  out += head_;
  if (options_.is_chat) {
    out += has_begun_ ? "{\"index\":0,\"delta\":{}"
                      : "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}";
  } else {
    out += "{\"index\":0,\"text\":\"\"";
  }
  out += ",\"logprobs\":null,\"finish_reason\":";
  append_quoted(finish_reason, out);
  out += options_.includes_usage ? "}],\"usage\":null}\n\n" : "}]}\n\n";
  if (options_.includes_usage) {
    out += head_;
    out += "],";
    append_usage(usage, out);
    out += "}\n\n";
  }
  out += "data: [DONE]\n\n";
  has_begun_ = true;
}

void ResponseWriter::append_error_events(const ApiError& error, std::string& out) const {
  out += "data: ";
  out += json_from_error(error);
  out += "\n\ndata: [DONE]\n\n";
}

void ResponseWriter::append_response(std::string_view text, std::string_view finish_reason,
                                     Usage usage, std::string& out) const {
  out += "{\"id\":";
  append_quoted(options_.id, out);
  out += options_.is_chat ? ",\"object\":\"chat.completion\"" : ",\"object\":\"text_completion\"";
  out += ",\"created\":";
  append_number(static_cast<uint64_t>(options_.created_s), out);
  out += ",\"model\":";
  append_quoted(options_.model, out);
  out += ",\"choices\":[{\"index\":0,";
  if (options_.is_chat) {
    out += "\"message\":{\"role\":\"assistant\",\"content\":";
    append_quoted(text, out);
    out += ",\"refusal\":null}";
  } else {
    out += "\"text\":";
    append_quoted(text, out);
  }
  out += ",\"logprobs\":null,\"finish_reason\":";
  append_quoted(finish_reason, out);
  out += "}],";
  append_usage(usage, out);
  out += '}';
}

}  // namespace blink
