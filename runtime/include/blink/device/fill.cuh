// Fills the step's input buffers from its rows, and what lies past them with harmless padding
// (step.h).
#ifndef BLINK_DEVICE_FILL_CUH
#define BLINK_DEVICE_FILL_CUH

#include "blink/device/ring.cuh"
#include "blink/device/state.cuh"

namespace blink {

BLINK_FUNCTION void fill_row(Scheduler* s, uint32_t row_index) {
  const StepRow& row = s->rows[row_index];
  const blink_slot_request& request = s->requests[row.slot];
  const blink_step_buffers& step = s->step;
  step.row_query_start[row_index] = static_cast<int32_t>(row.first_token);
  step.row_kv_len[row_index] = static_cast<int32_t>(row.first_position + row.num_tokens);
  step.row_lane[row_index] = static_cast<int32_t>(row.lane);
  step.sample_token[row_index] = static_cast<int32_t>(row.first_token + row.num_tokens - 1);
  blink_sampling_params& sampling = step.sampling[row_index];
  sampling.seed = request.seed;
  sampling.token_index = s->slots[row.slot].num_generated;
  sampling.flags = row.samples != 0 ? s->slots[row.slot].sampling_flags : 0;
  sampling.temperature = request.temperature;
  sampling.top_p = request.top_p;
  sampling.min_p = request.min_p;
  sampling.top_k = request.top_k;
  sampling.slot = row.slot;
  sampling.num_logprobs = request.num_logprobs;
}

BLINK_FUNCTION void fill_padding_row(Scheduler* s, uint32_t row_index) {
  const blink_step_buffers& step = s->step;
  step.row_query_start[row_index] = static_cast<int32_t>(s->num_tokens);
  step.row_kv_len[row_index] = 0;
  step.row_lane[row_index] = static_cast<int32_t>(step.max_batch);
  step.sample_token[row_index] = 0;
  step.sampling[row_index] = blink_sampling_params{};
}

BLINK_FUNCTION void fill_token(const blink_step_buffers& step, uint32_t index, uint32_t token_id,
                               uint32_t position, uint32_t row) {
  step.input_ids[index] = static_cast<int32_t>(token_id);
  step.positions[index] = static_cast<int32_t>(position);
  step.token_row[index] = static_cast<int32_t>(row);
}

// Prefill: the next tokens of prompt and, after a pause, of output, all from the ring.
template <typename Team>
BLINK_FUNCTION void fill_prefill_tokens(Scheduler* s, Team& team) {
  for (uint32_t r = 0; r < s->num_rows; ++r) {
    const StepRow& row = s->rows[r];
    for (uint32_t i = team.id(); i < row.num_tokens; i += team.count()) {
      const uint32_t position = row.first_position + i;
      fill_token(s->step, row.first_token + i, history_token(s, row.slot, position), position, r);
    }
  }
}

// Decode: one token a row, the one sampled last.
template <typename Team>
BLINK_FUNCTION void fill_decode_tokens(Scheduler* s, Team& team) {
  for (uint32_t r = team.id(); r < s->num_rows; r += team.count()) {
    const StepRow& row = s->rows[r];
    fill_token(s->step, r, s->lanes[row.lane].last_token_id, row.first_position, r);
  }
}

// Fills all inputs for the key in action_key and counts the launch. By the team.
template <typename Team>
BLINK_FUNCTION void fill_step(Scheduler* s, Team& team, uint64_t now_ns) {
  const GraphKey& key = s->graphs.keys[s->action_key];
  const blink_step_buffers& step = s->step;
  const bool is_prefill = s->step_kind == BLINK_GRAPH_PREFILL;
  if (is_prefill) {
    fill_prefill_tokens(s, team);
  } else {
    fill_decode_tokens(s, team);
  }
  const uint32_t key_tokens = is_prefill ? key.seqlen : key.batch;
  for (uint32_t i = s->num_tokens + team.id(); i < key_tokens; i += team.count()) {
    fill_token(step, i, 0, 0, kNone);  // row -1
  }
  for (uint32_t r = team.id(); r < key.batch; r += team.count()) {
    if (r < s->num_rows) {
      fill_row(s, r);
    } else {
      fill_padding_row(s, r);
    }
  }
  if (team.is_leader()) {
    step.row_query_start[key.batch] = static_cast<int32_t>(s->num_tokens);
    step.state->num_tokens = s->num_tokens;
    step.state->num_rows = s->num_rows;
    step.state->kind = s->step_kind;
    step.state->key_index = s->action_key;
    step.state->launch = ++s->launch_number;
    s->step_start_ns = now_ns;
    s->step_in_flight = 1;
  }
  team.sync();
}

}  // namespace blink

#endif  // BLINK_DEVICE_FILL_CUH
