// A ring's owner without a model: it answers every request with its own prompt, token by token.
//
// Output token i is prompt token i; after the last comes kEos (or the prompt again, with
// ignore_eos). So a test chooses what "the model says". Two prompt ids do mischief when it is their
// turn.
#ifndef BLINK_TESTS_FAKE_OWNER_H
#define BLINK_TESTS_FAKE_OWNER_H

#include <atomic>
#include <cstdint>
#include <vector>

#include "transport/ring_layout.h"

namespace blink {

class FakeOwner {
 public:
  static constexpr uint32_t kEos = 256;
  static constexpr uint32_t kNanToken = 257;       // fails its request
  static constexpr uint32_t kUnlikelyToken = 'z';  // not among its own likeliest ones
  static constexpr uint32_t kStallToken = 258;     // stops the heartbeat for stall_us

  // When intervals begin: for a request when it was admitted; for all together, as the steps of a
  // batch do; or evenly spread, as if every request had come at its own time.
  enum class Pace { as_admitted, lockstep, spread };

  struct Options {
    uint64_t token_interval_us = 0;  // 0: a token a pass
    uint32_t burst = 1;              // tokens per status update
    uint32_t max_running = 0;        // 0: all slots; others wait in prefill_pending
    uint64_t stall_us = 3'000'000;
    Pace pace = Pace::as_admitted;
    bool is_wellbehaved = false;  // token ids mean nothing: those of a real vocabulary come in
  };

  FakeOwner(void* ring, Options options);
  virtual ~FakeOwner() = default;

  // Until the ring's stop word is set. Stores `stopped` at the end.
  void run();
  // One pass over all slots. True: something was done.
  bool pass();

 protected:
  // For measurements: called right before what they name becomes visible.
  virtual void before_pending(const blink_slot_request&) {}
  virtual void before_token(const blink_slot_request&, uint32_t /*index*/) {}

 private:
  struct Slot {
    uint32_t sequence = 0;
    uint32_t state = BLINK_STATE_EMPTY;
    uint32_t num_generated = 0;
    uint64_t seen_command = 0;
    uint64_t next_token_us = 0;
    blink_slot_request request{};
  };

  bool receive(uint32_t slot);
  bool generate(uint32_t slot, uint64_t now_us);
  uint64_t time_of_next_token(uint32_t slot, uint64_t now_us) const;
  void write_record(uint32_t slot, uint32_t index, uint32_t token);
  void publish(uint32_t slot, uint32_t finish_reason, uint32_t error);
  void clear_new_epochs();

  RingView ring_;
  Options options_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> epochs_;
  uint32_t num_running_ = 0;
  uint64_t num_passes_ = 0;
};

}  // namespace blink

#endif  // BLINK_TESTS_FAKE_OWNER_H
