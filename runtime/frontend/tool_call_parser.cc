#include "frontend/tool_call_parser.h"

#include <algorithm>
#include <utility>

#include <boost/json/parse.hpp>
#include <boost/json/stream_parser.hpp>

namespace blink {
namespace {

namespace json = boost::json;

constexpr std::string_view kOpenTag = "<tool_call>";
constexpr std::string_view kCloseTag = "</tool_call>";
constexpr std::string_view kPythonTag = "<|python_tag|>";

bool is_space(char byte) { return byte == ' ' || byte == '\n' || byte == '\t' || byte == '\r'; }

bool is_arguments(std::string_view key) { return key == "arguments" || key == "parameters"; }

}  // namespace

// The JSON object of one call, byte by byte. Boost's parser says whether the bytes are JSON; beside
// it, the members of the outermost object are followed.
class ToolCallParser::CallObject {
 public:
  explicit CallObject(const std::vector<std::string>& names) : names_(names) {}

  enum class State : uint8_t { open, whole, broken };

  State take(char byte) {
    if (depth_ == 0 && byte != '{') return is_space(byte) ? State::open : State::broken;
    boost::system::error_code code;
    parser_.write_some(&byte, 1, code);
    if (code || !follow(byte)) return State::broken;
    if (!parser_.done()) return State::open;
    return has_name_ ? State::whole : State::broken;
  }

  bool has_name() const { return has_name_; }
  const std::string& name() const { return name_; }

  // The arguments that came since the last call of this.
  std::string take_arguments() { return std::exchange(arguments_, {}); }
  bool has_arguments() const { return has_arguments_; }

 private:
  // False: JSON perhaps, but no call.
  bool follow(char byte) {
    if (is_in_arguments_) arguments_ += byte;
    if (is_in_string_) return follow_string(byte);
    switch (byte) {
      case '"':
        is_in_string_ = true;
        token_ = byte;
        return depth_ != 1 || !is_value_ || can_be_text();
      case '{':
      case '[':
        if (depth_ == 1 && !begin_nested(byte)) return false;
        ++depth_;
        return true;
      case '}':
      case ']':
        if (--depth_ == 1) is_in_arguments_ = false;
        return true;
      case ':':
        if (depth_ == 1) is_value_ = true;
        return true;
      case ',':
        if (depth_ == 1) is_value_ = false;
        return true;
      default:
        // A number or word at the outermost level.
        return is_space(byte) || depth_ != 1 || can_be_plain();
    }
  }

  bool follow_string(char byte) {
    if (depth_ == 1) token_ += byte;
    if (is_escaped_) {
      is_escaped_ = false;
    } else if (byte == '\\') {
      is_escaped_ = true;
    } else if (byte == '"') {
      is_in_string_ = false;
      if (depth_ == 1) return is_value_ ? end_value() : end_key();
    }
    return true;
  }

  // Arguments must be an object, and a name text.
  bool can_be_text() const { return !is_arguments(key_); }
  bool can_be_plain() const { return !is_arguments(key_) && key_ != "name"; }

  bool begin_nested(char byte) {
    if (key_ == "name") return false;
    if (!is_arguments(key_)) return true;
    if (byte != '{') return false;
    is_in_arguments_ = has_arguments_ = true;
    arguments_ += byte;
    return true;
  }

  bool end_key() {
    key_ = text_of_token();
    if (is_arguments(key_)) return !has_arguments_;
    if (key_ == "name") return !has_name_;
    return key_ == "type" || key_ == "id";
  }

  bool end_value() {
    if (key_ != "name") return true;
    name_ = text_of_token();
    has_name_ = std::find(names_.begin(), names_.end(), name_) != names_.end();
    return has_name_;
  }

  std::string text_of_token() const {
    boost::system::error_code code;
    const json::value text = json::parse(token_, code);
    if (code || !text.is_string()) return {};
    return std::string(text.get_string().data(), text.get_string().size());
  }

  const std::vector<std::string>& names_;
  json::stream_parser parser_;
  int depth_ = 0;
  bool is_in_string_ = false;
  bool is_escaped_ = false;
  bool is_value_ = false;  // past the colon of a member of the outermost object
  bool is_in_arguments_ = false;
  bool has_arguments_ = false;
  bool has_name_ = false;
  std::string token_;  // the text being read, quotes and escapes included
  std::string key_;
  std::string name_;
  std::string arguments_;
};

ToolCallParser::ToolCallParser(ToolFormat format, std::vector<std::string> names,
                               bool calls_in_parallel)
    : format_(format), names_(std::move(names)), calls_in_parallel_(calls_in_parallel) {
  is_plain_ = format == ToolFormat::none;
}

ToolCallParser::~ToolCallParser() = default;
ToolCallParser::ToolCallParser(ToolCallParser&&) noexcept = default;
ToolCallParser& ToolCallParser::operator=(ToolCallParser&&) noexcept = default;

void ToolCallParser::feed(std::string_view text, std::vector<ToolPiece>& out) {
  for (size_t i = 0; i < text.size() && !is_full_; ++i) {
    if (is_plain_) {
      emit_content(text.substr(i), out);
      return;
    }
    scan(text[i], out);
  }
  // Arguments leave once a piece of text, not once a byte.
  if (call_ != nullptr && call_->has_name()) {
    std::string arguments = call_->take_arguments();
    if (!arguments.empty()) out.push_back({ToolPiece::Kind::arguments, std::move(arguments)});
  }
}

void ToolCallParser::scan(char byte, std::vector<ToolPiece>& out) {
  if (is_plain_) {
    emit_content({&byte, 1}, out);
  } else if (call_ != nullptr) {
    scan_call(byte, out);
  } else if (format_ == ToolFormat::hermes) {
    scan_hermes(byte, out);
  } else {
    scan_llama3(byte, out);
  }
}

void ToolCallParser::scan_hermes(char byte, std::vector<ToolPiece>& out) {
  if (num_matched_ == 0) {
    if (byte == '<') {
      tag_ = kOpenTag;
      num_matched_ = 1;
    } else if (!is_space(byte)) {
      release_held(out);
      emit_content({&byte, 1}, out);
    } else if (!is_after_call_) {
      spaces_ += byte;
    }
    return;
  }
  if (num_matched_ == 1 && byte == '/' && may_close_) tag_ = kCloseTag;
  if (byte != tag_[num_matched_]) {
    // "<" stands only at the start of a tag, so nothing but this byte can begin one.
    release_held(out);
    scan(byte, out);
    return;
  }
  if (++num_matched_ < tag_.size()) return;
  num_matched_ = 0;
  if (tag_ == kCloseTag) {
    may_close_ = false;
  } else {
    raw_ = spaces_ + std::string(kOpenTag);
    begin_call();
  }
}

void ToolCallParser::scan_llama3(char byte, std::vector<ToolPiece>& out) {
  if (num_matched_ > 0) {
    if (byte == tag_[num_matched_]) {
      if (++num_matched_ < tag_.size()) return;
      num_matched_ = 0;
      spaces_ += kPythonTag;  // goes with the white space: shown only if no call follows
      may_close_ = false;
      return;
    }
  } else if (is_space(byte)) {
    if (!is_after_call_) spaces_ += byte;
    return;
  } else if (byte == ';' && is_after_call_ && may_close_) {
    may_close_ = false;
    return;
  } else if (byte == '<' && !is_after_call_ && spaces_.find('<') == std::string::npos) {
    tag_ = kPythonTag;
    num_matched_ = 1;
    return;
  } else if (byte == '{') {
    raw_ = spaces_;
    begin_call();
    scan_call(byte, out);
    return;
  }
  is_plain_ = true;
  release_held(out);
  emit_content({&byte, 1}, out);
}

void ToolCallParser::begin_call() {
  spaces_.clear();
  is_after_call_ = false;
  call_ = std::make_unique<CallObject>(names_);
}

void ToolCallParser::scan_call(char byte, std::vector<ToolPiece>& out) {
  const bool had_name = call_->has_name();
  const CallObject::State state = call_->take(byte);
  if (state == CallObject::State::broken) {
    lose_call(out);
    emit_content({&byte, 1}, out);
    return;
  }
  raw_ += byte;
  if (!had_name && call_->has_name()) out.push_back({ToolPiece::Kind::call_begin, call_->name()});
  if (state == CallObject::State::whole) end_call(out);
}

void ToolCallParser::lose_call(std::vector<ToolPiece>& out) {
  const bool has_begun = call_->has_name();
  call_.reset();
  is_plain_ = true;
  out.push_back(
      {has_begun ? ToolPiece::Kind::call_lost : ToolPiece::Kind::content, std::exchange(raw_, {})});
}

void ToolCallParser::end_call(std::vector<ToolPiece>& out) {
  std::string arguments = call_->has_arguments() ? call_->take_arguments() : "{}";
  if (!arguments.empty()) out.push_back({ToolPiece::Kind::arguments, std::move(arguments)});
  out.push_back({ToolPiece::Kind::call_end, {}});
  call_.reset();
  raw_.clear();
  ++num_whole_calls_;
  is_after_call_ = may_close_ = true;
  is_full_ = !calls_in_parallel_;
}

// What might have stood before a call, or been one's beginning, does not.
void ToolCallParser::release_held(std::vector<ToolPiece>& out) {
  emit_content(spaces_, out);
  emit_content(tag_.substr(0, num_matched_), out);
  spaces_.clear();
  num_matched_ = 0;
  is_after_call_ = may_close_ = false;
}

void ToolCallParser::emit_content(std::string_view text, std::vector<ToolPiece>& out) {
  if (text.empty()) return;
  if (!out.empty() && out.back().kind == ToolPiece::Kind::content) {
    out.back().text += text;
  } else {
    out.push_back({ToolPiece::Kind::content, std::string(text)});
  }
}

void ToolCallParser::finish(std::vector<ToolPiece>& out) {
  if (is_full_) return;
  if (call_ != nullptr) {
    lose_call(out);
  } else if (!is_plain_) {
    release_held(out);
  }
}

}  // namespace blink
