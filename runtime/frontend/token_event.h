// What the token reader tells the detokenizer: some tokens of one choice, and perhaps its end.
#ifndef BLINK_FRONTEND_TOKEN_EVENT_H
#define BLINK_FRONTEND_TOKEN_EVENT_H

#include <array>
#include <cstdint>

namespace blink {

struct Choice;

// How a choice ended, as the token reader saw it.
enum class Ending : uint8_t {
  none,      // it goes on
  stop,      // a stop token
  length,    // max_output_tokens
  aborted,   // on request
  failed,    // by the ring's owner; `error` says why
  stalled,   // the ring's owner shows no life
  stopped,   // the ring's owner was stopped
  lost,      // the link to the ring is lost
  mismatch,  // the output was another request's
};

// One cache line, so that a queue slot is written and read whole.
struct TokenEvent {
  static constexpr uint32_t kMaxTokens = 12;
  Choice* choice = nullptr;
  uint32_t error = 0;  // BLINK_ERROR_*
  Ending ending = Ending::none;
  uint8_t num_tokens = 0;
  uint16_t reserved = 0;
  std::array<uint32_t, kMaxTokens> token_ids{};
};
static_assert(sizeof(TokenEvent) == 64);

}  // namespace blink

#endif  // BLINK_FRONTEND_TOKEN_EVENT_H
