#include "frontend/request_parser.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include <boost/json.hpp>

#include "blink/abi.h"
#include "frontend/neutral_fields.h"

namespace blink {
namespace {

namespace json = boost::json;

// Thrown inside this file only, and turned into the result at its edge.
struct Rejected {
  ApiError error;
};

[[noreturn]] void reject(std::string_view param, std::string message,
                         std::string code = "invalid_value") {
  throw Rejected{bad_request(std::string(param), std::move(message), std::move(code))};
}

[[noreturn]] void reject_type(std::string_view param, const char* expected) {
  reject(param, "'" + std::string(param) + "' must be " + expected + ".", "invalid_type");
}

std::string_view view(const json::string& text) { return {text.data(), text.size()}; }

bool read_bool(std::string_view name, const json::value& value) {
  if (!value.is_bool()) reject_type(name, "true or false");
  return value.get_bool();
}

double read_number(std::string_view name, const json::value& value, double low, double high,
                   const char* range) {
  if (!value.is_number()) reject_type(name, "a number");
  const auto number = value.to_number<double>();
  if (!(number >= low && number <= high)) {  // NaN fails too
    reject(name, "'" + std::string(name) + "' must be " + range + ".");
  }
  return number;
}

// Integers only; 3.0 is taken as 3, as many clients send every number as a double.
int64_t read_integer(std::string_view name, const json::value& value) {
  if (value.is_int64()) return value.get_int64();
  if (value.is_uint64()) {
    return value.get_uint64() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
               ? std::numeric_limits<int64_t>::max()
               : static_cast<int64_t>(value.get_uint64());
  }
  if (value.is_double()) {
    const double number = value.get_double();
    if (std::trunc(number) == number && std::abs(number) < 9e15)
      return static_cast<int64_t>(number);
  }
  reject_type(name, "an integer");
}

uint32_t read_max_tokens(std::string_view name, const json::value& value) {
  const int64_t number = read_integer(name, value);
  if (number < 1) reject(name, "'" + std::string(name) + "' must be at least 1.");
  return static_cast<uint32_t>(std::min<int64_t>(number, std::numeric_limits<uint32_t>::max()));
}

uint32_t read_token_id(std::string_view name, const json::value& value, uint32_t vocab_size) {
  const int64_t id = read_integer(name, value);
  if (id < 0 || id >= vocab_size) {
    reject(name, "'" + std::string(name) + "' holds token id " + std::to_string(id) +
                     "; ids of this model are 0.." + std::to_string(vocab_size - 1) + ".");
  }
  return static_cast<uint32_t>(id);
}

class Parser {
 public:
  Parser(Endpoint endpoint, const RequestLimits& limits) : endpoint_(endpoint), limits_(limits) {
    request_.is_chat = endpoint == Endpoint::chat_completions;
    request_.adds_special_tokens = !request_.is_chat;  // the chat template writes them itself
  }

  GenerationRequest parse(std::string_view body) {
    const json::value root = parse_json(body);
    if (!root.is_object()) reject("", "The request body must be a JSON object.", "invalid_json");
    for (const auto& [key, value] : root.get_object()) {
      if (value.is_null()) continue;
      if (!read_common(key, value) && !read_prompt(key, value)) read_neutral(key, value);
    }
    finish();
    return std::move(request_);
  }

 private:
  json::value parse_json(std::string_view body) const {
    json::parse_options options;
    options.max_depth = limits_.max_json_depth;
    boost::system::error_code code;
    json::value root = json::parse({body.data(), body.size()}, code, {}, options);
    if (code)
      reject("", "The request body is not valid JSON: " + code.message() + ".", "invalid_json");
    return root;
  }

  bool read_common(std::string_view key, const json::value& value) {
    if (key == "model") {
      if (!value.is_string()) reject_type(key, "a string");
      request_.model = view(value.get_string());
    } else if (key == "max_tokens") {
      max_tokens_ = read_max_tokens(key, value);
    } else if (key == "max_completion_tokens") {
      max_completion_tokens_ = read_max_tokens(key, value);
    } else if (key == "stream") {
      request_.streams = read_bool(key, value);
    } else if (key == "stream_options") {
      read_stream_options(value);
    } else if (key == "ignore_eos") {
      request_.ignores_eos = read_bool(key, value);
    } else if (key == "skip_special_tokens") {
      request_.skips_special_tokens = read_bool(key, value);
    } else if (key == "add_special_tokens") {
      request_.adds_special_tokens = read_bool(key, value);
    } else if (key == "stop") {
      read_stop(value);
    } else if (key == "stop_token_ids") {
      read_stop_token_ids(value);
    } else {
      return read_sampling(key, value);
    }
    return true;
  }

  bool read_sampling(std::string_view key, const json::value& value) {
    if (key == "temperature") {
      const double number = read_number(key, value, 0, 2, "between 0 and 2");
      request_.temperature = number < 1e-5 ? 0.0f : static_cast<float>(number);
    } else if (key == "top_p") {
      const double number = read_number(key, value, 0, 1, "between 0 and 1");
      // 0 asks for the most likely token alone; the ring's 0 would not say so.
      request_.top_p = std::max(static_cast<float>(number), std::numeric_limits<float>::min());
      require_feature(key, BLINK_SAMPLER_TOP_P, number < 1);
    } else if (key == "min_p") {
      request_.min_p = static_cast<float>(read_number(key, value, 0, 1, "between 0 and 1"));
      require_feature(key, BLINK_SAMPLER_MIN_P, request_.min_p > 0);
    } else if (key == "top_k") {
      const int64_t number = read_integer(key, value);
      if (number < -1) reject(key, "'top_k' must be -1 or 0 (off), or positive.");
      request_.top_k =
          number <= 0 || number >= limits_.vocab_size ? 0 : static_cast<uint32_t>(number);
      require_feature(key, BLINK_SAMPLER_TOP_K, request_.top_k > 0);
    } else if (key == "seed") {
      request_.seed =
          value.is_uint64() ? value.get_uint64() : static_cast<uint64_t>(read_integer(key, value));
    } else {
      return false;
    }
    return true;
  }

  void require_feature(std::string_view name, uint32_t feature, bool is_used) const {
    if (is_used && (limits_.sampler_features & feature) == 0) {
      reject(name, "'" + std::string(name) + "' is not supported by this model's sampler.",
             "unsupported_parameter");
    }
  }

  void read_stream_options(const json::value& value) {
    if (!value.is_object()) reject_type("stream_options", "an object");
    has_stream_options_ = true;
    for (const auto& [key, option] : value.get_object()) {
      const std::string name = "stream_options." + std::string(key);
      if (option.is_null()) continue;
      if (key == "include_usage") {
        request_.includes_usage = read_bool(name, option);
      } else if (key == "include_obfuscation") {
        read_bool(name, option);  // padding against traffic analysis; it is not part of the output
      } else if (!(key == "continuous_usage_stats" && !read_bool(name, option))) {
        reject(name, "'" + name + "' is not supported.", "unsupported_parameter");
      }
    }
  }

  void read_stop(const json::value& value) {
    if (value.is_string()) {
      add_stop(value);
      return;
    }
    if (!value.is_array()) reject_type("stop", "a string or a list of strings");
    const json::array& list = value.get_array();
    if (list.size() > limits_.max_stop_strings) {
      reject("stop", "'stop' holds " + std::to_string(list.size()) + " strings; at most " +
                         std::to_string(limits_.max_stop_strings) + " are allowed.");
    }
    for (const json::value& item : list) add_stop(item);
  }

  void add_stop(const json::value& value) {
    if (!value.is_string()) reject_type("stop", "a string or a list of strings");
    const std::string_view text = view(value.get_string());
    if (text.empty()) reject("stop", "'stop' holds an empty string.");
    if (text.size() > limits_.max_stop_bytes) {
      reject("stop", "'stop' holds a string of " + std::to_string(text.size()) +
                         " bytes; at most " + std::to_string(limits_.max_stop_bytes) +
                         " are allowed.");
    }
    request_.stop.emplace_back(text);
  }

  void read_stop_token_ids(const json::value& value) {
    if (!value.is_array()) reject_type("stop_token_ids", "a list of token ids");
    const json::array& list = value.get_array();
    if (list.size() > BLINK_MAX_STOP_TOKEN_IDS) {
      reject("stop_token_ids", "'stop_token_ids' holds " + std::to_string(list.size()) +
                                   " ids; at most " + std::to_string(BLINK_MAX_STOP_TOKEN_IDS) +
                                   " are allowed.");
    }
    for (const json::value& item : list) {
      request_.stop_token_ids.push_back(read_token_id("stop_token_ids", item, limits_.vocab_size));
    }
  }

  bool read_prompt(std::string_view key, const json::value& value) {
    if (endpoint_ == Endpoint::completions) {
      if (key != "prompt") return false;
      read_completion_prompt(value);
      has_prompt_ = true;
      return true;
    }
    if (key == "messages") {
      read_messages(value);
      has_prompt_ = true;
    } else if (key == "chat_template_kwargs") {
      if (!value.is_object()) reject_type(key, "an object");
      template_kwargs_ = value.get_object();
    } else if (key == "add_generation_prompt") {
      adds_generation_prompt_ = read_bool(key, value);
    } else {
      return false;
    }
    return true;
  }

  void read_completion_prompt(const json::value& value) {
    if (value.is_string()) {
      request_.prompt_text = view(value.get_string());
      if (request_.prompt_text.empty()) reject("prompt", "'prompt' is empty.");
      return;
    }
    if (!value.is_array()) reject_type("prompt", "a string or a list of token ids");
    const json::array& list = value.get_array();
    if (list.empty()) reject("prompt", "'prompt' is empty.");
    if (list[0].is_string() || list[0].is_array()) {
      if (list.size() > 1) {
        reject("prompt",
               "'prompt' holds " + std::to_string(list.size()) +
                   " prompts; one request takes one prompt.",
               "unsupported_parameter");
      }
      if (list[0].is_array() &&
          (list[0].get_array().empty() || !list[0].get_array()[0].is_number())) {
        reject_type("prompt", "a string or a non-empty list of token ids");
      }
      read_completion_prompt(list[0]);
      return;
    }
    request_.prompt_token_ids.reserve(list.size());
    for (const json::value& item : list) {
      request_.prompt_token_ids.push_back(read_token_id("prompt", item, limits_.vocab_size));
    }
    request_.has_token_ids = true;
  }

  void read_messages(const json::value& value) {
    if (!value.is_array()) reject_type("messages", "a list of messages");
    const json::array& list = value.get_array();
    if (list.empty()) reject("messages", "'messages' is empty.");
    messages_.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string name = "messages[" + std::to_string(i) + "]";
      if (!list[i].is_object()) reject_type(name, "an object");
      json::object message = list[i].get_object();
      const json::value* role = message.if_contains("role");
      if (role == nullptr || !role->is_string() || role->get_string().empty()) {
        reject_type(name + ".role", "a string");
      }
      read_content(name, message);
      messages_.push_back(std::move(message));
    }
  }

  // Text parts become one string: what templates expect.
  void read_content(const std::string& name, json::object& message) {
    json::value* content = message.if_contains("content");
    const bool may_lack = message.contains("tool_calls") || message.contains("function_call");
    if (content == nullptr || content->is_null()) {
      if (!may_lack) reject_type(name + ".content", "a string or a list of text parts");
      message["content"] = "";
      return;
    }
    if (content->is_string()) return;
    if (!content->is_array()) reject_type(name + ".content", "a string or a list of text parts");
    std::string text;
    const json::array& parts = content->get_array();
    for (size_t i = 0; i < parts.size(); ++i) {
      const std::string part_name = name + ".content[" + std::to_string(i) + "]";
      if (!parts[i].is_object()) reject_type(part_name, "an object");
      const json::object& part = parts[i].get_object();
      const json::value* type = part.if_contains("type");
      if (type == nullptr || !type->is_string()) reject_type(part_name + ".type", "a string");
      if (type->get_string() != "text") {
        reject(part_name + ".type",
               "Content parts of type '" + std::string(view(type->get_string())) +
                   "' are not supported; this model takes text.",
               "unsupported_parameter");
      }
      const json::value* part_text = part.if_contains("text");
      if (part_text == nullptr || !part_text->is_string())
        reject_type(part_name + ".text", "a string");
      text += view(part_text->get_string());
    }
    *content = json::string(text.data(), text.size());
  }

  void read_neutral(std::string_view key, const json::value& value) const {
    switch (judge_field(key, value)) {
      case Neutrality::neutral:
        return;
      case Neutrality::unsupported:
        reject(key, "'" + std::string(key) + "' with this value is not supported.",
               "unsupported_parameter");
      case Neutrality::unknown:
        reject(key, "Unknown parameter: '" + std::string(key) + "'.", "unknown_parameter");
    }
  }

  void finish() {
    if (!has_prompt_) {
      const char* name = request_.is_chat ? "messages" : "prompt";
      reject(name, std::string("Missing required parameter: '") + name + "'.",
             "missing_required_parameter");
    }
    if (max_tokens_ && max_completion_tokens_ && *max_tokens_ != *max_completion_tokens_) {
      reject("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; send one of them.");
    }
    request_.max_tokens = max_completion_tokens_ ? max_completion_tokens_ : max_tokens_;
    if (has_stream_options_ && !request_.streams) {
      reject("stream_options", "'stream_options' is only allowed when 'stream' is true.");
    }
    if (!request_.is_chat) return;
    if (!limits_.has_chat_template) {
      reject("messages", "This model has no chat template; use /v1/completions.",
             "unsupported_parameter");
    }
    json::object input;
    input["messages"] = std::move(messages_);
    input["kwargs"] = std::move(template_kwargs_);
    input["add_generation_prompt"] = adds_generation_prompt_;
    request_.template_input = json::serialize(input);
  }

  Endpoint endpoint_;
  const RequestLimits& limits_;
  GenerationRequest request_;
  std::optional<uint32_t> max_tokens_;
  std::optional<uint32_t> max_completion_tokens_;
  json::array messages_;
  json::object template_kwargs_;
  bool adds_generation_prompt_ = true;
  bool has_stream_options_ = false;
  bool has_prompt_ = false;
};

}  // namespace

std::variant<GenerationRequest, ApiError> parse_generation_request(Endpoint endpoint,
                                                                   std::string_view body,
                                                                   const RequestLimits& limits) {
  try {
    return Parser(endpoint, limits).parse(body);
  } catch (Rejected& rejected) {
    return std::move(rejected.error);
  }
}

}  // namespace blink
