// Fuzz target: the JSON body of a request. The first byte picks the endpoint and what the model
// can.
//
// What is let through must be within every bound that the ring has; what is not is named.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "blink/abi.h"
#include "frontend/request_parser.h"

// Only response_writer.cc has it, which is not linked here.
namespace blink {
std::string json_from_error(const ApiError&) { return {}; }
}  // namespace blink

namespace {

using namespace blink;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

bool is_within(float value, float low, float high) { return value >= low && value <= high; }

void check(const GenerationRequest& request, const RequestLimits& limits) {
  const auto is_id = [&](uint32_t id) { return id < limits.vocab_size; };
  require(is_within(request.temperature, 0, 2), "temperature");
  require(request.top_p > 0 && request.top_p <= 1, "top_p");
  require(is_within(request.min_p, 0, 1), "min_p");
  require(request.top_k < limits.vocab_size, "top_k");
  require(is_within(request.presence_penalty, -2, 2), "presence_penalty");
  require(is_within(request.frequency_penalty, -2, 2), "frequency_penalty");
  require(request.repetition_penalty > 0 && std::isfinite(request.repetition_penalty),
          "repetition_penalty");
  require(request.num_choices >= 1 && request.num_choices <= limits.max_choices, "n");
  require(!request.max_tokens || *request.max_tokens >= 1, "max_tokens");
  require(request.num_top_logprobs.value_or(0) <= 5, "logprobs");
  require(request.stop.size() <= limits.max_stop_strings, "number of stop strings");
  for (const std::string& stop : request.stop) {
    require(!stop.empty() && stop.size() <= limits.max_stop_bytes, "stop string");
  }
  require(request.stop_token_ids.size() <= BLINK_MAX_STOP_TOKEN_IDS, "number of stop tokens");
  for (const uint32_t id : request.stop_token_ids) require(is_id(id), "stop token");
  require(request.logit_bias.size() <= 32, "number of biases");
  for (const auto& [id, bias] : request.logit_bias) {
    require(is_id(id) && is_within(bias, -100, 100), "logit_bias");
  }
  for (const uint32_t id : request.prompt_token_ids) require(is_id(id), "prompt token");
  require(request.has_token_ids == !request.prompt_token_ids.empty(), "prompt");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  RequestLimits limits;
  limits.vocab_size = 1000;
  limits.sampler_features = data[0] & 2 ? ~0u : 0u;
  limits.has_tools = (data[0] & 4) != 0;
  limits.has_chat_template = (data[0] & 8) == 0;
  limits.max_json_depth = 16;
  const auto endpoint = data[0] & 1 ? Endpoint::chat_completions : Endpoint::completions;
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto result = parse_generation_request(endpoint, body, limits);
  if (const auto* error = std::get_if<ApiError>(&result)) {
    require(error->http_status == 400, "a bad body is the client's fault");
    require(!error->message.empty() && !error->code.empty(), "an error says what is wrong");
  } else {
    check(std::get<GenerationRequest>(result), limits);
  }
  return 0;
}
