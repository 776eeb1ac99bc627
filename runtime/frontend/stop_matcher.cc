#include "frontend/stop_matcher.h"

#include <algorithm>

namespace blink {

StopMatcher::StopMatcher(const std::vector<std::string>& stops) {
  patterns_.reserve(stops.size());
  for (const std::string& text : stops) {
    if (text.empty()) continue;
    Pattern pattern{text, std::vector<uint32_t>(text.size(), 0), 0};
    for (uint32_t i = 1, border = 0; i < text.size(); ++i) {
      while (border > 0 && text[i] != text[border]) border = pattern.failure[border - 1];
      if (text[i] == text[border]) ++border;
      pattern.failure[i] = border;
    }
    begins_pattern_[static_cast<unsigned char>(text[0])] = true;
    patterns_.push_back(std::move(pattern));
  }
}

uint32_t StopMatcher::step(Pattern& pattern, char byte) const {
  uint32_t matched = pattern.matched;
  while (matched > 0 && byte != pattern.text[matched]) matched = pattern.failure[matched - 1];
  if (byte == pattern.text[matched]) ++matched;
  pattern.matched = matched;
  return matched;
}

bool StopMatcher::feed(std::string_view text, std::string& out) {
  if (has_stopped_) return true;
  if (patterns_.empty()) {
    out.append(text);
    return false;
  }
  const size_t num_held_before = held_.size();
  for (size_t i = 0; i < text.size(); ++i) {
    const char byte = text[i];
    if (longest_match_ == 0 && !begins_pattern_[static_cast<unsigned char>(byte)]) continue;
    uint32_t longest = 0;
    size_t found = 0;
    for (Pattern& pattern : patterns_) {
      longest = std::max(longest, step(pattern, byte));
      if (pattern.matched == pattern.text.size()) found = std::max(found, pattern.text.size());
    }
    longest_match_ = longest;
    if (found > 0) {
      has_stopped_ = true;
      // The stop string may have begun among the held bytes.
      const size_t num_shown = num_held_before + i + 1 - found;
      out.append(held_, 0, std::min(num_shown, num_held_before));
      if (num_shown > num_held_before) out.append(text.substr(0, num_shown - num_held_before));
      held_.clear();
      return true;
    }
  }
  // Hold the last longest_match_ bytes of held_ + text.
  const size_t num_total = num_held_before + text.size();
  const size_t num_shown = num_total - longest_match_;
  if (num_shown >= num_held_before) {
    out.append(held_);
    out.append(text.substr(0, num_shown - num_held_before));
    held_.assign(text.substr(num_shown - num_held_before));
  } else {
    out.append(held_, 0, num_shown);
    held_.erase(0, num_shown);
    held_.append(text);
  }
  return false;
}

void StopMatcher::flush(std::string& out) {
  out.append(held_);
  held_.clear();
}

}  // namespace blink
