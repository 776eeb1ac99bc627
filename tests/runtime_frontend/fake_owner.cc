#include "fake_owner.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace blink {
namespace {

uint64_t now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now).count());
}

template <typename T>
T load_acquire(T& word) {
  return std::atomic_ref<T>(word).load(std::memory_order_acquire);
}

template <typename T>
void store_release(T& word, T value) {
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}

}  // namespace

FakeOwner::FakeOwner(void* ring, Options options)
    : ring_(ring),
      options_(options),
      slots_(ring_.sizes().num_slots),
      epochs_(ring_.sizes().num_front_ends, 0) {}

void FakeOwner::run() {
  blink_ring_header& header = *ring_.header();
  while (load_acquire(header.stop) == 0) {
    std::atomic_ref<uint64_t>(header.heartbeat).fetch_add(1, std::memory_order_relaxed);
    if (!pass()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  (void)pass();  // the stop may come right behind a front end's last release
  store_release(header.stopped, 1u);
}

bool FakeOwner::pass() {
  ++num_passes_;
  clear_new_epochs();
  bool has_worked = false;
  const uint64_t now = now_us();
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    has_worked |= receive(slot);
    has_worked |= generate(slot, now);
  }
  return has_worked;
}

void FakeOwner::clear_new_epochs() {
  const uint32_t num_front_ends = ring_.sizes().num_front_ends;
  for (uint32_t f = 0; f < num_front_ends; ++f) {
    const uint32_t epoch = load_acquire(ring_.front_end(f)->epoch);
    if (epoch == epochs_[f]) continue;
    epochs_[f] = epoch;
    const uint32_t end = front_end_first_slot(f + 1, ring_.sizes().num_slots, num_front_ends);
    for (uint32_t slot = front_end_first_slot(f, ring_.sizes().num_slots, num_front_ends);
         slot < end; ++slot) {
      if (slots_[slot].state == BLINK_STATE_EMPTY) continue;
      if (slots_[slot].state == BLINK_STATE_DECODE_PROCESSING) --num_running_;
      slots_[slot].state = BLINK_STATE_EMPTY;
      publish(slot, BLINK_FINISH_ABORT, BLINK_ERROR_EPOCH);
    }
  }
}

bool FakeOwner::receive(uint32_t slot) {
  Slot& own = slots_[slot];
  const uint64_t word = load_acquire(ring_.command(slot)->word);
  if (word == own.seen_command) return false;
  own.seen_command = word;
  const CommandWord command = unpack_command(word);
  if (command.command == BLINK_COMMAND_SUBMIT) {
    if (own.state != BLINK_STATE_EMPTY || command.sequence == own.sequence) return false;
    std::memcpy(&own.request, ring_.request(slot), sizeof(own.request));
    own.sequence = command.sequence;
    own.num_generated = 0;
    own.next_token_us = 0;
    const uint64_t checksum =
        request_checksum(&own.request, ring_.prompt(slot), own.request.num_prompt_tokens);
    if (checksum != own.request.checksum) {
      own.state = BLINK_STATE_FAILED;
      publish(slot, BLINK_FINISH_ERROR, BLINK_ERROR_CHECKSUM);
      return true;
    }
    own.state = BLINK_STATE_PREFILL_PENDING;
    before_pending(own.request);
    publish(slot, BLINK_FINISH_NONE, BLINK_ERROR_NONE);
    return true;
  }
  if (command.sequence != own.sequence || own.state == BLINK_STATE_EMPTY) return false;
  if (command.command == BLINK_COMMAND_NONE) return false;
  if (own.state == BLINK_STATE_DECODE_PROCESSING) --num_running_;
  if (command.command == BLINK_COMMAND_RELEASE) {
    own.state = BLINK_STATE_EMPTY;
    publish(slot, BLINK_FINISH_NONE, BLINK_ERROR_NONE);
  } else if (!is_final_state(own.state)) {
    own.state = BLINK_STATE_DECODE_COMPLETED;
    publish(slot, BLINK_FINISH_ABORT, BLINK_ERROR_NONE);
  }
  return true;
}

bool FakeOwner::generate(uint32_t slot, uint64_t now) {
  Slot& own = slots_[slot];
  if (own.state == BLINK_STATE_PREFILL_PENDING) {
    if (options_.max_running != 0 && num_running_ >= options_.max_running) return false;
    ++num_running_;
    own.state = BLINK_STATE_DECODE_PROCESSING;
  }
  if (own.state != BLINK_STATE_DECODE_PROCESSING || now < own.next_token_us) return false;
  own.next_token_us = time_of_next_token(slot, now);
  const blink_slot_request& request = own.request;
  const uint32_t num_prompt = request.num_prompt_tokens;
  const bool ignores_eos = (request.flags & BLINK_REQUEST_IGNORE_EOS) != 0;
  uint32_t finish_reason = BLINK_FINISH_NONE;
  for (uint32_t i = 0; i < options_.burst && finish_reason == BLINK_FINISH_NONE; ++i) {
    const uint32_t index = own.num_generated;
    const bool is_past_end = index >= num_prompt && !ignores_eos;
    const uint32_t token = is_past_end ? kEos : ring_.prompt(slot)[index % num_prompt];
    if (token == kNanToken && !options_.is_wellbehaved) {
      --num_running_;
      own.state = BLINK_STATE_FAILED;
      publish(slot, BLINK_FINISH_ERROR, BLINK_ERROR_NAN_LOGITS);
      return true;
    }
    if (token == kStallToken && !options_.is_wellbehaved)
      std::this_thread::sleep_for(std::chrono::microseconds(options_.stall_us));
    write_record(slot, index, token);
    before_token(request, index);
    ++own.num_generated;
    const auto* stops_end = request.stop_token_ids + request.num_stop_token_ids;
    if (std::find(request.stop_token_ids, stops_end, token) != stops_end) {
      finish_reason = BLINK_FINISH_STOP;
    } else if (own.num_generated == request.max_output_tokens) {
      finish_reason = BLINK_FINISH_LENGTH;
    }
  }
  if (finish_reason != BLINK_FINISH_NONE) {
    --num_running_;
    own.state = BLINK_STATE_DECODE_COMPLETED;
  }
  publish(slot, finish_reason, BLINK_ERROR_NONE);
  return true;
}

// Logprobs that a test can foresee: the token's is -0.5 - its id / 64, and the ids from it on
// (from the next one on, for kUnlikelyToken) are the likeliest, each a quarter less than the one
// before.
void FakeOwner::write_record(uint32_t slot, uint32_t index, uint32_t token) {
  blink_output_record record{};
  record.token_id = token;
  record.logprob = -0.5f - static_cast<float>(token) / 64.0f;
  const uint32_t num_logprobs = slots_[slot].request.num_logprobs;
  record.num_top = num_logprobs > 0 ? num_logprobs - 1 : 0;
  const uint32_t first = token == kUnlikelyToken ? token + 1 : token;
  for (uint32_t i = 0; i < record.num_top; ++i) {
    record.top_ids[i] = (first + i) % 256;
    record.top_logprobs[i] = record.logprob - 0.25f * static_cast<float>(i);
  }
  std::memcpy(ring_.output_record(slot, index), &record, ring_.sizes().output_record_bytes);
}

uint64_t FakeOwner::time_of_next_token(uint32_t slot, uint64_t now) const {
  const uint64_t interval = options_.token_interval_us;
  const uint64_t next = std::max(slots_[slot].next_token_us, now) + interval;
  if (interval == 0 || options_.pace == Pace::as_admitted) return next;
  const bool is_spread = options_.pace == Pace::spread;
  // Spread: multiples of the golden ratio fall evenly between 0 and 1.
  const uint64_t phase = is_spread ? slot * 0x9e3779b9ull % (1ull << 32) * interval >> 32 : 0;
  return (next - phase) / interval * interval + phase;
}

// The word last, release: records, finish_reason and error are visible with it.
void FakeOwner::publish(uint32_t slot, uint32_t finish_reason, uint32_t error) {
  const Slot& own = slots_[slot];
  blink_slot_status* status = ring_.status(slot);
  std::atomic_ref<uint32_t>(status->finish_reason).store(finish_reason, std::memory_order_relaxed);
  std::atomic_ref<uint32_t>(status->error).store(error, std::memory_order_relaxed);
  store_release(status->word, pack_status(own.sequence, own.state, own.num_generated));
}

}  // namespace blink
