#include "frontend/poll_pacer.h"

#include <algorithm>

namespace blink {

PollPacer::PollPacer(uint32_t min_interval_us, uint32_t max_interval_us, uint32_t max_polls_per_s)
    : min_interval_us_(min_interval_us),
      max_interval_us_(max_interval_us),
      interval_us_(min_interval_us),
      us_per_poll_(std::max<uint64_t>(1, (1'000'000 + max_polls_per_s - 1) / max_polls_per_s)),
      credit_us_(kBurst * us_per_poll_) {
  // The rate must allow one poll in each longest interval, or the first bound would not hold.
  us_per_poll_ = std::min<uint64_t>(us_per_poll_, max_interval_us_);
}

void PollPacer::set_max_interval_us(uint32_t max_interval_us) {
  max_interval_us_ = std::max<uint32_t>(max_interval_us, static_cast<uint32_t>(us_per_poll_));
}

uint32_t PollPacer::next_interval_us(uint32_t num_new_requests, uint64_t now_us) {
  const uint64_t passed_us = last_poll_us_ == 0 ? 0 : now_us - last_poll_us_;
  last_poll_us_ = now_us;
  credit_us_ = std::min(credit_us_ + passed_us, kBurst * us_per_poll_);
  credit_us_ -= std::min(credit_us_, us_per_poll_);
  interval_us_ = num_new_requests > 0
                     ? min_interval_us_
                     : std::min(interval_us_ + interval_us_ / 2 + 1, max_interval_us_);
  // Without credit for one more poll, wait until there is.
  const uint64_t missing_us = us_per_poll_ - std::min(credit_us_, us_per_poll_);
  const auto wait_us = std::max<uint64_t>(interval_us_, missing_us);
  return static_cast<uint32_t>(std::min<uint64_t>(wait_us, max_interval_us_));
}

}  // namespace blink
