#include "transport/send_window.h"

#include "transport/ring_layout.h"

namespace blink {

SendWindow::SendWindow(uint32_t depth, uint32_t signal_interval, uint32_t staging_bytes)
    : depth_(depth),
      signal_interval_(signal_interval),
      staging_bytes_(staging_bytes),
      marks_(depth) {
  if (signal_interval == 0 || depth < 4 * signal_interval || staging_bytes < 4096 ||
      staging_bytes % 64 != 0) {
    throw RingError("verbs: send queue of " + std::to_string(depth) + " with a signal every " +
                    std::to_string(signal_interval) + " and " + std::to_string(staging_bytes) +
                    " bytes of staging: the depth must be 4 intervals, the bytes 4096 or more and "
                    "a multiple of 64");
  }
}

// A request's bytes do not wrap around: what is left at the end is skipped.
uint64_t SendWindow::staging_start(uint32_t num_bytes) const {
  const uint64_t offset = staging_head_ % staging_bytes_;
  return offset + num_bytes <= staging_bytes_ ? staging_head_
                                              : staging_head_ + (staging_bytes_ - offset);
}

bool SendWindow::has_room(uint32_t num_bytes) const {
  if (num_taken_ - num_completed_ >= depth_) return false;
  return num_bytes == 0 || staging_start(num_bytes) + num_bytes - staging_tail_ <= staging_bytes_;
}

SendWindow::Place SendWindow::take(uint32_t num_bytes, bool wants_signal) {
  Place place{++num_taken_, 0, wants_signal};
  if (num_bytes != 0) {
    const uint64_t start = staging_start(num_bytes);
    place.staging_offset = static_cast<uint32_t>(start % staging_bytes_);
    staging_head_ = start + (num_bytes + 7) / 8 * 8;
  }
  place.is_signalled |= num_taken_ - last_signalled_ >= signal_interval_ ||
                        staging_head_ - staging_signalled_ >= staging_bytes_ / 4;
  if (place.is_signalled) {
    last_signalled_ = num_taken_;
    staging_signalled_ = staging_head_;
    marks_[num_marks_++ % depth_] = {place.index, staging_head_};
  }
  return place;
}

void SendWindow::complete(uint64_t index) {
  while (first_mark_ != num_marks_ && marks_[first_mark_ % depth_].index <= index) {
    num_completed_ = marks_[first_mark_ % depth_].index;
    staging_tail_ = marks_[first_mark_ % depth_].staging_end;
    ++first_mark_;
  }
}

}  // namespace blink
