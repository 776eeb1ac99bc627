// Runs the scheduler on a script from stdin and prints each step: for comparison with
// tests/reference.
//
//   ring SLOTS FRONT_ENDS MAX_PROMPT MAX_OUTPUT MAX_SEQLEN MAX_BATCH VOCAB PAGE_SIZE PAGES
//        MAX_PREFILL_TOKENS MAX_PREFILL_BATCH         (first line)
//   attach FRONT_END EPOCH
//   submit FRONT_END SLOT SEQUENCE NUMBER EPOCH SEED MAX_OUTPUT NUM_STOPS STOP... NUM_PROMPT
//   TOKEN... abort SLOT SEQUENCE | release SLOT SEQUENCE fail (the launch of the next step fails)
//   step
//
// A step prints "prefill|decode|idle SLOT:FIRST_POSITION:NUM_TOKENS:SAMPLES ...", then the
// counters, then "SLOT SEQUENCE STATE NUM_GENERATED REASON ERROR" for every slot that was ever
// used, then ".".
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "fake_model.h"
#include "invariants.h"
#include "test_ring.h"

namespace blink::testing {
namespace {

struct Keys {
  Keys(uint32_t prefill_batch, uint32_t prefill_tokens, uint32_t decode_batch, uint32_t seqlen)
      : keys{{BLINK_GRAPH_PREFILL, prefill_batch, prefill_tokens},
             {BLINK_GRAPH_DECODE, decode_batch, seqlen}} {
    prefill_lut.assign(prefill_batch + 1, 0);
    decode_lut.assign(decode_batch + 1, 1);
    table.keys = keys;
    table.num_keys = 2;
    table.prefill = {prefill_lut.data(), one_bucket,     1, prefill_tokens, 2,
                     prefill_batch,      prefill_tokens, 0};
    table.decode = {decode_lut.data(), one_bucket, 1, seqlen, 2, decode_batch, seqlen, 0};
  }

  GraphKey keys[2];
  uint16_t one_bucket[2] = {0, 0};
  std::vector<uint16_t> prefill_lut;
  std::vector<uint16_t> decode_lut;
  GraphTable table{};
};

class Script {
 public:
  explicit Script(std::istream& in) : in_(in) {
    std::string word;
    RingSizes sizes;
    uint32_t max_prefill_tokens = 0;
    uint32_t max_prefill_batch = 0;
    in_ >> word >> sizes.num_slots >> sizes.num_front_ends >> sizes.max_prompt_tokens >>
        sizes.max_output_tokens >> sizes.max_seqlen >> sizes.max_batch >> sizes.vocab_size >>
        sizes.page_size_tokens >> sizes.num_kv_pages >> max_prefill_tokens >> max_prefill_batch;
    sizes.trace_capacity = 16;
    const uint32_t pages_per_lane =
        (sizes.max_seqlen + sizes.page_size_tokens - 1) / sizes.page_size_tokens;
    keys_ = std::make_unique<Keys>(max_prefill_batch, max_prefill_tokens, sizes.max_batch,
                                   sizes.max_seqlen);
    ring_ = std::make_unique<TestRing>(sizes);
    model_ = std::make_unique<FakeModel>(
        keys_->table, std::max(max_prefill_tokens, sizes.max_batch), sizes.max_batch,
        pages_per_lane, sizes.page_size_tokens, sizes.num_kv_pages, sizes.vocab_size);
    scheduler_ = std::make_unique<TestScheduler>(*ring_, model_->buffers(), keys_->table,
                                                 max_prefill_tokens);
  }

  void run() {
    std::string verb;
    while (in_ >> verb) {
      if (verb == "attach") attach();
      if (verb == "submit") submit();
      if (verb == "abort") command(BLINK_COMMAND_ABORT);
      if (verb == "release") command(BLINK_COMMAND_RELEASE);
      if (verb == "fail") fails_next_ = true;
      if (verb == "step") step();
    }
  }

 private:
  uint32_t number() {
    uint32_t value = 0;
    in_ >> value;
    return value;
  }

  void attach() {
    blink_front_end& line = ring_->front_end(number());
    line.submit_count = 0;
    line.epoch = number();
  }

  void submit() {
    blink_front_end& line = ring_->front_end(number());
    const uint32_t slot = number();
    blink_slot_request request{};
    request.sequence = number();
    request.submit_number = number();
    request.epoch = number();
    in_ >> request.seed;
    request.max_output_tokens = number();
    request.num_stop_token_ids = number();
    for (uint32_t i = 0; i < request.num_stop_token_ids; ++i) request.stop_token_ids[i] = number();
    std::vector<uint32_t> prompt(number());
    for (uint32_t& token : prompt) token = number();
    ring_->submit(slot, request, prompt);
    ++line.submit_count;
  }

  void command(uint32_t command) {
    const uint32_t slot = number();
    ring_->command(slot).word = pack_command(number(), command);
    for (uint32_t f = 0; f < ring_->sizes().num_front_ends; ++f) ++ring_->front_end(f).submit_count;
  }

  void step() {
    SingleThread team;
    Scheduler* s = scheduler_->get();
    model_->poison_inputs();
    schedule(s, team, now_ns_ += 1000);
    report(s, 0, 1);
    check_invariants(s, *ring_);
    const bool has_step = s->action == kActionLaunch;
    std::cout << (!has_step ? "idle" : s->step_kind == BLINK_GRAPH_PREFILL ? "prefill" : "decode");
    for (uint32_t i = 0; i < s->num_rows; ++i) {
      const StepRow& row = s->rows[i];
      std::cout << ' ' << row.slot << ':' << row.first_position << ':' << row.num_tokens << ':'
                << row.samples;
    }
    if (has_step && fails_next_) fail_step(s, team, 719);
    if (has_step && !fails_next_) model_->run(s->action_key);
    fails_next_ = false;
    print_state(*s);
  }

  void print_state(const Scheduler& s) {
    const blink_counters& c = s.counters;
    std::cout << "\ncounters " << c.admitted << ' ' << c.finished << ' ' << c.aborted << ' '
              << c.failed << ' ' << c.paused << ' ' << c.resumed << ' ' << c.late_commands << ' '
              << c.output_tokens << ' ' << c.prompt_tokens << ' ' << s.num_free_pages << '\n';
    for (uint32_t slot = 0; slot < ring_->sizes().num_slots; ++slot) {
      const StatusWord word = ring_->status_word(slot);
      if (word.sequence == 0) continue;
      std::cout << slot << ' ' << word.sequence << ' ' << word.state << ' ' << word.num_generated;
      if (is_final_state(word.state)) {
        std::cout << ' ' << ring_->status(slot).finish_reason << ' ' << ring_->status(slot).error;
      }
      for (uint32_t i = 0; i < word.num_generated; ++i) {
        std::cout << ' ' << ring_->output_token(slot, i);
      }
      std::cout << '\n';
    }
    std::cout << ".\n";
  }

  std::istream& in_;
  std::unique_ptr<Keys> keys_;
  std::unique_ptr<TestRing> ring_;
  std::unique_ptr<FakeModel> model_;
  std::unique_ptr<TestScheduler> scheduler_;
  uint64_t now_ns_ = 0;
  bool fails_next_ = false;
};

}  // namespace
}  // namespace blink::testing

int main() {
  std::ios::sync_with_stdio(false);
  try {
    blink::testing::Script script(std::cin);
    script.run();
  } catch (const std::exception& error) {
    std::cout << "failed: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
