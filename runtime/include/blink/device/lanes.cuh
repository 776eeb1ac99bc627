// Lanes: how a request gets one, loses it for a while, and ends.
#ifndef BLINK_DEVICE_LANES_CUH
#define BLINK_DEVICE_LANES_CUH

#include "blink/device/pages.cuh"
#include "blink/device/ring.cuh"
#include "blink/device/state.cuh"
#include "blink/device/waiting.cuh"

namespace blink {

// Whether a slot may be admitted now: a lane, the pages of its history, and one page for each
// running lane.
BLINK_FUNCTION bool fits(const Scheduler* s, uint32_t slot) {
  return s->num_free_lanes > 0 &&
         pages_of(s, history_tokens(s->slots[slot])) + s->num_running <= s->num_free_pages;
}

// Leader: the bookkeeping of start_lane.
BLINK_FUNCTION void occupy_lane(Scheduler* s, uint32_t slot, uint32_t lane) {
  SlotRecord& record = s->slots[slot];
  if (record.state == BLINK_STATE_DECODE_PAUSED) {
    remove_paused(s, slot);
    ++s->counters.resumed;
  } else {
    remove_waiting(s, slot);
    s->next_front_end = (record.front_end + 1) % s->limits.num_front_ends;
    record.admit_number = s->next_admit_number++;
    ++s->counters.admitted;
  }
  --s->num_free_lanes;
  record.lane = lane;
  record.state = BLINK_STATE_PREFILL_PROCESSING;
  s->lanes[lane] = Lane{kLanePrefill, slot, 0, 0, 0, 0};
  s->running[s->num_running++] = lane;
  ++s->num_prefilling;
  publish_status(s, slot);
}

// Gives a waiting or paused slot, which must fit, a lane and its pages; returns the lane. By the
// team. A new one is younger than all that run, a paused one too: `running` stays sorted by age.
template <typename Team>
BLINK_RARE_FUNCTION uint32_t start_lane(Scheduler* s, Team& team, uint32_t slot) {
  const uint32_t lane = s->free_lanes[s->num_free_lanes - 1];
  const uint32_t num_pages = pages_of(s, history_tokens(s->slots[slot]));
  team.sync();
  if (team.is_leader()) occupy_lane(s, slot, lane);
  team.sync();
  take_pages(s, team, lane, num_pages);
  return lane;
}

// Frees a slot's lane and pages. By the team.
template <typename Team>
BLINK_RARE_FUNCTION void leave_lane(Scheduler* s, Team& team, uint32_t lane) {
  return_pages(s, team, lane);
  if (team.is_leader()) {
    uint32_t place = 0;
    while (s->running[place] != lane) ++place;
    --s->num_running;
    for (; place < s->num_running; ++place) s->running[place] = s->running[place + 1];
    if (s->lanes[lane].phase == kLanePrefill) --s->num_prefilling;
    s->slots[s->lanes[lane].slot].lane = kNone;
    s->lanes[lane] = Lane{kLaneFree, kNone, 0, 0, 0, 0};
    s->free_lanes[s->num_free_lanes++] = lane;
  }
  team.sync();
}

// Pauses the youngest running lane: its pages go back, its tokens stay in the ring. By the team.
template <typename Team>
BLINK_FUNCTION void pause_youngest(Scheduler* s, Team& team) {
  const uint32_t lane = s->running[s->num_running - 1];
  const uint32_t slot = s->lanes[lane].slot;
  team.sync();
  leave_lane(s, team, lane);
  if (team.is_leader()) {
    s->slots[slot].state = BLINK_STATE_DECODE_PAUSED;
    push_paused(s, slot);
    ++s->counters.paused;
    publish_status(s, slot);
  }
  team.sync();
}

BLINK_FUNCTION void count_ending(Scheduler* s, uint32_t finish_reason) {
  if (finish_reason == BLINK_FINISH_ABORT) {
    ++s->counters.aborted;
  } else if (finish_reason == BLINK_FINISH_ERROR) {
    ++s->counters.failed;
  } else {
    ++s->counters.finished;
  }
}

// Ends a slot that waits, runs or is paused; `state` is decode_completed, failed or empty. By the
// team.
template <typename Team>
BLINK_RARE_FUNCTION void end_request(Scheduler* s, Team& team, uint32_t slot, uint32_t state,
                                     uint32_t finish_reason, uint32_t error) {
  const uint32_t lane = s->slots[slot].lane;
  team.sync();
  if (lane != kNone) leave_lane(s, team, lane);
  if (team.is_leader()) {
    SlotRecord& record = s->slots[slot];
    if (record.state == BLINK_STATE_PREFILL_PENDING) remove_waiting(s, slot);
    if (record.state == BLINK_STATE_DECODE_PAUSED) remove_paused(s, slot);
    record.state = state;
    if (state == BLINK_STATE_EMPTY) record.num_generated = 0;
    count_ending(s, finish_reason);
    publish_ending(s, slot, finish_reason, error);
  }
  team.sync();
}

BLINK_FUNCTION bool is_active(uint32_t state) {
  return state != BLINK_STATE_EMPTY && !is_final_state(state);
}

}  // namespace blink

#endif  // BLINK_DEVICE_LANES_CUH
