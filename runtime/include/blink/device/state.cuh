// The scheduler's whole state: one allocation in device memory, so that a relaunch loses nothing.
//
// Scheduler is its head; the arrays behind its pointers follow in the same allocation. Nobody but
// the scheduler's own team reads or writes it, so its words need no order.
#ifndef BLINK_DEVICE_STATE_CUH
#define BLINK_DEVICE_STATE_CUH

#include "blink/abi.hpp"
#include "blink/device/memory_order.cuh"
#include "blink/device/platform.cuh"
#include "blink/step.h"

namespace blink {

constexpr uint32_t kNone = 0xFFFFFFFFu;
constexpr uint32_t kMaxChecksumReadings = 4;      // the first and three more
constexpr uint32_t kRescanSteps = 64;             // steps between scans of all slots
constexpr uint64_t kIdleRescanNs = 1000000;       // the same when idle
constexpr uint64_t kStepWindowNs = 30000000000u;  // half of the minute of longest_step_ns
constexpr uint32_t kErrorIncompleteStep = 999;    // cudaErrorUnknown: the graph left no completion
constexpr uint32_t kNumCounterWords = sizeof(blink_counters) / 8;

// A captured graph. Index in GraphTable.keys is the key_index of step.h and of traces.
struct GraphKey {
  uint32_t kind;    // BLINK_GRAPH_*
  uint32_t batch;   // rows
  uint32_t seqlen;  // prefill: tokens of the step; decode: longest KV length
};

// Look-up of one kind: row `batch` of lut, column seqlen_bucket_index[ceil(seqlen /
// granule_tokens)].
struct GraphGrid {
  const uint16_t* lut;  // [max_batch + 1][num_seqlen_buckets] key index | kOffCacheBit
  const uint16_t* seqlen_bucket_index;  // [num_granules]
  uint32_t num_seqlen_buckets;
  uint32_t granule_tokens;
  uint32_t num_granules;
  uint32_t max_batch;
  uint32_t max_seqlen;
  uint32_t reserved0;
};

constexpr uint16_t kOffCacheBit = 0x8000;  // the exact bucket was not captured; a larger key runs

struct GraphTable {
  const GraphKey* keys;
  uint32_t num_keys;
  uint32_t reserved0;
  GraphGrid prefill;
  GraphGrid decode;
};

struct Limits {
  uint32_t num_slots;
  uint32_t num_front_ends;
  uint32_t max_batch;           // lanes
  uint32_t max_seqlen;          // tokens, prompt and output together, the KV cache's size heeded
  uint32_t max_prefill_tokens;  // of one step
  uint32_t max_prefill_batch;   // of one step
  uint32_t page_size_tokens;
  uint32_t num_kv_pages;  // usable; physical pages are 1..num_kv_pages, 0 is the sink
  uint32_t max_pages_per_lane;
  uint32_t vocab_size;
};

enum LanePhase : uint32_t { kLaneFree, kLanePrefill, kLaneDecode };

// A row of the running batch; its pages stand in step.page_table[lane].
struct Lane {
  uint32_t phase;  // LanePhase
  uint32_t slot;
  uint32_t kv_len;  // tokens whose keys and values are in the cache
  uint32_t num_pages;
  uint32_t last_token_id;  // decode: the token that goes in next
  uint32_t reserved0;
};

// The scheduler's own copy of a slot; the ring's status word is published from it.
struct SlotRecord {
  uint32_t sequence;
  uint32_t state;  // BLINK_STATE_*
  uint32_t num_generated;
  uint32_t num_prompt_tokens;
  uint32_t max_output_tokens;  // clamped to max_seqlen
  uint32_t lane;               // kNone without one
  uint32_t next;               // waiting queue of the front end, by submit number
  uint32_t previous;
  uint32_t front_end;
  uint32_t num_readings;      // of the payload, while its checksum disagrees
  uint32_t reading_sequence;  // the sequence that num_readings belongs to
  uint32_t sampling_flags;    // BLINK_SAMPLE_* of a row that samples
  uint64_t submit_number;
  uint64_t admit_number;  // age: order of first admission over all front ends
};

struct FrontEndRecord {
  uint64_t submit_count;  // as last seen
  uint32_t epoch;         // the one whose requests are served
  uint32_t ring_epoch;    // as last seen
  uint32_t first_slot;
  uint32_t end_slot;
  uint32_t head;  // waiting queue, oldest first
  uint32_t tail;
  uint32_t must_scan;  // 1: commands are known or likely to be there
  uint32_t reserved0;
};

// A slot with something to do, found by a scan.
struct Event {
  uint64_t order;      // submit: submit number; otherwise 0
  uint64_t word;       // of the command
  uint32_t is_submit;  // submits are handled after aborts and releases
  uint32_t slot;
};

enum RowOutcome : uint32_t { kRowGoesOn, kRowStopped, kRowFull, kRowIsNan };

// A row of the step at hand.
struct StepRow {
  uint32_t lane;
  uint32_t slot;
  uint32_t num_tokens;
  uint32_t first_token;     // index in the step
  uint32_t first_position;  // index in the sequence
  uint32_t samples;         // 0: a chunk but the last
  uint32_t outcome;         // RowOutcome, after the step
  uint32_t reserved0;
};

enum SchedulerAction : uint32_t { kActionIdle, kActionLaunch, kActionStop };

struct Scheduler {
  // set once by initialize_scheduler
  blink_ring_header* header;
  blink_front_end* ring_front_ends;
  blink_slot_command* ring_commands;
  blink_slot_request* ring_requests;
  blink_slot_status* ring_statuses;
  uint32_t* ring_prompts;
  unsigned char* ring_outputs;
  blink_trace_record* ring_trace;
  uint64_t output_stride_bytes;  // of a slot
  uint32_t output_record_bytes;
  uint32_t prompt_stride_tokens;
  uint32_t ring_max_output_tokens;
  uint32_t trace_capacity;
  blink_step_buffers step;
  blink_sampling_history history;  // step.state->history points here
  GraphTable graphs;
  Limits limits;

  Lane* lanes;                   // [max_batch]
  SlotRecord* slots;             // [num_slots]
  blink_slot_request* requests;  // [num_slots] verified copies
  uint64_t* seen_commands;       // [num_slots] command words already acted upon
  Event* events;                 // [power of two >= num_slots]
  StepRow* rows;                 // [max_batch]
  uint32_t* free_pages;          // [num_kv_pages] stack
  uint32_t* free_lanes;          // [max_batch] stack
  uint32_t* running;             // [max_batch] lanes, oldest first
  uint32_t* committed;           // [max_batch] slots whose tokens report() publishes, or kNone
  uint32_t* paused;              // [max_batch] slots, youngest first: a stack
  FrontEndRecord front_ends[BLINK_MAX_FRONT_ENDS];
  blink_counters counters;  // published every step

  // what to do next: the outcome of schedule()
  uint32_t action;      // SchedulerAction
  uint32_t action_key;  // key index of kActionLaunch

  uint32_t num_free_pages;
  uint32_t num_free_lanes;
  uint32_t num_running;
  uint32_t num_prefilling;  // of the running ones, those whose prompt is not in the cache yet
  uint32_t num_paused;
  uint32_t num_waiting;  // pending ones, paused ones not counted
  uint32_t num_events;
  uint32_t next_front_end;  // whose turn it is to be admitted from
  uint64_t next_admit_number;

  // the step in flight
  uint32_t num_rows;
  uint32_t num_tokens;
  uint32_t step_kind;
  uint32_t step_in_flight;
  uint32_t step_is_complete;
  uint32_t step_longest_kv_len;  // decode
  uint64_t launch_number;
  uint64_t step_start_ns;
  uint32_t step_off_cache;
  uint32_t step_num_prefilled;  // rows whose last chunk it was
  uint32_t last_step_was_prefill;
  uint32_t num_prefills_waited;  // prefill steps since the last decode, while lanes were decoding

  // what report() tells the ring
  uint32_t num_committed;
  uint32_t scheduler_state;  // BLINK_SCHEDULER_*
  uint64_t heartbeat;
  uint64_t num_traces;
  blink_trace_record trace;  // of the last step committed
  uint64_t last_scan_ns;
  uint64_t window_start_ns;
  uint64_t window_longest_ns;
  uint64_t previous_window_longest_ns;
  uint32_t steps_since_scan;
  uint32_t reserved1;
};

BLINK_FUNCTION constexpr uint32_t power_of_two_at_least(uint32_t value) {
  uint32_t power = 1;
  while (power < value) power *= 2;
  return power;
}

// Deals out 16-byte aligned pieces of an allocation; with a null base it only counts.
struct Carver {
  unsigned char* base;
  uint64_t offset_bytes;

  template <typename Item>
  BLINK_FUNCTION constexpr Item* take(uint64_t count) {
    Item* items = base == nullptr ? nullptr : reinterpret_cast<Item*>(base + offset_bytes);
    offset_bytes += (count * sizeof(Item) + 15) / 16 * 16;
    return items;
  }
};

// The arrays that every step touches, next to the head; points `scheduler` to them unless it is
// null.
BLINK_FUNCTION constexpr void carve_hot_arrays(Carver& carver, Scheduler* scheduler,
                                               uint32_t max_batch) {
  Lane* lanes = carver.take<Lane>(max_batch);
  StepRow* rows = carver.take<StepRow>(max_batch);
  uint32_t* running = carver.take<uint32_t>(max_batch);
  uint32_t* free_lanes = carver.take<uint32_t>(max_batch);
  uint32_t* paused = carver.take<uint32_t>(max_batch);
  uint32_t* committed = carver.take<uint32_t>(max_batch);
  if (scheduler == nullptr) return;
  scheduler->lanes = lanes;
  scheduler->rows = rows;
  scheduler->running = running;
  scheduler->free_lanes = free_lanes;
  scheduler->paused = paused;
  scheduler->committed = committed;
}

// Bytes of head and hot arrays.
BLINK_FUNCTION constexpr uint64_t hot_state_bytes(uint32_t max_batch) {
  Carver carver{nullptr, 0};
  carver.take<Scheduler>(1);
  carve_hot_arrays(carver, nullptr, max_batch);
  return carver.offset_bytes;
}

// Points the arrays of `scheduler` into its allocation; returns the bytes of the whole.
BLINK_FUNCTION constexpr uint64_t carve_scheduler(Scheduler* scheduler, uint32_t num_slots,
                                                  uint32_t max_batch, uint32_t num_kv_pages) {
  Carver carver{reinterpret_cast<unsigned char*>(scheduler), 0};
  carver.take<Scheduler>(1);
  carve_hot_arrays(carver, scheduler, max_batch);
  SlotRecord* slots = carver.take<SlotRecord>(num_slots);
  blink_slot_request* requests = carver.take<blink_slot_request>(num_slots);
  uint64_t* seen_commands = carver.take<uint64_t>(num_slots);
  Event* events = carver.take<Event>(power_of_two_at_least(num_slots));
  uint32_t* free_pages = carver.take<uint32_t>(num_kv_pages);
  if (scheduler != nullptr) {
    scheduler->slots = slots;
    scheduler->requests = requests;
    scheduler->seen_commands = seen_commands;
    scheduler->events = events;
    scheduler->free_pages = free_pages;
  }
  return carver.offset_bytes;
}

// Bytes of device memory to allocate for the scheduler.
BLINK_FUNCTION uint64_t scheduler_state_bytes(uint32_t num_slots, uint32_t max_batch,
                                              uint32_t num_kv_pages) {
  return carve_scheduler(nullptr, num_slots, max_batch, num_kv_pages);
}

BLINK_FUNCTION uint32_t pages_of(const Scheduler* s, uint32_t num_tokens) {
  return (num_tokens + s->limits.page_size_tokens - 1) / s->limits.page_size_tokens;
}

// Tokens that the model has to have seen before it can make the slot's next one.
BLINK_FUNCTION uint32_t history_tokens(const SlotRecord& slot) {
  return slot.num_prompt_tokens + slot.num_generated;
}

}  // namespace blink

#endif  // BLINK_DEVICE_STATE_CUH
