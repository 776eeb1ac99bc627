// What must hold between any two steps, checked on the scheduler's own state.
#ifndef BLINK_TESTS_SCHEDULER_INVARIANTS_H
#define BLINK_TESTS_SCHEDULER_INVARIANTS_H

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "test_ring.h"

namespace blink::testing {

// Every page is free or belongs to one lane, and every table entry past a lane's pages is the sink.
inline void check_pages(const Scheduler* s) {
  std::vector<uint32_t> num_owners(s->limits.num_kv_pages + 1, 0);
  for (uint32_t i = 0; i < s->num_free_pages; ++i) ++num_owners.at(s->free_pages[i]);
  for (uint32_t lane = 0; lane <= s->limits.max_batch; ++lane) {
    const uint32_t num_pages = lane < s->limits.max_batch ? s->lanes[lane].num_pages : 0;
    const int32_t* table = page_table_of(s, lane);
    for (uint32_t i = 0; i < s->limits.max_pages_per_lane; ++i) {
      if (i < num_pages) {
        ++num_owners.at(static_cast<uint32_t>(table[i]));
      } else {
        BLINK_CHECK(table[i] == 0, "a table entry past its lane's pages is not the sink");
      }
    }
  }
  BLINK_CHECK(num_owners[0] == 0, "the sink page is owned");
  for (uint32_t page = 1; page <= s->limits.num_kv_pages; ++page) {
    BLINK_CHECK(num_owners[page] == 1, "page " + std::to_string(page) + " has " +
                                           std::to_string(num_owners[page]) + " owners");
  }
}

// Lanes are free or running, running ones are sorted by age and older than every paused request.
inline void check_lanes(const Scheduler* s) {
  std::vector<uint32_t> num_places(s->limits.max_batch, 0);
  for (uint32_t i = 0; i < s->num_free_lanes; ++i) ++num_places.at(s->free_lanes[i]);
  uint32_t num_prefilling = 0;
  for (uint32_t i = 0; i < s->num_running; ++i) {
    const Lane& lane = s->lanes[s->running[i]];
    ++num_places.at(s->running[i]);
    BLINK_CHECK(lane.phase != kLaneFree, "a free lane runs");
    if (lane.phase == kLanePrefill) ++num_prefilling;
    BLINK_CHECK(s->slots[lane.slot].lane == s->running[i], "lane and slot disagree");
    BLINK_CHECK(lane.kv_len <= lane.num_pages * s->limits.page_size_tokens, "too few pages");
    if (i > 0) {
      BLINK_CHECK(s->slots[s->lanes[s->running[i - 1]].slot].admit_number <
                      s->slots[lane.slot].admit_number,
                  "running lanes are not sorted by age");
    }
  }
  for (const uint32_t count : num_places) BLINK_CHECK(count == 1, "a lane is lost or doubled");
  BLINK_CHECK(num_prefilling == s->num_prefilling, "num_prefilling is wrong");
  uint64_t oldest_allowed =
      s->num_running > 0 ? s->slots[s->lanes[s->running[s->num_running - 1]].slot].admit_number + 1
                         : 0;
  for (uint32_t i = s->num_paused; i-- > 0;) {
    const SlotRecord& record = s->slots[s->paused[i]];
    BLINK_CHECK(record.state == BLINK_STATE_DECODE_PAUSED, "a paused slot is in another state");
    BLINK_CHECK(record.admit_number >= oldest_allowed, "a paused request is out of order");
    oldest_allowed = record.admit_number + 1;
  }
}

// Every slot is where its state says, and the ring says the same.
inline void check_slots(const Scheduler* s, TestRing& ring) {
  std::vector<uint32_t> num_queued(s->limits.num_slots, 0);
  uint32_t num_waiting = 0;
  for (uint32_t f = 0; f < s->limits.num_front_ends; ++f) {
    uint32_t previous = kNone;
    for (uint32_t slot = s->front_ends[f].head; slot != kNone; slot = s->slots[slot].next) {
      BLINK_CHECK(++num_queued.at(slot) == 1, "a waiting queue is a ring");
      BLINK_CHECK(s->slots[slot].previous == previous, "a waiting queue is torn");
      BLINK_CHECK(
          previous == kNone || s->slots[previous].submit_number < s->slots[slot].submit_number,
          "a waiting queue is out of order");
      previous = slot;
      ++num_waiting;
    }
    BLINK_CHECK(s->front_ends[f].tail == previous, "a waiting queue lost its tail");
  }
  BLINK_CHECK(num_waiting == s->num_waiting, "num_waiting is wrong");
  uint32_t num_paused = 0;
  uint32_t num_running = 0;
  for (uint32_t slot = 0; slot < s->limits.num_slots; ++slot) {
    const SlotRecord& record = s->slots[slot];
    const bool runs = record.state == BLINK_STATE_PREFILL_PROCESSING ||
                      record.state == BLINK_STATE_DECODE_PROCESSING;
    BLINK_CHECK((record.lane != kNone) == runs, "a slot's lane does not go with its state");
    BLINK_CHECK((num_queued[slot] == 1) == (record.state == BLINK_STATE_PREFILL_PENDING),
                "a slot's queue does not go with its state");
    if (record.state == BLINK_STATE_DECODE_PAUSED) ++num_paused;
    if (runs) ++num_running;
    BLINK_CHECK(
        ring.status(slot).word == pack_status(record.sequence, record.state, record.num_generated),
        "the ring shows another state");
  }
  BLINK_CHECK(num_paused == s->num_paused && num_running == s->num_running, "a slot is lost");
}

inline void check_invariants(const Scheduler* s, TestRing& ring) {
  check_pages(s);
  check_lanes(s);
  check_slots(s, ring);
}

}  // namespace blink::testing

#endif  // BLINK_TESTS_SCHEDULER_INVARIANTS_H
