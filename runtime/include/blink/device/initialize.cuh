// Brings up the scheduler's state from a ring header, step buffers and a graph table.
#ifndef BLINK_DEVICE_INITIALIZE_CUH
#define BLINK_DEVICE_INITIALIZE_CUH

#include "blink/device/state.cuh"

namespace blink {

enum InitializeError : uint32_t {
  kInitializeOk,
  kInitializeBadHeader,       // magic, version or sizes of the ring are not ours
  kInitializeRingTooSmall,    // ring_bytes is less than the header's
  kInitializeStateTooSmall,   // the scheduler's allocation
  kInitializeBuffersDiffer,   // step buffers and ring disagree on lanes or page size
  kInitializeGraphsTooSmall,  // no graph takes a full batch, a full prefill step or the longest
                              // sequence
};

BLINK_FUNCTION const char* initialize_error_text(uint32_t error) {
  switch (error) {
    case kInitializeOk:
      return "no error";
    case kInitializeBadHeader:
      return "the ring's magic, version or sizes are not those of this scheduler";
    case kInitializeRingTooSmall:
      return "the ring's memory is smaller than its header says";
    case kInitializeStateTooSmall:
      return "the scheduler's memory is smaller than its state";
    case kInitializeBuffersDiffer:
      return "step buffers and ring disagree on the number of lanes or the page size";
    case kInitializeGraphsTooSmall:
      return "the graph table lacks a key for a full step";
  }
  return "unknown";
}

BLINK_FUNCTION uint32_t check_initialization(const blink_ring_header* header, uint64_t ring_bytes,
                                             uint64_t state_bytes, const blink_step_buffers& step,
                                             const GraphTable& graphs,
                                             uint32_t max_prefill_tokens) {
  if (load_acquire(&header->magic) != BLINK_MAGIC || header->abi_version != BLINK_ABI_VERSION ||
      header->header_bytes != sizeof(blink_ring_header) || header->num_front_ends == 0 ||
      header->num_front_ends > BLINK_MAX_FRONT_ENDS || header->num_slots == 0 ||
      header->vocab_size == 0 || header->num_kv_pages == 0 || header->page_size_tokens == 0 ||
      (header->trace_capacity & (header->trace_capacity - 1)) != 0) {
    return kInitializeBadHeader;
  }
  if (ring_bytes < header->ring_bytes) return kInitializeRingTooSmall;
  if (state_bytes <
      scheduler_state_bytes(header->num_slots, header->max_batch, header->num_kv_pages)) {
    return kInitializeStateTooSmall;
  }
  if (step.max_batch != header->max_batch || step.page_size_tokens != header->page_size_tokens ||
      step.max_step_tokens < larger(max_prefill_tokens, header->max_batch) ||
      uint64_t{step.max_pages_per_lane} * step.page_size_tokens < header->max_seqlen) {
    return kInitializeBuffersDiffer;
  }
  if (graphs.num_keys == 0 || graphs.prefill.max_seqlen < max_prefill_tokens ||
      graphs.prefill.max_batch == 0 || graphs.decode.max_batch < header->max_batch ||
      graphs.decode.max_seqlen < header->max_seqlen) {
    return kInitializeGraphsTooSmall;
  }
  return kInitializeOk;
}

// Leader: addresses and limits.
BLINK_FUNCTION void point_into_ring(Scheduler* s, void* ring, const blink_step_buffers& step,
                                    const GraphTable& graphs, uint32_t max_prefill_tokens) {
  unsigned char* bytes = static_cast<unsigned char*>(ring);
  blink_ring_header* header = static_cast<blink_ring_header*>(ring);
  s->header = header;
  s->ring_front_ends = reinterpret_cast<blink_front_end*>(bytes + header->front_end_offset);
  s->ring_commands = reinterpret_cast<blink_slot_command*>(bytes + header->command_offset);
  s->ring_requests = reinterpret_cast<blink_slot_request*>(bytes + header->request_offset);
  s->ring_statuses = reinterpret_cast<blink_slot_status*>(bytes + header->status_offset);
  s->ring_prompts = reinterpret_cast<uint32_t*>(bytes + header->prompt_offset);
  s->ring_outputs = bytes + header->output_offset;
  s->ring_trace = reinterpret_cast<blink_trace_record*>(bytes + header->trace_offset);
  s->output_record_bytes = header->output_record_bytes;
  s->output_stride_bytes =
      static_cast<uint64_t>(header->max_output_tokens) * header->output_record_bytes;
  s->prompt_stride_tokens = header->max_prompt_tokens;
  s->ring_max_output_tokens = smaller(header->max_output_tokens, BLINK_MAX_NUM_GENERATED);
  s->trace_capacity = header->trace_capacity;
  s->step = step;
  s->history = blink_sampling_history{s->requests,
                                      s->ring_prompts,
                                      s->ring_outputs,
                                      s->output_stride_bytes,
                                      s->output_record_bytes,
                                      s->prompt_stride_tokens};
  s->graphs = graphs;
  const uint64_t cache_tokens =
      static_cast<uint64_t>(header->num_kv_pages) * header->page_size_tokens;
  s->limits.num_slots = header->num_slots;
  s->limits.num_front_ends = header->num_front_ends;
  s->limits.max_batch = header->max_batch;
  s->limits.max_seqlen =
      static_cast<uint32_t>(smaller(static_cast<uint64_t>(header->max_seqlen), cache_tokens));
  s->limits.max_prefill_tokens = max_prefill_tokens;
  s->limits.max_prefill_batch = smaller(graphs.prefill.max_batch, header->max_batch);
  s->limits.page_size_tokens = header->page_size_tokens;
  s->limits.num_kv_pages = header->num_kv_pages;
  s->limits.max_pages_per_lane = step.max_pages_per_lane;
  s->limits.vocab_size = header->vocab_size;
  s->num_free_pages = header->num_kv_pages;
  s->num_free_lanes = header->max_batch;
  for (uint32_t i = 0; i < header->num_front_ends; ++i) {
    s->front_ends[i] = FrontEndRecord{};
    s->front_ends[i].first_slot =
        front_end_first_slot(i, header->num_slots, header->num_front_ends);
    s->front_ends[i].end_slot =
        front_end_first_slot(i + 1, header->num_slots, header->num_front_ends);
    s->front_ends[i].head = kNone;
    s->front_ends[i].tail = kNone;
    s->front_ends[i].must_scan = 1;  // commands may be there already
  }
}

// Initializes the scheduler in `state`, which is 16-byte aligned. Returns an InitializeError. By
// the team.
template <typename Team>
BLINK_FUNCTION uint32_t initialize_scheduler(void* state, uint64_t state_bytes, Team& team,
                                             void* ring, uint64_t ring_bytes,
                                             const blink_step_buffers& step,
                                             const GraphTable& graphs,
                                             uint32_t max_prefill_tokens) {
  const uint32_t error = check_initialization(static_cast<blink_ring_header*>(ring), ring_bytes,
                                              state_bytes, step, graphs, max_prefill_tokens);
  if (error != kInitializeOk) return error;
  uint64_t* words = static_cast<uint64_t*>(state);
  const blink_ring_header* header = static_cast<const blink_ring_header*>(ring);
  const uint64_t num_words =
      scheduler_state_bytes(header->num_slots, header->max_batch, header->num_kv_pages) / 8;
  for (uint64_t i = team.id(); i < num_words; i += team.count()) words[i] = 0;
  team.sync();
  Scheduler* s = static_cast<Scheduler*>(state);
  if (team.is_leader()) {
    carve_scheduler(s, header->num_slots, header->max_batch, header->num_kv_pages);
    point_into_ring(s, ring, step, graphs, max_prefill_tokens);
    step.state->completion = 0;
    step.state->launch = 0;
    step.state->history = &s->history;
  }
  team.sync();
  for (uint32_t i = team.id(); i < s->limits.num_kv_pages; i += team.count()) {
    s->free_pages[i] = s->limits.num_kv_pages - i;  // page 1 goes first
  }
  for (uint32_t i = team.id(); i < s->limits.max_batch; i += team.count()) {
    s->free_lanes[i] = s->limits.max_batch - 1 - i;
  }
  for (uint32_t i = team.id(); i < s->limits.num_slots; i += team.count()) {
    s->slots[i].lane = kNone;
    s->slots[i].next = kNone;
    s->slots[i].previous = kNone;
  }
  const uint64_t num_entries = (uint64_t{s->limits.max_batch} + 1) * s->limits.max_pages_per_lane;
  for (uint64_t i = team.id(); i < num_entries; i += team.count()) step.page_table[i] = 0;
  team.sync();
  return kInitializeOk;
}

}  // namespace blink

#endif  // BLINK_DEVICE_INITIALIZE_CUH
