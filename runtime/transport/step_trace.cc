#include "transport/step_trace.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace blink {
namespace {

constexpr uint64_t kCountOffset = offsetof(blink_ring_header, trace_count);

}  // namespace

StepTraceReader::StepTraceReader(Transport& transport, const RingSizes& sizes)
    : transport_(transport),
      trace_offset_(ring_layout_from_sizes(sizes).trace_offset),
      capacity_(sizes.trace_capacity) {
  records_.reserve(capacity_);
}

Status StepTraceReader::skip_to_newest() {
  records_.clear();
  return transport_.read_object(kCountOffset, next_);
}

Status StepTraceReader::poll() {
  records_.clear();
  uint64_t end = 0;
  // A word: acquire; the records that it counts are read after it. Pairs with publish_trace.
  if (const Status status = transport_.read_object(kCountOffset, end); status != Status::ok) {
    return status;
  }
  if (end < next_) next_ = 0;  // another ring, found again where the old one was
  if (end == next_ || capacity_ == 0) return Status::ok;
  const uint64_t first = std::max(next_, end - std::min(end, capacity_));
  uint64_t end_after = end;
  if (const Status status = read_from(first, end, end_after); status != Status::ok) {
    records_.clear();
    return status;
  }
  keep_valid(first, end_after);
  num_missed_ += end - next_ - records_.size();
  next_ = end;
  return Status::ok;
}

// Records [first, end) in at most two pieces, then the count once more.
Status StepTraceReader::read_from(uint64_t first, uint64_t end, uint64_t& end_after) {
  records_.resize(end - first);
  const std::span<blink_trace_record> all(records_);
  const uint64_t start = first & (capacity_ - 1);
  const uint64_t before_wrap = std::min(end - first, capacity_ - start);
  const std::array<ReadRequest, 3> batch = {{
      {trace_offset_ + start * sizeof(blink_trace_record),
       std::as_writable_bytes(all.first(before_wrap))},
      {trace_offset_, std::as_writable_bytes(all.subspan(before_wrap))},
      {kCountOffset, std::as_writable_bytes(std::span(&end_after, 1))},
  }};
  return transport_.read(batch);
}

// Drops what the scheduler may have overwritten meanwhile: all that is a ring's length behind the
// record it writes next. Between the count of one record and the words of the next lies a whole
// step, so their order needs no fence of its own. A record that does not bear its own number is
// dropped too.
void StepTraceReader::keep_valid(uint64_t first, uint64_t end_after) {
  size_t kept = 0;
  for (size_t i = 0; i < records_.size(); ++i) {
    const uint64_t index = first + i;
    const bool is_stale = index + capacity_ <= end_after || records_[i].step != index + 1;
    if (!is_stale) records_[kept++] = records_[i];
  }
  records_.resize(kept);
}

}  // namespace blink
