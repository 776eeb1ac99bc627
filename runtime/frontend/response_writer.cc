#include "frontend/response_writer.h"

#include <array>
#include <charconv>

namespace blink {
namespace {

constexpr size_t kMaxMessageBytes = 2048;  // of an error

void append_quoted_or_null(std::string_view text, std::string& out) {
  if (text.empty()) {
    out += "null";
  } else {
    append_json_string(text, out);
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

void append_json_string(std::string_view text, std::string& out) {
  out += '"';
  append_json_escaped(text, out);
  out += '"';
}

void append_decimal(uint64_t value, std::string& out) {
  std::array<char, 20> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  out.append(digits.data(), end);
}

std::string json_from_error(const ApiError& error) {
  std::string out = "{\"error\":{\"message\":";
  append_json_string(shortened(error.message, kMaxMessageBytes), out);
  out += ",\"type\":";
  append_json_string(error.type, out);
  out += ",\"param\":";
  append_quoted_or_null(shortened(error.param), out);
  out += ",\"code\":";
  append_quoted_or_null(error.code, out);
  out += "}}";
  return out;
}

ResponseWriter::ResponseWriter(Options options) : options_(std::move(options)) {
  head_ = "data: {\"id\":";
  append_json_string(options_.id, head_);
  head_ += ",\"object\":";
  head_ += options_.is_chat ? "\"chat.completion.chunk\"" : "\"text_completion\"";
  head_ += ",\"created\":";
  append_decimal(static_cast<uint64_t>(options_.created_s), head_);
  head_ += ",\"model\":";
  append_json_string(options_.model, head_);
  head_ += ",\"choices\":[";
  choice_ = head_ + "{\"index\":";
  append_decimal(options_.index, choice_);
  choice_ += ',';
  if (options_.is_chat) {
    first_text_ = choice_ + "\"delta\":{\"role\":\"assistant\",\"content\":\"";
    next_text_ = choice_ + "\"delta\":{\"content\":\"";
    text_tail_ = "\"},\"logprobs\":null,\"finish_reason\":null}";
  } else {
    first_text_ = next_text_ = choice_ + "\"text\":\"";
    text_tail_ = "\",\"logprobs\":null,\"finish_reason\":null}";
  }
  if (!options_.has_continuous_usage) {
    text_tail_ += options_.includes_usage ? "],\"usage\":null}\n\n" : "]}\n\n";
  }
}

namespace {

void append_usage(Usage usage, std::string& out) {
  out += "\"usage\":{\"prompt_tokens\":";
  append_decimal(usage.num_prompt_tokens, out);
  out += ",\"completion_tokens\":";
  append_decimal(usage.num_output_tokens, out);
  out += ",\"total_tokens\":";
  append_decimal(static_cast<uint64_t>(usage.num_prompt_tokens) + usage.num_output_tokens, out);
  out += '}';
}

void append_call_head(const ToolCall& call, std::string& out) {
  out += "\"id\":";
  append_json_string(call.id, out);
  out += ",\"type\":\"function\",\"function\":{\"name\":";
  append_json_string(call.name, out);
  out += ",\"arguments\":";
  append_json_string(call.arguments, out);
  out += "}}";
}

}  // namespace

// From behind the choice's object to the end of the event.
void ResponseWriter::append_event_end(Usage usage, std::string& out) const {
  if (options_.has_continuous_usage) {
    out += "],";
    append_usage(usage, out);
    out += "}\n\n";
  } else {
    out += options_.includes_usage ? "],\"usage\":null}\n\n" : "]}\n\n";
  }
}

void ResponseWriter::append_text_event(std::string_view text, std::string_view logprobs,
                                       Usage usage, std::string& out) {
  out += has_begun_ ? next_text_ : first_text_;
  has_begun_ = true;
  append_json_escaped(text, out);
  if (logprobs.empty()) {
    out += text_tail_;
    if (options_.has_continuous_usage) append_event_end(usage, out);
    return;
  }
  out += options_.is_chat ? "\"},\"logprobs\":" : "\",\"logprobs\":";
  out += logprobs;
  out += ",\"finish_reason\":null}";
  append_event_end(usage, out);
}

void ResponseWriter::append_call_event(uint32_t call, const ToolCall& begun, Usage usage,
                                       std::string& out) {
  if (!has_begun_) append_text_event("", "", usage, out);
  out += choice_;
  out += "\"delta\":{\"tool_calls\":[{\"index\":";
  append_decimal(call, out);
  out += ',';
  append_call_head(begun, out);
  out += "]},\"logprobs\":null,\"finish_reason\":null}";
  append_event_end(usage, out);
}

void ResponseWriter::append_arguments_event(uint32_t call, std::string_view piece, Usage usage,
                                            std::string& out) {
  out += choice_;
  out += "\"delta\":{\"tool_calls\":[{\"index\":";
  append_decimal(call, out);
  out += ",\"function\":{\"arguments\":";
  append_json_string(piece, out);
  out += "}}]},\"logprobs\":null,\"finish_reason\":null}";
  append_event_end(usage, out);
}

void ResponseWriter::append_finish_event(std::string_view finish_reason, Usage usage,
                                         std::string& out) {
  out += choice_;
  if (options_.is_chat) {
    out += has_begun_ ? "\"delta\":{}" : "\"delta\":{\"role\":\"assistant\",\"content\":\"\"}";
  } else {
    out += "\"text\":\"\"";
  }
  has_begun_ = true;
  out += ",\"logprobs\":null,\"finish_reason\":";
  append_json_string(finish_reason, out);
  out += '}';
  append_event_end(usage, out);
}

void ResponseWriter::append_stream_end(Usage usage, std::string& out) const {
  if (options_.includes_usage) {
    out += head_;
    out += "],";
    append_usage(usage, out);
    out += "}\n\n";
  }
  out += "data: [DONE]\n\n";
}

void ResponseWriter::append_error_events(const ApiError& error, std::string& out) {
  out += "data: ";
  out += json_from_error(error);
  out += "\n\ndata: [DONE]\n\n";
}

void ResponseWriter::append_choice(const ChoiceText& choice, std::string& out) const {
  out += "{\"index\":";
  append_decimal(options_.index, out);
  const bool has_calls = choice.tool_calls != nullptr && !choice.tool_calls->empty();
  if (options_.is_chat) {
    out += ",\"message\":{\"role\":\"assistant\",\"content\":";
    if (has_calls && choice.text.empty()) {
      out += "null";
    } else {
      append_json_string(choice.text, out);
    }
    out += ",\"refusal\":null";
    if (has_calls) {
      out += ",\"tool_calls\":[";
      for (const ToolCall& call : *choice.tool_calls) {
        if (&call != &choice.tool_calls->front()) out += ',';
        out += '{';
        append_call_head(call, out);
      }
      out += ']';
    }
    out += '}';
  } else {
    out += ",\"text\":";
    append_json_string(choice.text, out);
  }
  out += ",\"logprobs\":";
  out += choice.logprobs.empty() ? "null" : choice.logprobs;
  out += ",\"finish_reason\":";
  append_json_string(choice.finish_reason, out);
  out += '}';
}

void ResponseWriter::append_response(std::string_view choices, Usage usage,
                                     std::string& out) const {
  out += "{\"id\":";
  append_json_string(options_.id, out);
  out += options_.is_chat ? ",\"object\":\"chat.completion\"" : ",\"object\":\"text_completion\"";
  out += ",\"created\":";
  append_decimal(static_cast<uint64_t>(options_.created_s), out);
  out += ",\"model\":";
  append_json_string(options_.model, out);
  out += ",\"choices\":[";
  out += choices;
  out += "],";
  append_usage(usage, out);
  out += '}';
}

}  // namespace blink
