// Makes, checks and addresses a ring that lies in this process's memory.
#ifndef BLINK_TRANSPORT_RING_LAYOUT_H
#define BLINK_TRANSPORT_RING_LAYOUT_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "blink/abi.hpp"

namespace blink {

// Start-up failures: what was wrong, with names and figures.
class RingError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Nobody is there: it may help to wait for it.
class RingAbsent : public RingError {
 public:
  using RingError::RingError;
};

// Throws RingError naming the first size that is out of range.
void check_ring_sizes(const RingSizes& sizes);

// Zeroes nothing: `memory` must be fresh zeroed memory of at least
// ring_layout_from_sizes(sizes).ring_bytes, aligned to a page. Stores the magic last (release;
// pairs with the acquire in check_ring_header). `bundle_id` says whose tokens these are, 0:
// unknown; the incarnation is drawn anew.
void create_ring(std::span<std::byte> memory, const RingSizes& sizes, uint64_t bundle_id = 0);

// Checks magic, version, sizes and offsets of a header read from a peer. Trusts nothing in it.
void check_ring_header(const blink_ring_header& header, uint64_t available_bytes);

// Typed addresses into a local ring. Plain pointers: whoever reads a shared word goes through
// std::atomic_ref.
class RingView {
 public:
  RingView() = default;
  explicit RingView(void* base) : base_(static_cast<std::byte*>(base)) {
    sizes_ = ring_sizes_from_header(*header());
    layout_ = ring_layout_from_sizes(sizes_);
  }

  const RingSizes& sizes() const { return sizes_; }
  const RingLayout& layout() const { return layout_; }
  blink_ring_header* header() const { return reinterpret_cast<blink_ring_header*>(base_); }
  blink_front_end* front_end(uint32_t index) const {
    return at<blink_front_end>(layout_.front_end_offset, index);
  }
  blink_slot_command* command(uint32_t slot) const {
    return at<blink_slot_command>(layout_.command_offset, slot);
  }
  blink_slot_request* request(uint32_t slot) const {
    return at<blink_slot_request>(layout_.request_offset, slot);
  }
  blink_slot_status* status(uint32_t slot) const {
    return at<blink_slot_status>(layout_.status_offset, slot);
  }
  uint32_t* prompt(uint32_t slot) const {
    return at<uint32_t>(layout_.prompt_offset,
                        static_cast<uint64_t>(slot) * sizes_.max_prompt_tokens);
  }
  // First output_record_bytes of a blink_output_record.
  std::byte* output_record(uint32_t slot, uint32_t index) const {
    const uint64_t record = static_cast<uint64_t>(slot) * sizes_.max_output_tokens + index;
    return base_ + layout_.output_offset + record * sizes_.output_record_bytes;
  }
  blink_trace_record* trace(uint64_t index) const {
    return at<blink_trace_record>(layout_.trace_offset, index & (sizes_.trace_capacity - 1));
  }

 private:
  template <typename T>
  T* at(uint64_t offset, uint64_t index) const {
    return reinterpret_cast<T*>(base_ + offset) + index;
  }

  std::byte* base_ = nullptr;
  RingSizes sizes_;
  RingLayout layout_{};
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_RING_LAYOUT_H
