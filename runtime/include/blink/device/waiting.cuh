// Who comes next: a queue of pending slots for each front end, and the stack of paused ones.
//
// A queue is a doubly linked list by submit number. Commands arrive nearly in order, so that an
// insertion from the tail takes a step or two; an abort unlinks from anywhere. Called by the leader
// alone, but for the look-ups, which change nothing.
#ifndef BLINK_DEVICE_WAITING_CUH
#define BLINK_DEVICE_WAITING_CUH

#include "blink/device/state.cuh"

namespace blink {

BLINK_FUNCTION void insert_waiting(Scheduler* s, uint32_t slot) {
  SlotRecord& record = s->slots[slot];
  FrontEndRecord& front_end = s->front_ends[record.front_end];
  uint32_t before = front_end.tail;
  while (before != kNone && s->slots[before].submit_number > record.submit_number) {
    before = s->slots[before].previous;
  }
  const uint32_t after = before == kNone ? front_end.head : s->slots[before].next;
  record.previous = before;
  record.next = after;
  (before == kNone ? front_end.head : s->slots[before].next) = slot;
  (after == kNone ? front_end.tail : s->slots[after].previous) = slot;
  ++s->num_waiting;
}

BLINK_FUNCTION void remove_waiting(Scheduler* s, uint32_t slot) {
  SlotRecord& record = s->slots[slot];
  FrontEndRecord& front_end = s->front_ends[record.front_end];
  (record.previous == kNone ? front_end.head : s->slots[record.previous].next) = record.next;
  (record.next == kNone ? front_end.tail : s->slots[record.next].previous) = record.previous;
  record.next = kNone;
  record.previous = kNone;
  --s->num_waiting;
}

// Pauses come youngest first and running lanes are older than paused ones, so the top is the
// oldest.
BLINK_FUNCTION void push_paused(Scheduler* s, uint32_t slot) { s->paused[s->num_paused++] = slot; }

BLINK_FUNCTION void remove_paused(Scheduler* s, uint32_t slot) {
  uint32_t place = s->num_paused - 1;
  while (s->paused[place] != slot) --place;
  --s->num_paused;
  for (; place < s->num_paused; ++place) s->paused[place] = s->paused[place + 1];
}

// Returns the slot that gets the next lane: the oldest paused one, else the head of the next front
// end's queue, in turns; kNone when nobody waits.
BLINK_FUNCTION uint32_t next_candidate(const Scheduler* s) {
  if (s->num_paused > 0) return s->paused[s->num_paused - 1];
  if (s->num_waiting == 0) return kNone;
  for (uint32_t i = 0; i < s->limits.num_front_ends; ++i) {
    const uint32_t turn = (s->next_front_end + i) % s->limits.num_front_ends;
    if (s->front_ends[turn].head != kNone) return s->front_ends[turn].head;
  }
  return kNone;
}

}  // namespace blink

#endif  // BLINK_DEVICE_WAITING_CUH
