// The ring as the scheduler uses it: prompts in, records and status words out. Orders: see abi.h.
#ifndef BLINK_DEVICE_RING_CUH
#define BLINK_DEVICE_RING_CUH

#include "blink/device/state.cuh"

namespace blink {

constexpr uint32_t kNanBits = 0x7FC00000u;  // logprob of a token that nobody asked it of

// Publishes state and count. Release: pairs with the front end's acquire of the same word, after
// which it reads the records, finish_reason and error stored before.
BLINK_FUNCTION void publish_status(Scheduler* s, uint32_t slot) {
  const SlotRecord& record = s->slots[slot];
  store_release(&s->ring_statuses[slot].word,
                pack_status(record.sequence, record.state, record.num_generated));
}

// Publishes a final state and its reason, which must be there before the word.
BLINK_FUNCTION void publish_ending(Scheduler* s, uint32_t slot, uint32_t finish_reason,
                                   uint32_t error) {
  store_relaxed(&s->ring_statuses[slot].finish_reason, finish_reason);
  store_relaxed(&s->ring_statuses[slot].error, error);
  publish_status(s, slot);
}

BLINK_FUNCTION const uint32_t* prompt_of(const Scheduler* s, uint32_t slot) {
  return s->ring_prompts + static_cast<uint64_t>(slot) * s->prompt_stride_tokens;
}

BLINK_FUNCTION unsigned char* output_record(const Scheduler* s, uint32_t slot, uint32_t index) {
  return s->ring_outputs + slot * s->output_stride_bytes +
         static_cast<uint64_t>(index) * s->output_record_bytes;
}

// Writes the record of output token `index`, sampled by `row`; publish_status makes it visible.
BLINK_FUNCTION void write_output_record(Scheduler* s, uint32_t slot, uint32_t index, uint32_t row,
                                        uint32_t token_id) {
  unsigned char* bytes = output_record(s, slot, index);
  blink_output_record* record = reinterpret_cast<blink_output_record*>(bytes);
  const uint32_t num_logprobs =
      s->step.sampled_logprobs == nullptr ? 0 : s->requests[slot].num_logprobs;
  const float* sampled = s->step.sampled_logprobs + row * (1 + 2 * BLINK_MAX_TOP_LOGPROBS);
  store_relaxed(&record->token_id, token_id);
  store_relaxed(&record->logprob,
                num_logprobs > 0 ? sampled[0] : __builtin_bit_cast(float, kNanBits));
  if (s->output_record_bytes < sizeof(blink_output_record)) return;
  const uint32_t num_top = num_logprobs > 0 ? num_logprobs - 1 : 0;
  store_relaxed(&record->num_top, num_top);
  for (uint32_t i = 0; i < num_top; ++i) {
    store_relaxed(&record->top_ids[i], static_cast<uint32_t>(sampled[1 + 2 * i]));
    store_relaxed(&record->top_logprobs[i], sampled[2 + 2 * i]);
  }
}

// The token at `position` of the slot's prompt and output. Ids past the vocabulary cannot pass the
// check on submit; should the front end overwrite its prompt later, the clamp keeps the embedding
// look-up inside.
BLINK_FUNCTION uint32_t history_token(const Scheduler* s, uint32_t slot, uint32_t position) {
  const uint32_t num_prompt_tokens = s->slots[slot].num_prompt_tokens;
  const uint32_t token_id = position < num_prompt_tokens
                                ? load_relaxed(prompt_of(s, slot) + position)
                                : load_relaxed(reinterpret_cast<const uint32_t*>(
                                      output_record(s, slot, position - num_prompt_tokens)));
  return smaller(token_id, s->limits.vocab_size - 1);
}

}  // namespace blink

#endif  // BLINK_DEVICE_RING_CUH
