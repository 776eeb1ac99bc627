// Accounts for what a queue pair still holds: work requests, and the staging memory they read from.
#ifndef BLINK_TRANSPORT_SEND_WINDOW_H
#define BLINK_TRANSPORT_SEND_WINDOW_H

#include <cstdint>
#include <vector>

namespace blink {

// A send queue frees its entries only when a *signalled* work request completes: then that one and
// all before it are done, in order. So the window keeps a mark (index, staging position) for each
// signalled request in flight. It asks for a signal every `signal_interval` requests or quarter of
// the staging memory; whoever waits for room therefore always waits for a signal that will come.
// No locks: the caller has one.
class SendWindow {
 public:
  // depth: entries of the send queue, at least 4 * signal_interval.
  SendWindow(uint32_t depth, uint32_t signal_interval, uint32_t staging_bytes);

  struct Place {
    uint64_t index;           // of the work request; its id
    uint32_t staging_offset;  // where its bytes go; contiguous
    bool is_signalled;
  };

  // The most that one request may stage.
  uint32_t max_request_bytes() const { return staging_bytes_ / 4; }
  bool has_room(uint32_t num_bytes) const;
  // Takes an entry and `num_bytes` of staging memory; has_room must have said yes.
  Place take(uint32_t num_bytes, bool wants_signal);
  // The signalled request `index` completed: everything up to it is free.
  void complete(uint64_t index);

  uint64_t num_taken() const { return num_taken_; }
  uint64_t num_completed() const { return num_completed_; }

 private:
  struct Mark {
    uint64_t index;
    uint64_t staging_end;
  };

  uint64_t staging_start(uint32_t num_bytes) const;

  uint32_t depth_;
  uint32_t signal_interval_;
  uint32_t staging_bytes_;
  uint64_t num_taken_ = 0;      // indices are 1, 2, ...
  uint64_t num_completed_ = 0;  // the highest index known to be done
  uint64_t last_signalled_ = 0;
  uint64_t staging_head_ = 0;  // positions grow for ever; modulo staging_bytes_ they are offsets
  uint64_t staging_tail_ = 0;
  uint64_t staging_signalled_ = 0;
  std::vector<Mark> marks_;  // a circle of depth entries: no allocation later
  uint64_t first_mark_ = 0;
  uint64_t num_marks_ = 0;  // ever made
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_SEND_WINDOW_H
