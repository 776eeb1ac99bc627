// When to look at the ring again: soon for a new request, rarely enough for everything else.
#ifndef BLINK_FRONTEND_POLL_PACER_H
#define BLINK_FRONTEND_POLL_PACER_H

#include <cstdint>

namespace blink {

// Two bounds, whatever the traffic:
//   - no interval is longer than max_interval_us, so a token is seen at most that long (and one
//     pass) after it is visible;
//   - over any stretch of t microseconds there are at most kBurst + t * max_polls_per_s / 10^6
//     polls.
// Between them an interval is short after a new request (its claim and first token are near, if the
// owner is quick) and grows by half with each pass. Passes that find tokens do not shorten it: each
// wakes two more threads, and tokens that come close together are cheaper read together.
//
// Pure: time comes in as an argument.
class PollPacer {
 public:
  static constexpr uint32_t kBurst = 64;  // polls saved up while there were none

  PollPacer(uint32_t min_interval_us, uint32_t max_interval_us, uint32_t max_polls_per_s);

  // The owner's steps are long: looking more often gains nothing. Never below the constructor's
  // maximum.
  void set_max_interval_us(uint32_t max_interval_us);
  uint32_t max_interval_us() const { return max_interval_us_; }

  // Called after each pass, with how many requests were new in it. Returns the time to wait.
  uint32_t next_interval_us(uint32_t num_new_requests, uint64_t now_us);

 private:
  uint32_t min_interval_us_;
  uint32_t max_interval_us_;
  uint32_t interval_us_;
  uint64_t us_per_poll_;  // 10^6 / max_polls_per_s
  uint64_t credit_us_;    // us_per_poll_ for each poll that may be made at once
  uint64_t last_poll_us_ = 0;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_POLL_PACER_H
