// Seeded random numbers whose sequence is the same with every standard library.
#ifndef BLINK_TESTS_SCHEDULER_RANDOM_SOURCE_H
#define BLINK_TESTS_SCHEDULER_RANDOM_SOURCE_H

#include <cstdint>

#include "blink/abi.hpp"

namespace blink::testing {

class RandomSource {
 public:
  explicit RandomSource(uint64_t seed) : state_(seed) {}

  uint64_t next() { return mix64(state_ += 0x9e3779b97f4a7c15u); }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>(next() % bound); }
  uint32_t between(uint32_t low, uint32_t high) { return low + below(high - low + 1); }
  bool one_in(uint32_t odds) { return odds != 0 && below(odds) == 0; }

 private:
  uint64_t state_;
};

}  // namespace blink::testing

#endif  // BLINK_TESTS_SCHEDULER_RANDOM_SOURCE_H
