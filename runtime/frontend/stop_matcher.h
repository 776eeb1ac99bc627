// Finds stop strings in streamed text and holds back whatever could begin one.
#ifndef BLINK_FRONTEND_STOP_MATCHER_H
#define BLINK_FRONTEND_STOP_MATCHER_H

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace blink {

// The stop string that is complete first wins, byte by byte, so how text is cut into tokens does
// not matter; of several complete at one byte the longest wins. Linear time: one Knuth-Morris-Pratt
// state per stop string.
class StopMatcher {
 public:
  StopMatcher() = default;
  explicit StopMatcher(const std::vector<std::string>& stops);

  // Appends to `out` what of the text so far is certain to be shown. True: a stop string was found;
  // what preceded it has been appended and the matcher takes nothing more.
  [[nodiscard]] bool feed(std::string_view text, std::string& out);

  // The end of the text: appends what was held back.
  void flush(std::string& out);

  bool has_stopped() const { return has_stopped_; }
  size_t num_held_bytes() const { return held_.size(); }

 private:
  struct Pattern {
    std::string text;
    std::vector<uint32_t> failure;  // failure[i]: longest proper border of text[0, i]
    uint32_t matched = 0;           // bytes of text that end the input so far
  };

  uint32_t step(Pattern& pattern, char byte) const;

  std::vector<Pattern> patterns_;
  std::array<bool, 256> begins_pattern_{};
  uint32_t longest_match_ = 0;  // the largest `matched`
  std::string held_;            // the last longest_match_ bytes of the input
  bool has_stopped_ = false;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_STOP_MATCHER_H
