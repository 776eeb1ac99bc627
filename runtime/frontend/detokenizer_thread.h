// The thread that turns token events into response bytes: text, stop strings, SSE events, metrics.
#ifndef BLINK_FRONTEND_DETOKENIZER_THREAD_H
#define BLINK_FRONTEND_DETOKENIZER_THREAD_H

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

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
  void stop();

 private:
  void run();
  void handle(const TokenEvent& event);
  void take_tokens(Generation& generation, const TokenEvent& event, Clock::time_point now);
  void take_token(Generation& generation, uint32_t token_id);
  void end(Generation& generation, const TokenEvent& event);
  void answer(Generation& generation, const char* finish_reason);
  void fail(Generation& generation, ApiError error);
  void publish(Generation& generation, bool is_complete);

  Metrics& metrics_;
  SpscQueue<TokenEvent>& events_;
  Doorbell& events_bell_;
  ReadyQueue& ready_;
  std::function<void()> wake_network_;
  std::string piece_;  // text of one token
  std::string shown_;  // what the stop matcher let through
  std::string bytes_;  // response bytes of one event
  bool has_pushed_ = false;
  std::atomic<bool> is_stopping_{false};  // relaxed: the bell's release orders it
  std::thread thread_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_DETOKENIZER_THREAD_H
