// A failed check ends the history with a text that names its seed.
#ifndef BLINK_TESTS_SCHEDULER_CHECK_H
#define BLINK_TESTS_SCHEDULER_CHECK_H

#include <stdexcept>
#include <string>

namespace blink::testing {

class CheckFailed : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void fail(const char* file, int line, const std::string& what) {
  throw CheckFailed(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

}  // namespace blink::testing

#define BLINK_CHECK(condition, what) \
  ((condition) ? void() : ::blink::testing::fail(__FILE__, __LINE__, std::string(what)))

#endif  // BLINK_TESTS_SCHEDULER_CHECK_H
