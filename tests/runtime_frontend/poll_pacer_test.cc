// The two bounds of poll_pacer.h, in virtual time.
#include "frontend/poll_pacer.h"

#include <deque>
#include <random>

#include "check.h"

namespace blink {
namespace {

// Any traffic, any configuration: no interval is longer than the maximum, and no stretch of time
// holds more polls than the burst and the rate allow.
TEST(pacer_keeps_both_bounds) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    const auto max_us = static_cast<uint32_t>(50 + random() % 1000);
    const auto min_us = static_cast<uint32_t>(1 + random() % max_us);
    // A rate that leaves room for the first bound; below it that one goes first.
    const auto rate = static_cast<uint32_t>(1'000'000 / max_us + 1 + random() % 30'000);
    const double us_per_poll = 1e6 / rate;
    PollPacer pacer(min_us, max_us, rate);
    std::deque<uint64_t> polls;
    uint64_t now_us = 1 + random() % 1'000'000;
    for (int i = 0; i < 2000; ++i) {
      polls.push_back(now_us);
      const auto num_new = static_cast<uint32_t>(random() % 4 == 0 ? random() % 3 : 0);
      const uint32_t wait_us = pacer.next_interval_us(num_new, now_us);
      CHECK(wait_us >= 1 && wait_us <= max_us);
      now_us += wait_us + (random() % 8 == 0 ? random() % 500 : 0);
      if (random() % 200 == 0) now_us += random() % 100'000;  // asleep
    }
    for (size_t first = 0; first < polls.size(); first += 37) {
      for (size_t last = first; last < polls.size(); last += 53) {
        const double stretch_us = static_cast<double>(polls[last] - polls[first]);
        const double allowed = 1 + PollPacer::kBurst + stretch_us / us_per_poll;
        CHECK(static_cast<double>(last - first + 1) <= allowed);
      }
    }
  }
}

TEST(pacer_looks_soon_for_a_new_request_and_rarely_afterwards) {
  PollPacer pacer(20, 200, 10'000);
  uint64_t now_us = 1000;
  CHECK_EQUAL(pacer.next_interval_us(1, now_us), 20u);
  uint32_t wait_us = 20;
  for (int i = 0; i < 20; ++i) {
    now_us += wait_us;
    const uint32_t next_us = pacer.next_interval_us(0, now_us);
    CHECK(next_us > wait_us || next_us == 200);
    wait_us = next_us;
  }
  CHECK_EQUAL(wait_us, 200u);
  pacer.set_max_interval_us(1000);
  for (int i = 0; i < 20; ++i) wait_us = pacer.next_interval_us(0, now_us += wait_us);
  CHECK_EQUAL(wait_us, 1000u);
  // A steady stream of new requests gets the average, not the minimum.
  uint64_t begin_us = now_us;
  for (int i = 0; i < 10'000; ++i) now_us += pacer.next_interval_us(1, now_us);
  CHECK(now_us - begin_us >= (10'000 - PollPacer::kBurst - 1) * 100);
}

}  // namespace
}  // namespace blink

BLINK_TEST_MAIN
