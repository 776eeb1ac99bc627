// What the outside may watch: counters, heartbeat, the longest step, and one trace record for each
// step.
#ifndef BLINK_DEVICE_STATISTICS_CUH
#define BLINK_DEVICE_STATISTICS_CUH

#include "blink/device/state.cuh"

namespace blink {

// Leader: counts the step that was committed.
BLINK_FUNCTION void count_step(Scheduler* s) {
  ++s->counters.steps;
  if (s->step_kind == BLINK_GRAPH_PREFILL) {
    ++s->counters.prefill_steps;
    s->counters.prompt_tokens += s->num_tokens;
  } else {
    ++s->counters.decode_steps;
  }
  s->counters.off_cache_steps += s->step_off_cache;
}

// One thread: remembers the longest step of the last minute, in two windows of half a minute.
BLINK_FUNCTION void note_step_time(Scheduler* s, uint64_t now_ns) {
  if (now_ns - s->window_start_ns >= kStepWindowNs) {
    s->previous_window_longest_ns = s->window_longest_ns;
    s->window_longest_ns = 0;
    s->window_start_ns = now_ns;
  }
  s->window_longest_ns = larger(s->window_longest_ns, now_ns - s->step_start_ns);
  store_relaxed(&s->header->longest_step_ns,
                larger(s->window_longest_ns, s->previous_window_longest_ns));
}

// One thread: writes the record of the step that is being committed.
BLINK_FUNCTION void write_trace(Scheduler* s, uint64_t now_ns) {
  note_step_time(s, now_ns);
  if (s->trace_capacity == 0) return;
  const GraphKey& key = s->graphs.keys[s->action_key];
  blink_trace_record* record = &s->ring_trace[s->num_traces & (s->trace_capacity - 1)];
  store_relaxed(&record->step, s->num_traces + 1);
  store_relaxed(&record->start_ns, s->step_start_ns);
  store_relaxed(&record->end_ns, now_ns);
  store_relaxed(&record->kind, s->step_kind);
  store_relaxed(&record->key_index, s->action_key);
  store_relaxed(&record->batch, key.batch);
  store_relaxed(&record->seqlen, key.seqlen);
  store_relaxed(&record->num_lanes, s->num_rows);
  store_relaxed(&record->num_tokens, s->num_tokens);
  store_relaxed(&record->requests_waiting, s->num_waiting + s->num_paused);
  store_relaxed(&record->pages_free, s->num_free_pages);
  ++s->num_traces;
  // Release: pairs with the reader's acquire; the record is there before the count says so. A
  // reader that falls a whole ring behind sees it by reading the count again afterwards.
  store_release(&s->header->trace_count, s->num_traces);
}

// Publishes the counters and the heartbeat. By the team.
template <typename Team>
BLINK_FUNCTION void publish_statistics(Scheduler* s, Team& team) {
  team.sync();
  if (team.is_leader()) {
    s->counters.lanes_running = s->num_running;
    s->counters.requests_waiting = s->num_waiting + s->num_paused;
    s->counters.pages_free = s->num_free_pages;
    s->counters.pages_total = s->limits.num_kv_pages;
    ++s->heartbeat;
    store_relaxed(&s->header->step, s->counters.steps);
    store_relaxed(&s->header->heartbeat, s->heartbeat);
  }
  team.sync();
  const uint64_t* source = reinterpret_cast<const uint64_t*>(&s->counters);
  uint64_t* target = reinterpret_cast<uint64_t*>(&s->header->counters);
  for (uint32_t i = team.id(); i < kNumCounterWords; i += team.count()) {
    store_relaxed(target + i, source[i]);
  }
  team.sync();
}

}  // namespace blink

#endif  // BLINK_DEVICE_STATISTICS_CUH
