// Reads and checks the JSON body of a completion request: body -> GenerationRequest, or the error
// to send.
//
// Nothing is ignored in silence: a field is honoured, has a value that changes nothing, or is
// refused by name.
#ifndef BLINK_FRONTEND_REQUEST_PARSER_H
#define BLINK_FRONTEND_REQUEST_PARSER_H

#include <cstdint>
#include <string_view>
#include <variant>

#include "frontend/api_error.h"
#include "frontend/generation_request.h"

namespace blink {

enum class Endpoint { completions, chat_completions };

struct RequestLimits {
  uint32_t vocab_size = 0;
  uint32_t sampler_features = 0;  // BLINK_SAMPLER_* of the ring
  uint32_t max_json_depth = 32;
  uint32_t max_stop_strings = 16;
  uint32_t max_stop_bytes = 1024;  // of one
  uint32_t max_choices = 8;
  bool has_chat_template = true;
  bool has_tools = false;        // the template takes them and the format of calls is known
  std::string_view target_name;  // for messages, such as "sm_90a"; outlives the parsing
};

std::variant<GenerationRequest, ApiError> parse_generation_request(Endpoint endpoint,
                                                                   std::string_view body,
                                                                   const RequestLimits& limits);

}  // namespace blink

#endif  // BLINK_FRONTEND_REQUEST_PARSER_H
