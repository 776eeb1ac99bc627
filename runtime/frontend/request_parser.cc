#include "frontend/request_parser.h"

#include <algorithm>
#include <string>
#include <utility>

#include <boost/json.hpp>

#include "blink/abi.h"
#include "frontend/chat_fields.h"
#include "frontend/field_reader.h"
#include "frontend/neutral_fields.h"
#include "frontend/sampling_fields.h"

namespace blink {
namespace {

namespace json = boost::json;

// Its upper limit depends on the prompt: GenerationPipeline checks it.
uint64_t read_max_tokens(std::string_view name, const json::value& value) {
  const int64_t number = read_integer(name, value);
  if (number < 1) reject(name, "'" + std::string(name) + "' must be at least 1.");
  return static_cast<uint64_t>(number);
}

class Parser {
 public:
  Parser(Endpoint endpoint, const RequestLimits& limits)
      : endpoint_(endpoint), limits_(limits), sampling_(limits, request_) {
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
    if (code == json::error::too_deep) {
      reject("",
             "The request body is nested deeper than " + std::to_string(limits_.max_json_depth) +
                 " levels.",
             "invalid_json");
    }
    if (code) {
      const std::string why = body.empty() ? "it is empty" : code.message();
      reject("", "The request body is not valid JSON: " + why + ".", "invalid_json");
    }
    return root;
  }

  bool read_common(std::string_view key, const json::value& value) {
    if (key == "model") {
      if (!value.is_string()) reject_type(key, "a string");
      request_.model = view(value.get_string());
      if (request_.model.empty()) reject(key, "'model' must be a model's name, or be left out.");
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
      return sampling_.read(key, value);
    }
    return true;
  }

  void read_stream_options(const json::value& value) {
    if (!value.is_object()) reject_type("stream_options", "an object");
    has_stream_options_ = true;
    for (const auto& [key, option] : value.get_object()) {
      const std::string name = "stream_options." + shortened(key);
      if (option.is_null()) continue;
      if (key == "include_usage") {
        request_.includes_usage = read_bool(name, option);
      } else if (key == "include_obfuscation") {
        read_bool(name, option);  // padding against traffic analysis; it is not part of the output
      } else if (key == "continuous_usage_stats") {
        request_.has_continuous_usage = read_bool(name, option);
      } else {
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
      if (key == "echo") {
        request_.echoes = read_bool(key, value);
        return true;
      }
      if (key != "prompt") return false;
      read_completion_prompt(value);
      has_prompt_ = true;
      return true;
    }
    if (key == "messages") {
      messages_ = read_messages(value);
      has_prompt_ = true;
    } else if (key == "chat_template_kwargs") {
      if (!value.is_object()) reject_type(key, "an object");
      template_kwargs_ = value.get_object();
    } else if (key == "add_generation_prompt") {
      adds_generation_prompt_ = read_bool(key, value);
    } else {
      return read_tool_fields(key, value);
    }
    return true;
  }

  bool read_tool_fields(std::string_view key, const json::value& value) {
    if (key == "tools") {
      request_.tool_names = read_tools(value);
      if (!request_.tool_names.empty()) tools_ = value.get_array();
    } else if (key == "tool_choice") {
      may_call_tools_ = read_tool_choice(value);
    } else if (key == "parallel_tool_calls") {
      request_.calls_in_parallel = read_bool(key, value);
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

  void read_neutral(std::string_view key, const json::value& value) const {
    switch (judge_field(key, value)) {
      case Neutrality::neutral:
        return;
      case Neutrality::unsupported:
        if (!request_.is_chat && speaks_of_tools(key)) {
          reject_unsupported(key, "is for chats: use /v1/chat/completions.");
        }
        reject_unsupported(key, "with this value is not supported; leave it out.");
      case Neutrality::unconstrained:
        reject_unsupported(
            key, std::string("is not supported: output is not constrained by a grammar here. Ask "
                             "for the format in the prompt and check what comes") +
                     (request_.is_chat && limits_.has_tools ? ", or offer 'tools'." : "."));
      case Neutrality::unknown:
        reject(key, "Unknown parameter: '" + shortened(key) + "'.", "unknown_parameter");
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
    if (max_completion_tokens_) request_.max_tokens_name = "max_completion_tokens";
    if (has_stream_options_ && !request_.streams) {
      reject("stream_options", "'stream_options' is only allowed when 'stream' is true.");
    }
    if (!may_call_tools_) request_.tool_names.clear();
    sampling_.finish();
    if (!request_.is_chat) return;
    if (!limits_.has_chat_template) {
      reject("messages", "This model has no chat template; use /v1/completions.",
             "unsupported_parameter");
    }
    if (!request_.tool_names.empty() && !limits_.has_tools) {
      reject_unsupported("tools",
                         "is not supported: this model's chat template has no tools, or calls them "
                         "in a format that is not known here.");
    }
    json::object input;
    input["messages"] = std::move(messages_);
    input["kwargs"] = std::move(template_kwargs_);
    input["add_generation_prompt"] = adds_generation_prompt_;
    if (!request_.tool_names.empty()) input["tools"] = std::move(tools_);
    request_.template_input = json::serialize(input);
  }

  Endpoint endpoint_;
  const RequestLimits& limits_;
  GenerationRequest request_;
  SamplingFields sampling_;
  std::optional<uint64_t> max_tokens_;
  std::optional<uint64_t> max_completion_tokens_;
  json::array messages_;
  json::array tools_;
  bool may_call_tools_ = true;
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
