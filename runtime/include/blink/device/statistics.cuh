// What the outside may watch: counters, heartbeat, the longest step, and one trace record for each
// step.
#ifndef BLINK_DEVICE_STATISTICS_CUH
#define BLINK_DEVICE_STATISTICS_CUH

#include "blink/device/ring.cuh"
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

// Leader: remembers the longest step of the last minute, in two windows of half a minute.
BLINK_FUNCTION void note_step_time(Scheduler* s, uint64_t now_ns) {
  if (now_ns - s->window_start_ns >= kStepWindowNs) {
    s->previous_window_longest_ns = s->window_longest_ns;
    s->window_longest_ns = 0;
    s->window_start_ns = now_ns;
  }
  s->window_longest_ns = larger(s->window_longest_ns, now_ns - s->step_start_ns);
}

// Leader: makes the trace record of the step that is being committed.
BLINK_FUNCTION void note_trace(Scheduler* s, uint64_t now_ns) {
  ++s->num_traces;
  blink_trace_record& record = s->trace;
  record.step = s->num_traces;
  record.start_ns = s->step_start_ns;
  record.end_ns = now_ns;
  record.kind = s->step_kind;
  record.key_index = s->action_key;
  record.num_lanes = s->num_rows;
  record.num_tokens = s->num_tokens;
  record.requests_waiting = s->num_waiting + s->num_paused;
  record.pages_free = s->num_free_pages;
}

// Leader: the gauges and the heartbeat that report() publishes.
BLINK_FUNCTION void note_gauges(Scheduler* s, uint32_t scheduler_state) {
  s->counters.lanes_running = s->num_running;
  s->counters.requests_waiting = s->num_waiting + s->num_paused;
  s->counters.pages_free = s->num_free_pages;
  s->counters.pages_total = s->limits.num_kv_pages;
  s->scheduler_state = scheduler_state;
  ++s->heartbeat;
}

// One thread: copies the last trace record into the ring.
BLINK_FUNCTION void publish_trace(const Scheduler* s) {
  if (s->trace_capacity == 0 || s->num_traces == 0) return;
  const GraphKey& key = s->graphs.keys[s->trace.key_index];
  blink_trace_record* record = &s->ring_trace[(s->num_traces - 1) & (s->trace_capacity - 1)];
  store_relaxed(&record->step, s->trace.step);
  store_relaxed(&record->start_ns, s->trace.start_ns);
  store_relaxed(&record->end_ns, s->trace.end_ns);
  store_relaxed(&record->kind, s->trace.kind);
  store_relaxed(&record->key_index, s->trace.key_index);
  store_relaxed(&record->batch, key.batch);
  store_relaxed(&record->seqlen, key.seqlen);
  store_relaxed(&record->num_lanes, s->trace.num_lanes);
  store_relaxed(&record->num_tokens, s->trace.num_tokens);
  store_relaxed(&record->requests_waiting, s->trace.requests_waiting);
  store_relaxed(&record->pages_free, s->trace.pages_free);
  // Release: pairs with the reader's acquire; the record is there before the count says so. A
  // reader that falls a whole ring behind sees it by reading the count again afterwards.
  store_release(&s->header->trace_count, s->num_traces);
}

// One thread: heartbeat, number of steps, state, yardstick.
BLINK_FUNCTION void publish_life(const Scheduler* s) {
  store_relaxed(&s->header->step, s->counters.steps);
  store_relaxed(&s->header->longest_step_ns,
                larger(s->window_longest_ns, s->previous_window_longest_ns));
  store_relaxed(&s->header->scheduler_state, s->scheduler_state);
  store_relaxed(&s->header->heartbeat, s->heartbeat);
}

// Tells the ring what schedule() did: the tokens, which nobody sees before, the trace, the
// counters. By `count` threads without a barrier between them, so that it may run beside the launch
// of the next step; the team meets before and after. Doing it twice does no harm.
BLINK_FUNCTION void report(Scheduler* s, uint32_t index, uint32_t count) {
  for (uint32_t i = index; i < s->num_committed; i += count) {
    if (s->committed[i] != kNone) publish_status(s, s->committed[i]);
  }
  const uint64_t* source = reinterpret_cast<const uint64_t*>(&s->counters);
  uint64_t* target = reinterpret_cast<uint64_t*>(&s->header->counters);
  for (uint32_t i = index; i < kNumCounterWords; i += count) store_relaxed(target + i, source[i]);
  // Not by the first threads: over a link each release takes a microsecond.
  if (index == count - 1) publish_trace(s);
  if (index == count / 2) publish_life(s);
}

}  // namespace blink

#endif  // BLINK_DEVICE_STATISTICS_CUH
