// Reads the ring's trace: one record for each step that the scheduler finished. One-sided; the
// scheduler neither knows nor waits.
#ifndef BLINK_TRANSPORT_STEP_TRACE_H
#define BLINK_TRANSPORT_STEP_TRACE_H

#include <cstdint>
#include <span>
#include <vector>

#include "transport/transport.h"

namespace blink {

// A position in the trace. The trace keeps the last trace_capacity records; a reader that comes
// later finds the older ones gone, and counts them.
class StepTraceReader {
 public:
  // Starts at the oldest record kept. `transport` must outlive the reader.
  StepTraceReader(Transport& transport, const RingSizes& sizes);

  // Goes on to the newest record. What was written since the last call is then in records().
  Status poll();
  // Passes over all records so far; they do not count as missed.
  Status skip_to_newest();

  std::span<const blink_trace_record> records() const { return records_; }  // oldest first
  uint64_t num_missed() const { return num_missed_; }  // overwritten before they were read
  uint64_t next_index() const { return next_; }        // records ever written, as last seen

 private:
  Status read_from(uint64_t first, uint64_t end, uint64_t& end_after);
  void keep_valid(uint64_t first, uint64_t end_after);

  Transport& transport_;
  uint64_t trace_offset_;
  uint64_t capacity_;
  uint64_t next_ = 0;
  uint64_t num_missed_ = 0;
  std::vector<blink_trace_record> records_;
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_STEP_TRACE_H
