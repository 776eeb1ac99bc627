// A ring in ordinary memory with the scheduler on it, and the writes a front end makes.
#ifndef BLINK_TESTS_SCHEDULER_TEST_RING_H
#define BLINK_TESTS_SCHEDULER_TEST_RING_H

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "blink/abi.hpp"
#include "blink/device/initialize.cuh"
#include "blink/device/policy.cuh"
#include "check.h"

namespace blink::testing {

class TestRing {
 public:
  explicit TestRing(const RingSizes& sizes)
      : sizes_(sizes), layout_(ring_layout_from_sizes(sizes)) {
    memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(4096, layout_.ring_bytes)));
    std::fill_n(memory_.get(), layout_.ring_bytes, uint8_t{0});
    fill_ring_header(header(), sizes_);
    header().magic = BLINK_MAGIC;
  }

  const RingSizes& sizes() const { return sizes_; }
  uint64_t bytes() const { return layout_.ring_bytes; }
  void* data() { return memory_.get(); }
  blink_ring_header& header() { return *at<blink_ring_header>(0); }
  blink_front_end& front_end(uint32_t i) {
    return at<blink_front_end>(layout_.front_end_offset)[i];
  }
  blink_slot_command& command(uint32_t slot) {
    return at<blink_slot_command>(layout_.command_offset)[slot];
  }
  blink_slot_request& request(uint32_t slot) {
    return at<blink_slot_request>(layout_.request_offset)[slot];
  }
  blink_slot_status& status(uint32_t slot) {
    return at<blink_slot_status>(layout_.status_offset)[slot];
  }
  StatusWord status_word(uint32_t slot) { return unpack_status(status(slot).word); }
  uint32_t* prompt(uint32_t slot) {
    return at<uint32_t>(layout_.prompt_offset) + slot * sizes_.max_prompt_tokens;
  }
  uint32_t output_token(uint32_t slot, uint32_t index) {
    return *at<uint32_t>(layout_.output_offset +
                         (uint64_t{slot} * sizes_.max_output_tokens + index) *
                             sizes_.output_record_bytes);
  }
  const blink_trace_record& trace(uint64_t index) {
    return at<blink_trace_record>(layout_.trace_offset)[index % sizes_.trace_capacity];
  }

  // Writes prompt, request (its checksum filled in), submit number and command word, in this order.
  void submit(uint32_t slot, blink_slot_request request, const std::vector<uint32_t>& token_ids) {
    std::copy(token_ids.begin(), token_ids.end(), prompt(slot));
    request.num_prompt_tokens = static_cast<uint32_t>(token_ids.size());
    request.checksum = request_checksum(&request, token_ids.data(), request.num_prompt_tokens);
    this->request(slot) = request;
    command(slot).submit_number = request.submit_number;
    command(slot).word = pack_command(request.sequence, BLINK_COMMAND_SUBMIT);
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  template <typename Item>
  Item* at(uint64_t offset) {
    return reinterpret_cast<Item*>(memory_.get() + offset);
  }

  RingSizes sizes_;
  RingLayout layout_;
  std::unique_ptr<unsigned char, Free> memory_;
};

// The scheduler's memory, initialized over a ring; every byte behind it is garbage before.
class TestScheduler {
 public:
  TestScheduler(TestRing& ring, const blink_step_buffers& buffers, const GraphTable& graphs,
                uint32_t max_prefill_tokens) {
    const RingSizes& sizes = ring.sizes();
    const uint64_t bytes =
        scheduler_state_bytes(sizes.num_slots, sizes.max_batch, sizes.num_kv_pages);
    memory_.reset(std::aligned_alloc(64, align_up(bytes, 64)));
    std::fill_n(static_cast<uint8_t*>(memory_.get()), bytes, uint8_t{0xAB});
    SingleThread team;
    const uint32_t error = initialize_scheduler(memory_.get(), bytes, team, ring.data(),
                                                ring.bytes(), buffers, graphs, max_prefill_tokens);
    BLINK_CHECK(error == kInitializeOk, initialize_error_text(error));
  }

  Scheduler* operator->() { return static_cast<Scheduler*>(memory_.get()); }
  Scheduler* get() { return static_cast<Scheduler*>(memory_.get()); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
};

}  // namespace blink::testing

#endif  // BLINK_TESTS_SCHEDULER_TEST_RING_H
