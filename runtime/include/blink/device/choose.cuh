// Chooses the next step: which lanes run, prefill or decode, and the graph key that fits.
//
// Waiting requests are prefilled as soon as they fit, but while lanes are decoding never twice
// without a decode step in between: that bounds how long a running stream waits.
#ifndef BLINK_DEVICE_CHOOSE_CUH
#define BLINK_DEVICE_CHOOSE_CUH

#include "blink/device/lanes.cuh"
#include "blink/device/state.cuh"

namespace blink {

// Returns the key index for a step, with kOffCacheBit where its exact bucket was not captured.
BLINK_FUNCTION uint32_t look_up(const GraphGrid& grid, uint32_t batch, uint32_t seqlen) {
  const uint32_t row = smaller(batch, grid.max_batch);
  const uint32_t granule =
      smaller((seqlen + grid.granule_tokens - 1) / grid.granule_tokens, grid.num_granules - 1);
  return grid.lut[row * grid.num_seqlen_buckets + grid.seqlen_bucket_index[granule]];
}

// Appends a row of `num_tokens` new tokens of a lane to the prefill step. By the team.
template <typename Team>
BLINK_FUNCTION void add_prefill_row(Scheduler* s, Team& team, uint32_t lane_index,
                                    uint32_t num_tokens) {
  const Lane lane = s->lanes[lane_index];
  const bool is_last = lane.kv_len + num_tokens == history_tokens(s->slots[lane.slot]);
  team.sync();
  if (team.is_leader()) {
    s->rows[s->num_rows++] = StepRow{lane_index,  lane.slot,         num_tokens, s->num_tokens,
                                     lane.kv_len, is_last ? 1u : 0u, kRowGoesOn, 0};
    s->num_tokens += num_tokens;
    if (is_last) ++s->step_num_prefilled;
  }
  team.sync();
}

// Collects a prefill step: lanes whose prompt is not through first, then paused and new requests as
// they fit. The last row is cut to what the step may still take.
template <typename Team>
BLINK_RARE_FUNCTION void collect_prefill(Scheduler* s, Team& team) {
  if (s->num_prefilling + s->num_paused + s->num_waiting == 0) return;
  const uint32_t max_rows = s->limits.max_prefill_batch;
  const uint32_t max_tokens = s->limits.max_prefill_tokens;
  const uint32_t num_running = s->num_prefilling > 0 ? s->num_running : 0;
  for (uint32_t i = 0; i < num_running; ++i) {
    if (s->num_rows >= max_rows || s->num_tokens >= max_tokens) return;
    const uint32_t lane = s->running[i];
    if (s->lanes[lane].phase != kLanePrefill) continue;
    const uint32_t rest = history_tokens(s->slots[s->lanes[lane].slot]) - s->lanes[lane].kv_len;
    add_prefill_row(s, team, lane, smaller(rest, max_tokens - s->num_tokens));
  }
  while (s->num_rows < max_rows && s->num_tokens < max_tokens) {
    const uint32_t slot = next_candidate(s);
    if (slot == kNone || !fits(s, slot)) return;
    const uint32_t num_tokens = smaller(history_tokens(s->slots[slot]), max_tokens - s->num_tokens);
    const uint32_t lane = start_lane(s, team, slot);
    add_prefill_row(s, team, lane, num_tokens);
  }
}

// The share of the running lanes that one thread looks after.
struct LaneShare {
  uint32_t begin;
  uint32_t end;
};

template <typename Team>
BLINK_FUNCTION LaneShare share_lanes(const Scheduler* s, const Team& team) {
  const uint32_t per_thread = (s->num_running + team.count() - 1) / team.count();
  const uint32_t begin = smaller(team.id() * per_thread, s->num_running);
  return LaneShare{begin, smaller(begin + per_thread, s->num_running)};
}

// Makes the thread's decoding lanes rows, from `row` on, and gives those that start a new page one,
// from `place` on in the stack of free pages.
template <typename Team>
BLINK_FUNCTION void add_decode_rows(Scheduler* s, Team& team, const LaneShare& share, uint32_t row,
                                    uint32_t place) {
  uint32_t longest = 0;
  for (uint32_t i = share.begin; i < share.end; ++i) {
    const uint32_t lane_index = s->running[i];
    Lane& lane = s->lanes[lane_index];
    if (lane.phase != kLaneDecode) continue;
    if (needs_page(s, lane)) {
      page_table_of(s, lane_index)[lane.num_pages] =
          static_cast<int32_t>(s->free_pages[s->num_free_pages - 1 - place]);
      ++lane.num_pages;
      ++place;
    }
    s->rows[row] = StepRow{lane_index, lane.slot, 1, row, lane.kv_len, 1, kRowGoesOn, 0};
    longest = larger(longest, lane.kv_len + 1);
    ++row;
  }
  team.raise(&s->step_longest_kv_len, longest);
}

// Collects a decode step: all lanes whose prompt is through, oldest first, each with room for its
// next token. While there are too few pages the youngest lane is paused. The oldest is never
// paused: alone it always fits, because its request was checked against the whole cache.
template <typename Team>
BLINK_FUNCTION void collect_decode(Scheduler* s, Team& team) {
  for (;;) {
    const LaneShare share = share_lanes(s, team);
    uint64_t mine = 0;  // lanes that need a page in the upper half, decoding ones in the lower
    for (uint32_t i = share.begin; i < share.end; ++i) {
      const Lane& lane = s->lanes[s->running[i]];
      if (lane.phase != kLaneDecode) continue;
      mine += needs_page(s, lane) ? (uint64_t{1} << 32) + 1 : 1;
    }
    uint64_t all = 0;
    const uint64_t before = team.exclusive_sum(mine, &all);
    const uint32_t num_needed = static_cast<uint32_t>(all >> 32);
    if (num_needed > s->num_free_pages) {
      team.sync();
      pause_youngest(s, team);
      continue;
    }
    add_decode_rows(s, team, share, static_cast<uint32_t>(before),
                    static_cast<uint32_t>(before >> 32));
    team.sync();
    if (team.is_leader()) {
      s->num_free_pages -= num_needed;
      s->num_rows = static_cast<uint32_t>(all);
      s->num_tokens = static_cast<uint32_t>(all);
    }
    team.sync();
    return;
  }
}

// Leader: notes the key of the step and how long decoding lanes have waited.
BLINK_FUNCTION void settle_step(Scheduler* s, uint32_t kind, uint32_t key_and_flag) {
  s->action = kActionLaunch;
  s->action_key = key_and_flag & ~static_cast<uint32_t>(kOffCacheBit);
  s->step_off_cache = (key_and_flag & kOffCacheBit) != 0 ? 1 : 0;
  s->step_kind = kind;
  if (kind == BLINK_GRAPH_DECODE) {
    s->counters.max_wait_steps = larger(s->counters.max_wait_steps, s->num_prefills_waited);
    s->num_prefills_waited = 0;
  } else if (s->num_running > s->num_prefilling) {
    ++s->num_prefills_waited;
  }
  s->last_step_was_prefill = kind == BLINK_GRAPH_PREFILL ? 1 : 0;
}

template <typename Team>
BLINK_FUNCTION void clear_step(Scheduler* s, Team& team) {
  team.sync();
  if (team.is_leader()) {
    s->action = kActionIdle;
    s->num_rows = 0;
    s->num_tokens = 0;
    s->step_num_prefilled = 0;
    s->step_longest_kv_len = 0;
  }
  team.sync();
}

// Sets the rows, key and action of the next step; kActionIdle when nothing can run. By the team.
template <typename Team>
BLINK_FUNCTION void choose_step(Scheduler* s, Team& team) {
  clear_step(s, team);
  const bool is_decode_due = s->last_step_was_prefill != 0 && s->num_running > s->num_prefilling;
  bool is_prefill = !is_decode_due;
  if (is_prefill) collect_prefill(s, team);
  if (s->num_rows == 0) {
    is_prefill = false;
    collect_decode(s, team);
  }
  if (s->num_rows == 0) {  // every decoding lane was paused, or there are none
    is_prefill = true;
    collect_prefill(s, team);
  }
  if (s->num_rows == 0) return;
  const uint32_t key = is_prefill ? look_up(s->graphs.prefill, s->num_rows, s->num_tokens)
                                  : look_up(s->graphs.decode, s->num_rows, s->step_longest_kv_len);
  team.sync();
  if (team.is_leader()) settle_step(s, is_prefill ? BLINK_GRAPH_PREFILL : BLINK_GRAPH_DECODE, key);
  team.sync();
}

}  // namespace blink

#endif  // BLINK_DEVICE_CHOOSE_CUH
