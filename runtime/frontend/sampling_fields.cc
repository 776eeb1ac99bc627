#include "frontend/sampling_fields.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <string>

#include "blink/abi.h"
#include "frontend/field_reader.h"

namespace blink {

namespace json = boost::json;

bool SamplingFields::read(std::string_view name, const json::value& value) {
  if (name == "temperature") {
    const double number = read_number(name, value, 0, 2, "between 0 and 2");
    request_.temperature = number < 1e-5 ? 0.0f : static_cast<float>(number);
  } else if (name == "seed") {
    request_.seed =
        value.is_uint64() ? value.get_uint64() : static_cast<uint64_t>(read_integer(name, value));
  } else if (name == "n") {
    if (value.is_bool()) reject_type(name, "an integer");
    request_.num_choices =
        static_cast<uint32_t>(read_integer_between(name, value, 1, limits_.max_choices));
  } else if (name == "best_of") {
    best_of_ = read_integer(name, value);
  } else if (name == "min_tokens") {
    request_.min_tokens = static_cast<uint32_t>(
        read_integer_between(name, value, 0, std::numeric_limits<uint32_t>::max()));
  } else if (name == "logit_bias") {
    read_logit_bias(value);
  } else if (name == "logprobs" || (name == "top_logprobs" && request_.is_chat)) {
    read_logprobs(name, value);
  } else {
    return read_cuts(name, value) || read_penalty(name, value);
  }
  return true;
}

bool SamplingFields::read_cuts(std::string_view name, const json::value& value) {
  if (name == "top_p") {
    const double number = read_number(name, value, 0, 1, "between 0 and 1");
    // 0 asks for the most likely token alone; the ring's 0 would not say so.
    request_.top_p = std::max(static_cast<float>(number), std::numeric_limits<float>::min());
    require_feature(name, BLINK_SAMPLER_TOP_P, number < 1);
  } else if (name == "min_p") {
    request_.min_p = static_cast<float>(read_number(name, value, 0, 1, "between 0 and 1"));
    require_feature(name, BLINK_SAMPLER_MIN_P, request_.min_p > 0);
  } else if (name == "top_k") {
    const int64_t number = read_integer(name, value);
    if (number < -1) reject(name, "'top_k' must be -1 or 0 (off), or positive.");
    request_.top_k =
        number <= 0 || number >= limits_.vocab_size ? 0 : static_cast<uint32_t>(number);
    require_feature(name, BLINK_SAMPLER_TOP_K, request_.top_k > 0);
  } else {
    return false;
  }
  return true;
}

bool SamplingFields::read_penalty(std::string_view name, const json::value& value) {
  float* field = nullptr;
  float neutral = 0.0f;
  if (name == "presence_penalty") {
    field = &request_.presence_penalty;
  } else if (name == "frequency_penalty") {
    field = &request_.frequency_penalty;
  } else if (name == "repetition_penalty") {
    field = &request_.repetition_penalty;
    neutral = 1.0f;
  } else {
    return false;
  }
  *field = neutral == 0.0f
               ? static_cast<float>(read_number(name, value, -2, 2, "between -2 and 2"))
               : static_cast<float>(read_number(name, value, 0.01, 10, "between 0.01 and 10"));
  require_feature(name, BLINK_SAMPLER_PENALTIES, *field != neutral);
  return true;
}

// {"token id": bias}
void SamplingFields::read_logit_bias(const json::value& value) {
  if (!value.is_object()) reject_type("logit_bias", "an object of token ids and numbers");
  for (const auto& [key, item] : value.get_object()) {
    uint64_t id = 0;
    const std::string_view digits = key;
    const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), id);
    if (end.ec != std::errc() || end.ptr != digits.data() + digits.size()) {
      reject("logit_bias", "'logit_bias' must name tokens by their ids, as in {\"50\": -1}.");
    }
    const uint32_t token_id = read_token_id("logit_bias", json::value(id), limits_.vocab_size);
    const double bias = read_number("logit_bias", item, -100, 100, "between -100 and 100");
    if (bias != 0) request_.logit_bias.emplace_back(token_id, static_cast<float>(bias));
  }
  if (request_.logit_bias.size() > BLINK_MAX_LOGIT_BIAS) {
    reject("logit_bias", "'logit_bias' holds " + std::to_string(request_.logit_bias.size()) +
                             " tokens; at most " + std::to_string(BLINK_MAX_LOGIT_BIAS) +
                             " are allowed.");
  }
  require_feature("logit_bias", BLINK_SAMPLER_LOGIT_BIAS, !request_.logit_bias.empty());
}

// Completions: `logprobs` is the number of top tokens. Chats: a flag, and `top_logprobs` the
// number.
void SamplingFields::read_logprobs(std::string_view name, const json::value& value) {
  if (request_.is_chat && name == "logprobs") {
    wants_logprobs_ = read_bool(name, value);
    return;
  }
  if (!request_.is_chat && value.is_bool() && !value.get_bool()) return;  // some clients' "none"
  num_top_logprobs_ =
      static_cast<uint32_t>(read_integer_between(name, value, 0, BLINK_MAX_TOP_LOGPROBS));
}

void SamplingFields::finish_logprobs() {
  if (request_.is_chat) {
    const bool is_on = wants_logprobs_.value_or(false);
    if (!is_on && num_top_logprobs_.value_or(0) > 0) {
      reject("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.");
    }
    if (!is_on) return;
  } else if (!num_top_logprobs_) {
    return;
  }
  request_.num_top_logprobs = num_top_logprobs_.value_or(0);
  require_feature("logprobs", BLINK_SAMPLER_LOGPROBS, true);
  if (request_.echoes) {
    reject_unsupported("logprobs",
                       "with 'echo' is not supported: the prompt's own logprobs are not computed. "
                       "Leave one of them out.");
  }
  if (!request_.tool_names.empty()) {
    reject_unsupported("logprobs", "with 'tools' is not supported; leave one of them out.");
  }
}

void SamplingFields::finish() {
  if (best_of_ && *best_of_ != request_.num_choices) {
    reject_unsupported("best_of", "must equal 'n': every choice that is made is returned.");
  }
  finish_logprobs();
  // Without stop tokens there is nothing to hold back, so any sampler honours it.
  const bool has_stop_tokens = !request_.ignores_eos || !request_.stop_token_ids.empty();
  require_feature("min_tokens", BLINK_SAMPLER_MIN_TOKENS,
                  request_.min_tokens > 0 && has_stop_tokens);
}

void SamplingFields::require_feature(std::string_view name, uint32_t feature, bool is_used) const {
  if (!is_used || (limits_.sampler_features & feature) != 0) return;
  std::string message = "is not supported by the sampler of this model's target";
  if (!limits_.target_name.empty()) message += " (" + std::string(limits_.target_name) + ")";
  reject_unsupported(name, message + ".");
}

}  // namespace blink
