// One request on its way through the pipeline: who may touch which part of it, and when.
//
// network thread -> ring -> token reader -> detokenizer -> network thread. A generation has one
// choice or several (n), each in a slot of its own. Before the token reader has them, they belong
// to the network thread; afterwards each section below belongs to the thread it names.
#ifndef BLINK_FRONTEND_GENERATION_H
#define BLINK_FRONTEND_GENERATION_H

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "frontend/api_error.h"
#include "frontend/logprob_tracker.h"
#include "frontend/response_writer.h"
#include "frontend/stop_matcher.h"
#include "frontend/text_codec.h"
#include "frontend/tool_call_parser.h"

namespace blink {

using Clock = std::chrono::steady_clock;

// Wakes whoever waits for a generation's output; network thread only.
class OutputWaiter {
 public:
  virtual ~OutputWaiter() = default;
  virtual void wake() = 0;
};

struct Generation;

// Calls of tools in a choice's text, found and, unless it is a stream, kept.
struct ToolCalls {
  ToolCallParser parser;
  std::vector<ToolCall> calls;
};

// One answer to a request: what the ring knows as a request of its own.
struct Choice {
  // Set before submission, read by all.
  Generation* generation = nullptr;  // outlives the choice's last event
  uint32_t slot = 0;                 // within this front end's range
  uint32_t sequence = 0;

  // Any thread; relaxed: the token reader looks at every poll, and it guards no data.
  std::atomic<bool> is_abort_requested{false};

  // Detokenizer.
  std::unique_ptr<TextDecoder> decoder;
  StopMatcher matcher;
  ResponseWriter writer;
  std::string text;  // not a stream: the whole answer
  uint32_t num_output_tokens = 0;
  bool is_answered = false;  // what follows is dropped: stop string found, failed, or complete
  const char* finish_reason = "";
  uint64_t num_shown_bytes = 0;  // kept where logprobs were asked for
  Clock::time_point first_token_at;
  Clock::time_point last_token_at;
  std::unique_ptr<LogprobTracker> logprobs;  // null: not asked for. put(): the token reader
  std::unique_ptr<ToolCalls> tools;          // null: calls are not looked for
};

struct Generation : std::enable_shared_from_this<Generation> {
  // Set before submission, read by all.
  uint32_t num_prompt_tokens = 0;
  uint32_t max_output_tokens = 0;
  uint32_t min_tokens = 0;
  uint32_t max_buffered_bytes = 0;
  bool streams = false;
  std::vector<uint32_t> stop_token_ids;  // EOS included unless ignored; their text is not shown
  std::string echo;                      // shown before each choice's text
  Clock::time_point submitted_at;
  Choice first;
  std::vector<std::unique_ptr<Choice>> others;  // n - 1

  // Any thread, as a choice's: all choices are to end, the client has gone.
  std::atomic<bool> is_abort_requested{false};

  // Detokenizer to network, for the log: relaxed, they order nothing.
  std::atomic<uint32_t> num_seen_tokens{0};
  std::atomic<uint64_t> ttft_ns{0};

  // Detokenizer.
  uint32_t num_output_tokens = 0;       // of all choices
  uint32_t num_unanswered_choices = 1;  // the response is complete without any
  uint32_t num_running_choices = 1;     // their last event has not come
  // The pipeline's own reference, set by the network thread; dropped with the last event.
  std::shared_ptr<Generation> pipeline_reference;

  template <typename Body>
  void for_each_choice(Body&& body) {
    body(first);
    for (const std::unique_ptr<Choice>& choice : others) body(*choice);
  }

  // Output: detokenizer to network, under the mutex. Held for the length of an append or a swap.
  std::mutex output_mutex;
  std::string output;                  // bytes of the response body
  bool is_output_complete = false;     // no more will come
  std::optional<ApiError> failure;     // instead of, or after part of, a body
  std::atomic<bool> is_queued{false};  // already on the network thread's ready queue

  // Network thread.
  OutputWaiter* waiter = nullptr;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_GENERATION_H
