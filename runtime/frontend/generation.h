// One request on its way through the pipeline: who may touch which part of it, and when.
//
// network thread -> ring -> token reader -> detokenizer -> network thread. Before the token reader
// has it, a generation belongs to the network thread; afterwards each section below belongs to the
// thread it names.
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
#include "frontend/response_writer.h"
#include "frontend/stop_matcher.h"
#include "frontend/text_codec.h"

namespace blink {

using Clock = std::chrono::steady_clock;

// Wakes whoever waits for a generation's output; network thread only.
class OutputWaiter {
 public:
  virtual ~OutputWaiter() = default;
  virtual void wake() = 0;
};

struct Generation : std::enable_shared_from_this<Generation> {
  // Set before submission, read by all.
  uint32_t slot = 0;  // within this front end's range
  uint32_t sequence = 0;
  uint32_t num_prompt_tokens = 0;
  uint32_t max_output_tokens = 0;
  uint32_t max_buffered_bytes = 0;
  bool streams = false;
  std::vector<uint32_t> stop_token_ids;  // EOS included unless ignored; their text is not shown
  Clock::time_point submitted_at;

  // Any thread; relaxed: the token reader looks at every poll, and it guards no data.
  std::atomic<bool> is_abort_requested{false};

  // Detokenizer to network, for the log: relaxed, they order nothing.
  std::atomic<uint32_t> num_seen_tokens{0};
  std::atomic<uint64_t> ttft_ns{0};

  // Detokenizer.
  std::unique_ptr<TextDecoder> decoder;
  StopMatcher matcher;
  ResponseWriter writer;
  std::string text;  // not a stream: the whole answer; a stream: scratch for one event
  uint32_t num_output_tokens = 0;
  bool is_answered = false;  // what follows is dropped: stop string found, failed, or complete
  Clock::time_point first_token_at;
  Clock::time_point last_token_at;
  // The pipeline's own reference, set by the network thread; dropped with the last event.
  std::shared_ptr<Generation> pipeline_reference;

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
