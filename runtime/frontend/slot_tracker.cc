#include "frontend/slot_tracker.h"

namespace blink {

SlotTracker::SlotTracker(uint32_t num_slots)
    : num_slots_(num_slots),
      noted_(num_slots, false),
      released_(std::make_unique<std::atomic<bool>[]>(num_slots)) {
  free_.reserve(num_slots);
}

std::optional<uint32_t> SlotTracker::acquire() {
  if (free_.empty()) return std::nullopt;
  const uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

// Acquire: whoever released a slot is done with it. Pairs with mark_released.
void SlotTracker::note_released() {
  for (uint32_t slot = 0; slot < num_slots_; ++slot) {
    noted_[slot] = released_[slot].load(std::memory_order_acquire);
  }
}

uint32_t SlotTracker::refresh(std::span<const blink_slot_status> statuses) {
  uint32_t found = 0;
  for (uint32_t i = 0; i < num_slots_ && found < kMaxRefill; ++i) {
    const uint32_t slot = hint_;
    hint_ = hint_ + 1 == num_slots_ ? 0 : hint_ + 1;
    if (unpack_status(statuses[slot].word).state != BLINK_STATE_EMPTY) continue;
    // Not if take_back_released took it meanwhile.
    if (!noted_[slot] || !released_[slot].exchange(false, std::memory_order_relaxed)) continue;
    noted_[slot] = false;
    free_.push_back(slot);
    ++found;
  }
  return found;
}

}  // namespace blink
