// Acts on one command: claims a submitted slot after checking its payload, aborts, releases.
#ifndef BLINK_DEVICE_CLAIM_CUH
#define BLINK_DEVICE_CLAIM_CUH

#include "blink/device/lanes.cuh"
#include "blink/device/ring.cuh"
#include "blink/device/state.cuh"

namespace blink {

// Makes a slot empty, ending its request first where one is under way. By the team.
template <typename Team>
BLINK_FUNCTION void empty_slot(Scheduler* s, Team& team, uint32_t slot, uint32_t error) {
  const uint32_t state = s->slots[slot].state;
  team.sync();
  if (is_active(state)) {
    end_request(s, team, slot, BLINK_STATE_EMPTY, BLINK_FINISH_ABORT, error);
    return;
  }
  if (team.is_leader()) {
    s->slots[slot].state = BLINK_STATE_EMPTY;
    s->slots[slot].num_generated = 0;
    publish_status(s, slot);
  }
  team.sync();
}

// Acts on an abort or release. A release of a running request aborts it too.
template <typename Team>
BLINK_FUNCTION void close_slot(Scheduler* s, Team& team, const Event& event) {
  const uint32_t state = s->slots[event.slot].state;
  const uint32_t command = unpack_command(event.word).command;
  const bool is_late = unpack_command(event.word).sequence != s->slots[event.slot].sequence;
  team.sync();
  if (team.is_leader()) {
    s->seen_commands[event.slot] = event.word;
    if (is_late && command != BLINK_COMMAND_NONE) ++s->counters.late_commands;
  }
  team.sync();
  if (is_late || state == BLINK_STATE_EMPTY) return;
  if (command == BLINK_COMMAND_RELEASE) empty_slot(s, team, event.slot, BLINK_ERROR_NONE);
  if (command == BLINK_COMMAND_ABORT && is_active(state)) {
    end_request(s, team, event.slot, BLINK_STATE_DECODE_COMPLETED, BLINK_FINISH_ABORT,
                BLINK_ERROR_NONE);
  }
}

// Copies a request out of the ring and sums its checksum on the way. `num_bad_ids` gets the number
// of prompt ids past the vocabulary. The copy is what was checked, so the ring cannot change under
// us.
template <typename Team>
BLINK_FUNCTION uint64_t copy_request(Scheduler* s, Team& team, uint32_t slot,
                                     uint64_t* num_bad_ids) {
  const uint32_t* source = reinterpret_cast<const uint32_t*>(&s->ring_requests[slot]);
  uint32_t* copy = reinterpret_cast<uint32_t*>(&s->requests[slot]);
  uint64_t sum = 0;
  for (uint32_t i = team.id(); i < sizeof(blink_slot_request) / 4; i += team.count()) {
    copy[i] = load_relaxed(source + i);
    if (i >= kChecksumSkipWords) sum += checksum_term(i - kChecksumSkipWords, copy[i]);
  }
  const uint32_t num_prompt_tokens =
      smaller(load_relaxed(&s->ring_requests[slot].num_prompt_tokens), s->prompt_stride_tokens);
  const uint32_t* prompt = prompt_of(s, slot);
  uint64_t bad_ids = 0;
  for (uint32_t i = team.id(); i < num_prompt_tokens; i += team.count()) {
    const uint32_t token_id = load_relaxed(prompt + i);
    sum += checksum_term(kChecksumRequestWords + i, token_id);
    if (token_id >= s->limits.vocab_size) ++bad_ids;
  }
  uint64_t total = 0;
  team.exclusive_sum(sum, &total);
  team.exclusive_sum(bad_ids, num_bad_ids);
  team.sync();
  return total;
}

BLINK_FUNCTION bool is_between(float value, float low, float high) {
  return value >= low && value <= high;  // false for NaN
}

// Returns the BLINK_ERROR_* of a request whose checksum is right.
BLINK_FUNCTION uint32_t check_request(const Scheduler* s, const blink_slot_request& request) {
  constexpr float kLargest = 3.402823466e38f;
  const bool is_good =
      request.num_prompt_tokens >= 1 && request.num_prompt_tokens < s->header->max_seqlen &&
      request.max_output_tokens >= 1 && request.max_output_tokens <= s->ring_max_output_tokens &&
      request.num_stop_token_ids <= BLINK_MAX_STOP_TOKEN_IDS &&
      request.num_logit_bias <= BLINK_MAX_LOGIT_BIAS &&
      request.num_logprobs <= 1 + BLINK_MAX_TOP_LOGPROBS &&
      is_between(request.temperature, 0.0f, kLargest) && is_between(request.top_p, 0.0f, 1.0f) &&
      is_between(request.min_p, 0.0f, 1.0f) &&
      is_between(request.presence_penalty, -kLargest, kLargest) &&
      is_between(request.frequency_penalty, -kLargest, kLargest) &&
      is_between(request.repetition_penalty, 0.0f, kLargest);
  if (!is_good) return BLINK_ERROR_BAD_REQUEST;
  if (request.num_prompt_tokens >= s->limits.max_seqlen) return BLINK_ERROR_OUT_OF_PAGES;
  return BLINK_ERROR_NONE;
}

BLINK_FUNCTION uint32_t sampling_flags(const blink_slot_request& request) {
  const bool has_penalties = request.presence_penalty != 0.0f ||
                             request.frequency_penalty != 0.0f ||
                             request.repetition_penalty != 1.0f;
  uint32_t flags = BLINK_SAMPLE_ENABLED;
  if (has_penalties) flags |= BLINK_SAMPLE_PENALTIES;
  if (request.num_logit_bias > 0) flags |= BLINK_SAMPLE_LOGIT_BIAS;
  if (request.min_output_tokens > 0) flags |= BLINK_SAMPLE_MIN_TOKENS;
  return flags;
}

// Leader: takes the slot over, to wait for a lane or, with an error, to fail at once.
BLINK_FUNCTION void take_over(Scheduler* s, uint32_t front_end, const Event& event,
                              uint32_t error) {
  const blink_slot_request& request = s->requests[event.slot];
  SlotRecord& record = s->slots[event.slot];
  s->seen_commands[event.slot] = event.word;
  record.sequence = unpack_command(event.word).sequence;
  record.num_generated = 0;
  record.front_end = front_end;
  record.lane = kNone;
  if (error != BLINK_ERROR_NONE) {
    record.state = BLINK_STATE_FAILED;
    ++s->counters.failed;
    publish_ending(s, event.slot, BLINK_FINISH_ERROR, error);
    return;
  }
  record.num_prompt_tokens = request.num_prompt_tokens;
  record.max_output_tokens =
      smaller(request.max_output_tokens, s->limits.max_seqlen - request.num_prompt_tokens);
  record.sampling_flags = sampling_flags(request);
  record.submit_number = request.submit_number;
  record.state = BLINK_STATE_PREFILL_PENDING;
  insert_waiting(s, event.slot);
  publish_ending(s, event.slot, BLINK_FINISH_NONE, BLINK_ERROR_NONE);
}

// Leader: the payload does not match its checksum yet. It may be on its way; after enough readings
// it fails.
BLINK_FUNCTION void read_again(Scheduler* s, uint32_t front_end, const Event& event) {
  SlotRecord& record = s->slots[event.slot];
  const uint32_t sequence = unpack_command(event.word).sequence;
  if (record.reading_sequence != sequence) {
    record.reading_sequence = sequence;
    record.num_readings = 0;
  }
  if (++record.num_readings < kMaxChecksumReadings) {
    ++s->counters.checksum_retries;
    s->front_ends[front_end].must_scan = 1;
    return;
  }
  record.reading_sequence = 0;
  const bool is_too_long = s->requests[event.slot].num_prompt_tokens > s->prompt_stride_tokens;
  take_over(s, front_end, event, is_too_long ? BLINK_ERROR_BAD_REQUEST : BLINK_ERROR_CHECKSUM);
}

// Leader: what to do with a payload that was read.
BLINK_FUNCTION void judge_request(Scheduler* s, uint32_t front_end, const Event& event,
                                  uint64_t checksum, uint64_t num_bad_ids) {
  const blink_slot_request& request = s->requests[event.slot];
  if (checksum != request.checksum || request.sequence != unpack_command(event.word).sequence) {
    read_again(s, front_end, event);
    return;
  }
  if (request.epoch != s->front_ends[front_end].epoch) {
    // Either left over from an earlier life, or the front end attached after we last looked at its
    // epoch. It stored the epoch before this request, so that looking again (acquire) tells.
    if (request.epoch == load_acquire(&s->ring_front_ends[front_end].epoch)) {
      s->front_ends[front_end].must_scan = 1;
    } else {
      ++s->counters.late_commands;
      s->seen_commands[event.slot] = event.word;
    }
    return;
  }
  const uint32_t error = num_bad_ids > 0 ? BLINK_ERROR_BAD_REQUEST : check_request(s, request);
  take_over(s, front_end, event, error);
}

// Acts on a submit. It counts only in an empty slot and with a sequence that is not the last one's.
template <typename Team>
BLINK_FUNCTION void claim_slot(Scheduler* s, Team& team, uint32_t front_end, const Event& event) {
  const SlotRecord& record = s->slots[event.slot];
  const bool is_late =
      record.state != BLINK_STATE_EMPTY || record.sequence == unpack_command(event.word).sequence;
  team.sync();
  if (is_late) {
    if (team.is_leader()) {
      s->seen_commands[event.slot] = event.word;
      ++s->counters.late_commands;
    }
    team.sync();
    return;
  }
  uint64_t num_bad_ids = 0;
  const uint64_t checksum = copy_request(s, team, event.slot, &num_bad_ids);
  if (team.is_leader()) judge_request(s, front_end, event, checksum, num_bad_ids);
  team.sync();
}

}  // namespace blink

#endif  // BLINK_DEVICE_CLAIM_CUH
