// The thread that turns token events into response bytes: text, stop strings, SSE events, metrics.
#ifndef BLINK_FRONTEND_DETOKENIZER_THREAD_H
#define BLINK_FRONTEND_DETOKENIZER_THREAD_H

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "frontend/generation.h"
#include "frontend/metrics.h"
#include "frontend/spsc_queue.h"
#include "frontend/token_event.h"

namespace blink {

// Cost per token does not grow with the answer. No allocation per token once a generation's buffers
// have grown; the lock it takes is the generation's own, against a reader that swaps a buffer.
class DetokenizerThread {
 public:
  using ReadyQueue = SpscQueue<std::shared_ptr<Generation>>;

  // `wake_network` is called after something was pushed to `ready`; it must be cheap when nothing
  // sleeps.
  DetokenizerThread(Metrics& metrics, SpscQueue<TokenEvent>& events, Doorbell& events_bell,
                    ReadyQueue& ready, std::function<void()> wake_network);
  ~DetokenizerThread() { stop(); }

  void start();
  // Ends after every event that was pushed before this call; the reader pushes none meanwhile.
  void stop();

 private:
  void run();
  void handle(const TokenEvent& event);
  void take_tokens(Choice& choice, const TokenEvent& event, Clock::time_point now);
  void take_token(Choice& choice, uint32_t token_id);
  void show(Choice& choice, bool has_stopped);
  void show_with_tools(Choice& choice, bool is_end);
  void show_piece(Choice& choice, const ToolPiece& piece);
  void end(Choice& choice, const TokenEvent& event);
  void end_text(Choice& choice, const char* finish_reason);
  void answer(Choice& choice, const char* finish_reason);
  void append_whole_response(Generation& generation);
  void fail(Generation& generation, ApiError error, bool is_counted = true);
  void publish(Generation& generation, bool is_complete);

  Metrics& metrics_;
  SpscQueue<TokenEvent>& events_;
  Doorbell& events_bell_;
  ReadyQueue& ready_;
  std::function<void()> wake_network_;
  std::string piece_;  // text of one token
  std::string shown_;  // what the stop matcher let through
  std::string bytes_;  // response bytes of one event
  std::vector<ToolPiece> pieces_;
  bool has_pushed_ = false;
  std::atomic<bool> is_stopping_{false};
  std::thread thread_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_DETOKENIZER_THREAD_H
