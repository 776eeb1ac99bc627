// Commits the step that just finished: sampled ids become output records, ended requests give their
// lanes back, what could not run fails.
#ifndef BLINK_DEVICE_COMMIT_CUH
#define BLINK_DEVICE_COMMIT_CUH

#include "blink/device/lanes.cuh"
#include "blink/device/ring.cuh"
#include "blink/device/state.cuh"
#include "blink/device/statistics.cuh"

namespace blink {

BLINK_FUNCTION bool is_stop_token(const blink_slot_request& request, uint32_t token_id) {
  for (uint32_t i = 0; i < request.num_stop_token_ids; ++i) {
    if (request.stop_token_ids[i] == token_id) return true;
  }
  return false;
}

// Commits one row; one thread. The token that ends a request is emitted too, as its last record.
// report() publishes it; where the request ends, end_request does.
BLINK_FUNCTION uint32_t commit_row(Scheduler* s, uint32_t row_index) {
  const StepRow& row = s->rows[row_index];
  Lane& lane = s->lanes[row.lane];
  SlotRecord& record = s->slots[row.slot];
  lane.kv_len += row.num_tokens;
  s->committed[row_index] = kNone;
  if (row.samples == 0) return kRowGoesOn;
  lane.phase = kLaneDecode;
  // Relaxed, because a spinning block may hold the last step's line in its L1.
  const uint32_t token_id =
      load_relaxed(reinterpret_cast<const uint32_t*>(s->step.sampled_ids) + row_index);
  if (token_id >= s->limits.vocab_size) return kRowIsNan;  // -1 among them
  write_output_record(s, row.slot, record.num_generated, row_index, token_id);
  ++record.num_generated;
  lane.last_token_id = token_id;
  if (is_stop_token(s->requests[row.slot], token_id)) return kRowStopped;
  if (record.num_generated >= record.max_output_tokens) return kRowFull;
  record.state = BLINK_STATE_DECODE_PROCESSING;
  s->committed[row_index] = row.slot;
  return kRowGoesOn;
}

template <typename Team>
BLINK_FUNCTION void end_row(Scheduler* s, Team& team, const StepRow& row) {
  const uint32_t slot = row.slot;
  if (row.outcome == kRowIsNan) {
    end_request(s, team, slot, BLINK_STATE_FAILED, BLINK_FINISH_ERROR, BLINK_ERROR_NAN_LOGITS);
  } else {
    end_request(s, team, slot, BLINK_STATE_DECODE_COMPLETED,
                row.outcome == kRowStopped ? BLINK_FINISH_STOP : BLINK_FINISH_LENGTH,
                BLINK_ERROR_NONE);
  }
}

// Fails every request of the step at hand, which could not be launched or did not run to its end.
template <typename Team>
BLINK_RARE_FUNCTION void fail_step(Scheduler* s, Team& team, uint32_t launch_error) {
  const uint32_t num_rows = s->num_rows;
  team.sync();
  if (team.is_leader()) {
    store_relaxed(&s->header->launch_error, launch_error);
    store_relaxed(&s->header->launch_error_key, s->action_key);
    s->step_in_flight = 0;
    s->num_rows = 0;
  }
  for (uint32_t i = 0; i < num_rows; ++i) {
    end_request(s, team, s->rows[i].slot, BLINK_STATE_FAILED, BLINK_FINISH_ERROR,
                BLINK_ERROR_LAUNCH);
  }
  team.sync();
}

// Looks once, for the whole team, whether the step in flight has run to its end.
template <typename Team>
BLINK_FUNCTION void note_completion(Scheduler* s, Team& team) {
  if (team.is_leader()) {
    s->num_committed = 0;
    if (s->step_in_flight != 0) {
      // Acquire: pairs with the graph's last write (persistent); a kernel boundary orders it
      // otherwise.
      s->step_is_complete = load_acquire(&s->step.state->completion) == s->launch_number ? 1 : 0;
    }
  }
  team.sync();
}

template <typename Team>
BLINK_FUNCTION void commit_step(Scheduler* s, Team& team, uint64_t now_ns) {
  if (s->step_in_flight == 0) return;
  if (s->step_is_complete == 0) {
    fail_step(s, team, kErrorIncompleteStep);
    return;
  }
  const uint32_t num_rows = s->num_rows;
  uint64_t num_mine = 0;  // ended rows in the upper half, sampled ones in the lower
  for (uint32_t i = team.id(); i < num_rows; i += team.count()) {
    const uint32_t outcome = commit_row(s, i);
    s->rows[i].outcome = outcome;
    if (outcome != kRowGoesOn) num_mine += uint64_t{1} << 32;
    if (s->rows[i].samples != 0 && outcome != kRowIsNan) ++num_mine;
  }
  uint64_t num_all = 0;
  team.exclusive_sum(num_mine, &num_all);
  team.sync();
  if (team.is_leader()) {
    s->step_in_flight = 0;
    s->num_prefilling -= s->step_num_prefilled;
    s->counters.output_tokens += static_cast<uint32_t>(num_all);
    s->num_committed = num_rows;
    count_step(s);
    note_step_time(s, now_ns);
    note_trace(s, now_ns);
  }
  team.sync();
  if (num_all >> 32 == 0) return;
  for (uint32_t i = 0; i < num_rows; ++i) {
    if (s->rows[i].outcome != kRowGoesOn) end_row(s, team, s->rows[i]);
  }
}

}  // namespace blink

#endif  // BLINK_DEVICE_COMMIT_CUH
