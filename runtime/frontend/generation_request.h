// A validated request of a client, before and after its text became token ids.
#ifndef BLINK_FRONTEND_GENERATION_REQUEST_H
#define BLINK_FRONTEND_GENERATION_REQUEST_H

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace blink {

struct GenerationRequest {
  bool is_chat = false;
  std::string model;                       // empty: not given
  std::string prompt_text;                 // completions, or the rendered chat
  std::vector<uint32_t> prompt_token_ids;  // given by the client, or encoded from prompt_text
  bool has_token_ids = false;              // prompt_token_ids came from the client
  bool adds_special_tokens = true;         // the tokenizer's BOS and such around prompt_text
  bool echoes = false;                     // completions: the prompt before the answer
  std::string template_input;              // chat: JSON for the template renderer

  std::optional<uint64_t> max_tokens;
  const char* max_tokens_name = "max_tokens";  // as the client calls it
  uint32_t min_tokens = 0;          // neither stop tokens nor stop strings end it earlier
  uint32_t num_choices = 1;         // choice i samples with seed + i
  float temperature = 1.0f;         // 0: greedy
  float top_p = 1.0f;               // 1: off
  float min_p = 0.0f;               // 0: off
  uint32_t top_k = 0;               // 0: off
  float presence_penalty = 0.0f;    // 0: off
  float frequency_penalty = 0.0f;   // 0: off
  float repetition_penalty = 1.0f;  // 1: off
  std::vector<std::pair<uint32_t, float>> logit_bias;
  std::optional<uint32_t> num_top_logprobs;  // besides the chosen token's
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  std::vector<uint32_t> stop_token_ids;
  std::vector<std::string> tool_names;  // none: calls are not looked for
  bool calls_in_parallel = true;        // false: the first call ends the answer
  bool ignores_eos = false;
  bool skips_special_tokens = true;
  bool streams = false;
  bool includes_usage = false;
  bool has_continuous_usage = false;  // in every chunk
};

}  // namespace blink

#endif  // BLINK_FRONTEND_GENERATION_REQUEST_H
