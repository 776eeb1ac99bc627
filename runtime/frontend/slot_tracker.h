// Knows which slots of this front end's range are free, without asking the ring for each request.
#ifndef BLINK_FRONTEND_SLOT_TRACKER_H
#define BLINK_FRONTEND_SLOT_TRACKER_H

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "blink/abi.hpp"

namespace blink {

// A slot is free once the ring's owner set it empty after this front end's release. Free slots are
// cached; one bulk read of the status table refills the cache, scanning from where the last scan
// ended, so that a request costs O(1) amortized. Slots are indices within the range.
class SlotTracker {
 public:
  // No slot is free until mark_released and refresh have said so.
  explicit SlotTracker(uint32_t num_slots);

  // Network thread. nullopt: the cache is empty; refresh, and if that finds nothing the ring is
  // full.
  std::optional<uint32_t> acquire();

  // Network thread, before `refresh`'s statuses are read from the ring: a slot that is released
  // only after they were may be empty there because its last request had not been taken yet.
  void note_released();

  // Network thread. `statuses` was read from the ring after note_released. Returns how many were
  // found.
  uint32_t refresh(std::span<const blink_slot_status> statuses);

  // Network thread: an acquired slot was not used after all.
  void give_back(uint32_t slot) { free_.push_back(slot); }

  // Any thread: the release command of this slot was written, or the slot was found empty on
  // attach.
  void mark_released(uint32_t slot) {
    released_[slot].store(true, std::memory_order_release);  // pairs with note_released's acquire
  }

  // Token reader, while the ring is lost: takes back the slots that wait to be found empty. Their
  // release may have died with the link. Pairs with mark_released.
  void take_back_released(std::vector<uint32_t>& slots) {
    for (uint32_t slot = 0; slot < num_slots_; ++slot) {
      if (released_[slot].exchange(false, std::memory_order_acquire)) slots.push_back(slot);
    }
  }

  uint32_t num_slots() const { return num_slots_; }
  size_t num_cached() const { return free_.size(); }

 private:
  static constexpr uint32_t kMaxRefill = 256;  // slots taken by one refresh

  uint32_t num_slots_;
  uint32_t hint_ = 0;  // where the next scan begins
  std::vector<uint32_t> free_;
  std::vector<bool> noted_;                        // by note_released
  std::unique_ptr<std::atomic<bool>[]> released_;  // true: free as soon as its status is empty
};

}  // namespace blink

#endif  // BLINK_FRONTEND_SLOT_TRACKER_H
