// A front end that acts at random within the protocol, and checks every word that comes back.
#ifndef BLINK_TESTS_SCHEDULER_FAKE_FRONT_END_H
#define BLINK_TESTS_SCHEDULER_FAKE_FRONT_END_H

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "fake_model.h"
#include "random_source.h"
#include "test_ring.h"

namespace blink::testing {

// What the model will say to a request that nobody disturbs.
struct Expectation {
  std::vector<uint32_t> token_ids;
  uint32_t finish_reason = BLINK_FINISH_LENGTH;  // stop, length, or error for NaN
};

inline Expectation expect(const std::vector<uint32_t>& prompt, const blink_slot_request& request,
                          uint32_t max_seqlen, uint32_t vocab_size) {
  Expectation expectation;
  std::vector<uint32_t> history = prompt;
  const uint32_t room = max_seqlen - static_cast<uint32_t>(prompt.size());
  const uint32_t max_tokens = std::min(request.max_output_tokens, room);
  while (expectation.token_ids.size() < max_tokens) {
    const uint32_t index = static_cast<uint32_t>(expectation.token_ids.size());
    const int32_t token = next_token(request.seed, index, history, vocab_size);
    if (token == kNanToken) {
      expectation.finish_reason = BLINK_FINISH_ERROR;
      break;
    }
    history.push_back(static_cast<uint32_t>(token));
    expectation.token_ids.push_back(static_cast<uint32_t>(token));
    const uint32_t* stops = request.stop_token_ids;
    if (std::count(stops, stops + request.num_stop_token_ids, static_cast<uint32_t>(token)) > 0) {
      expectation.finish_reason = BLINK_FINISH_STOP;
      break;
    }
  }
  return expectation;
}

enum class Payload { good, bad_field, too_long, late, never };

struct InFlight {
  uint32_t sequence = 0;
  uint64_t submit_number = 0;
  std::vector<uint32_t> prompt;
  blink_slot_request request{};
  Expectation expectation;
  Payload payload = Payload::good;
  uint32_t calls_until_payload = 0;  // late: schedule() calls before the prompt is right
  bool has_quick_payload = false;    // late, but within the readings that the scheduler makes
  bool is_silent = false;            // submit_count was not raised
  bool was_aborted = false;
  bool launch_failed = false;
  bool is_over = false;
  uint32_t num_seen = 0;
};

struct FrontEndOdds {
  uint32_t bad_payload;  // one in
  uint32_t late_payload;
  uint32_t silent;
  uint32_t abort;
  uint32_t late_command;
  uint32_t restart;
};

class FakeFrontEnd {
 public:
  FakeFrontEnd(TestRing& ring, uint32_t index, uint32_t max_seqlen, const FrontEndOdds& odds)
      : ring_(ring),
        index_(index),
        first_slot_(
            front_end_first_slot(index, ring.sizes().num_slots, ring.sizes().num_front_ends)),
        end_slot_(
            front_end_first_slot(index + 1, ring.sizes().num_slots, ring.sizes().num_front_ends)),
        max_seqlen_(max_seqlen),
        odds_(odds) {
    attach();
  }

  const std::map<uint32_t, InFlight>& in_flight() const { return in_flight_; }
  uint32_t num_submitted() const { return num_submitted_; }
  bool owns(uint32_t slot) const { return slot >= first_slot_ && slot < end_slot_; }

  // Between two calls of schedule(): perhaps submits, aborts, restarts, or sends a command too
  // late.
  void act(RandomSource& random, uint32_t max_submits) {
    deliver_late_payloads();
    if (random.one_in(odds_.restart)) restart(random);
    for (uint32_t i = 0; i < max_submits; ++i) submit(random);
    if (random.one_in(odds_.late_command)) send_late_command(random);
    for (auto& [slot, request] : in_flight_) {
      const bool is_claimed = ring_.status_word(slot).sequence == request.sequence;
      if (!is_claimed || request.is_over || !random.one_in(odds_.abort)) continue;
      request.was_aborted = true;
      send(slot, pack_command(request.sequence, BLINK_COMMAND_ABORT), !random.one_in(odds_.silent));
    }
  }

  // Reads every status word as a real front end would; checks it; releases what is over.
  void poll(RandomSource& random) {
    for (auto& [slot, request] : in_flight_) {
      const StatusWord word = ring_.status_word(slot);
      if (word.sequence != request.sequence) {
        BLINK_CHECK(request.num_seen == 0, "a claimed slot shows another sequence");
        continue;
      }
      check_tokens(slot, request, word);
      if (is_final_state(word.state)) check_ending(slot, request, word);
    }
    std::erase_if(in_flight_, [&](auto& entry) {
      auto& [slot, request] = entry;
      if (!request.is_over || random.one_in(3)) return false;
      send(slot, pack_command(request.sequence, BLINK_COMMAND_RELEASE), true);
      return true;
    });
    release_leftovers();
  }

  // The graph that held this slot's row could not be launched.
  void note_launch_failure(uint32_t slot) {
    const auto found = in_flight_.find(slot);
    if (found != in_flight_.end()) found->second.launch_failed = true;
  }

  // First come, first served: called when `slot` has just been given its first lane.
  void check_is_first(uint32_t slot) {
    const uint64_t number = in_flight_.at(slot).submit_number;
    for (const auto& [other, request] : in_flight_) {
      if (request.submit_number >= number || request.payload != Payload::good) continue;
      const StatusWord word = ring_.status_word(other);
      const bool is_claimed = word.sequence == request.sequence;
      if (!is_claimed && request.is_silent) continue;
      BLINK_CHECK(
          is_claimed && word.state != BLINK_STATE_PREFILL_PENDING,
          "slot " + std::to_string(slot) + " was admitted before slot " + std::to_string(other));
    }
  }

  // Aborts nothing and submits nothing more; rings the bell once so that nothing stays unseen.
  void finish_quietly() { ++ring_.front_end(index_).submit_count; }

 private:
  void attach() {
    ring_.front_end(index_).submit_count = 0;
    ring_.front_end(index_).epoch = ++epoch_;
    next_submit_number_ = 1;
  }

  // Forgets all requests, as a new process would. Some lives withdraw unseen submits first.
  void restart(RandomSource& random) {
    const bool withdraws = random.one_in(2);
    for (uint32_t slot = first_slot_; slot < end_slot_; ++slot) {
      const CommandWord command = unpack_command(ring_.command(slot).word);
      if (withdraws && command.command == BLINK_COMMAND_SUBMIT &&
          command.sequence != ring_.status_word(slot).sequence) {
        ring_.command(slot).word = pack_command(command.sequence, BLINK_COMMAND_NONE);
      }
    }
    in_flight_.clear();
    attach();
  }

  // A submit of an earlier life whose payload never came fails after the attach: nobody waits for
  // it.
  void release_leftovers() {
    for (uint32_t slot = first_slot_; slot < end_slot_; ++slot) {
      const StatusWord word = ring_.status_word(slot);
      const uint64_t release = pack_command(word.sequence, BLINK_COMMAND_RELEASE);
      if (in_flight_.contains(slot) || !is_final_state(word.state)) continue;
      if (ring_.command(slot).word != release) send(slot, release, true);
    }
  }

  void send(uint32_t slot, uint64_t word, bool rings_bell) {
    ring_.command(slot).word = word;
    if (rings_bell) ++ring_.front_end(index_).submit_count;
  }

  // With an older sequence, or to a free slot with the one it had last: must hit nothing.
  void send_late_command(RandomSource& random) {
    const uint32_t slot = random.between(first_slot_, end_slot_ - 1);
    const StatusWord word = ring_.status_word(slot);
    const uint32_t command = random.one_in(2) ? BLINK_COMMAND_ABORT : BLINK_COMMAND_RELEASE;
    const auto found = in_flight_.find(slot);
    if (found == in_flight_.end()) {
      if (word.state != BLINK_STATE_EMPTY || word.sequence == 0) return;
      send(slot, pack_command(word.sequence - random.below(2), command), true);
      return;
    }
    // A command overwrites the one before: only where the submit was taken and no abort is under
    // way.
    const InFlight& request = found->second;
    if (word.sequence != request.sequence || request.was_aborted || request.is_over) return;
    send(slot, pack_command(word.sequence - 1, command), true);
  }

  void submit(RandomSource& random) {
    const uint32_t slot = random.between(first_slot_, end_slot_ - 1);
    const StatusWord word = ring_.status_word(slot);
    if (in_flight_.contains(slot) || word.state != BLINK_STATE_EMPTY) return;
    const uint32_t used = unpack_command(ring_.command(slot).word).sequence;
    InFlight request = make_request(random, std::max(used, word.sequence) + 1);
    ring_.submit(slot, request.request, request.prompt);
    if (request.payload == Payload::late || request.payload == Payload::never) {
      ring_.prompt(slot)[0] ^= 1;
    }
    request.is_silent = random.one_in(odds_.silent);
    if (!request.is_silent) ++ring_.front_end(index_).submit_count;
    in_flight_.emplace(slot, std::move(request));
    ++num_submitted_;
  }

  InFlight make_request(RandomSource& random, uint32_t sequence) {
    const RingSizes& sizes = ring_.sizes();
    InFlight flight;
    blink_slot_request& request = flight.request;
    const uint32_t longest = std::min(sizes.max_prompt_tokens, sizes.max_seqlen - 1);
    const uint32_t length =
        random.one_in(2) ? random.between(1, longest) : random.between(1, std::min(longest, 6u));
    for (uint32_t i = 0; i < length; ++i) flight.prompt.push_back(random.below(sizes.vocab_size));
    flight.sequence = request.sequence = sequence;
    flight.submit_number = request.submit_number = next_submit_number_;
    next_submit_number_ += random.between(1, 3);
    request.epoch = epoch_;
    request.seed = random.next() >> 1;
    request.max_output_tokens = random.between(1, sizes.max_output_tokens);
    request.temperature = 1;
    request.top_p = 1;
    request.repetition_penalty = 1;
    request.num_stop_token_ids = random.one_in(2) ? 0 : random.below(4);
    for (uint32_t i = 0; i < request.num_stop_token_ids; ++i) {
      request.stop_token_ids[i] = random.below(sizes.vocab_size);
    }
    if (length >= max_seqlen_) flight.payload = Payload::too_long;
    if (random.one_in(odds_.bad_payload)) spoil(random, flight);
    if (flight.payload == Payload::good && random.one_in(odds_.late_payload)) {
      flight.payload = random.one_in(3) ? Payload::never : Payload::late;
      flight.calls_until_payload = random.between(1, 6);
      flight.has_quick_payload =
          flight.payload == Payload::late && flight.calls_until_payload < kMaxChecksumReadings;
    }
    if (flight.payload == Payload::good || flight.payload == Payload::late) {
      flight.expectation = expect(flight.prompt, request, max_seqlen_, sizes.vocab_size);
    }
    return flight;
  }

  // Puts one field outside its limits; the checksum stays right.
  void spoil(RandomSource& random, InFlight& flight) {
    flight.payload = Payload::bad_field;
    switch (random.below(5)) {
      case 0:
        flight.request.max_output_tokens = 0;
        break;
      case 1:
        flight.request.max_output_tokens = ring_.sizes().max_output_tokens + 1;
        break;
      case 2:
        flight.prompt.back() = ring_.sizes().vocab_size;
        break;
      case 3:
        flight.request.num_stop_token_ids = BLINK_MAX_STOP_TOKEN_IDS + 1;
        break;
      case 4:
        flight.request.temperature = -1;
        break;
    }
  }

  void deliver_late_payloads() {
    for (auto& [slot, request] : in_flight_) {
      if (request.payload != Payload::late || request.calls_until_payload == 0) continue;
      if (--request.calls_until_payload == 0) ring_.prompt(slot)[0] = request.prompt[0];
    }
  }

  void check_tokens(uint32_t slot, InFlight& request, const StatusWord& word) {
    const std::string where = "slot " + std::to_string(slot) + " sequence " +
                              std::to_string(word.sequence) + " state " +
                              std::to_string(word.state);
    BLINK_CHECK(word.state != BLINK_STATE_EMPTY, where + ": emptied before its release");
    BLINK_CHECK(word.num_generated >= request.num_seen, where + ": fewer tokens than before");
    BLINK_CHECK(word.num_generated <= request.expectation.token_ids.size(),
                where + ": more tokens than the model makes");
    for (uint32_t i = 0; i < word.num_generated; ++i) {
      BLINK_CHECK(ring_.output_token(slot, i) == request.expectation.token_ids[i],
                  where + ": token " + std::to_string(i) + " differs");
    }
    if (word.state == BLINK_STATE_PREFILL_PENDING) {
      BLINK_CHECK(word.num_generated == 0, where + ": tokens while pending");
    }
    request.num_seen = word.num_generated;
  }

  void check_ending(uint32_t slot, InFlight& request, const StatusWord& word) {
    const blink_slot_status& status = ring_.status(slot);
    const std::string where = "slot " + std::to_string(slot) + " ended with reason " +
                              std::to_string(status.finish_reason) + " error " +
                              std::to_string(status.error);
    const bool is_complete = word.num_generated == request.expectation.token_ids.size();
    request.is_over = true;
    if (word.state == BLINK_STATE_DECODE_COMPLETED) {
      BLINK_CHECK(status.error == BLINK_ERROR_NONE, where);
      BLINK_CHECK(request.payload == Payload::good || request.payload == Payload::late, where);
      if (status.finish_reason == BLINK_FINISH_ABORT) {
        BLINK_CHECK(request.was_aborted, where + ", but was not aborted");
      } else {
        BLINK_CHECK(is_complete && status.finish_reason == request.expectation.finish_reason,
                    where);
      }
      return;
    }
    BLINK_CHECK(status.finish_reason == BLINK_FINISH_ERROR, where);
    switch (status.error) {
      case BLINK_ERROR_CHECKSUM:
        BLINK_CHECK(request.payload == Payload::never || request.payload == Payload::late, where);
        BLINK_CHECK(!request.has_quick_payload, where + ", too soon");
        break;
      case BLINK_ERROR_BAD_REQUEST:
        BLINK_CHECK(request.payload == Payload::bad_field, where);
        break;
      case BLINK_ERROR_OUT_OF_PAGES:
        BLINK_CHECK(request.payload == Payload::too_long, where);
        break;
      case BLINK_ERROR_NAN_LOGITS:
        BLINK_CHECK(is_complete && request.expectation.finish_reason == BLINK_FINISH_ERROR, where);
        break;
      case BLINK_ERROR_LAUNCH:
        BLINK_CHECK(request.launch_failed, where);
        break;
      case BLINK_ERROR_EPOCH:
        fail(__FILE__, __LINE__, where);
    }
  }

  TestRing& ring_;
  uint32_t index_;
  uint32_t first_slot_;
  uint32_t end_slot_;
  uint32_t max_seqlen_;
  FrontEndOdds odds_;
  uint32_t epoch_ = 0;
  uint64_t next_submit_number_ = 1;
  uint32_t num_submitted_ = 0;
  std::map<uint32_t, InFlight> in_flight_;
};

}  // namespace blink::testing

#endif  // BLINK_TESTS_SCHEDULER_FAKE_FRONT_END_H
