// One random history of front ends, scheduler and model in virtual time; any broken promise throws.
#ifndef BLINK_TESTS_SCHEDULER_HISTORY_H
#define BLINK_TESTS_SCHEDULER_HISTORY_H

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fake_front_end.h"
#include "fake_model.h"
#include "graph_grid.h"
#include "invariants.h"
#include "team_threads.h"
#include "test_ring.h"

namespace blink::testing {

struct HistoryPlan {
  RingSizes sizes;
  uint32_t max_prefill_tokens;
  uint32_t max_prefill_batch;
  uint32_t num_calls;        // of schedule() with arrivals
  uint32_t max_submits;      // per front end and call
  uint32_t launch_failures;  // one in; 0: none
  bool stops_early;
  FrontEndOdds odds;
};

inline HistoryPlan random_plan(RandomSource& random) {
  HistoryPlan plan{};
  RingSizes& sizes = plan.sizes;
  sizes.num_front_ends = random.one_in(3) ? random.between(2, 3) : 1;
  sizes.num_slots = sizes.num_front_ends * random.between(2, 12);
  sizes.max_seqlen = random.between(6, 48);
  sizes.max_prompt_tokens = random.between(3, sizes.max_seqlen);
  sizes.max_output_tokens = random.between(2, sizes.max_seqlen);
  sizes.output_record_bytes = random.one_in(4) ? sizeof(blink_output_record) : 8;
  sizes.max_batch = random.between(1, 6);
  sizes.vocab_size = random.between(5, 60);
  sizes.page_size_tokens = 1u << random.below(4);
  const uint32_t pages_per_lane =
      (sizes.max_seqlen + sizes.page_size_tokens - 1) / sizes.page_size_tokens;
  // From less than one sequence to plenty: little more than one is where lanes pause.
  sizes.num_kv_pages = random.one_in(6)
                           ? random.between(1, pages_per_lane)
                           : pages_per_lane * random.between(1, 1 + random.below(sizes.max_batch)) +
                                 random.below(pages_per_lane + 1);
  sizes.trace_capacity = 16;
  plan.max_prefill_tokens = random.between(1, sizes.max_seqlen);
  plan.max_prefill_batch =
      std::min({sizes.max_batch, plan.max_prefill_tokens, random.between(1, 4)});
  plan.num_calls = random.between(20, 150);
  plan.max_submits = random.below(3);
  plan.launch_failures = random.one_in(4) ? random.between(10, 60) : 0;
  plan.stops_early = random.one_in(10);
  const auto odds = [&](uint32_t one_in) { return random.one_in(2) ? one_in : 0; };
  plan.odds = FrontEndOdds{odds(8), odds(8), odds(5), odds(30), odds(10), odds(60)};
  return plan;
}

class History {
 public:
  // `team`: null for a single thread.
  History(uint64_t seed, ThreadTeam* team)
      : random_(seed),
        team_(team),
        plan_(random_plan(random_)),
        graphs_(random_, plan_.max_prefill_batch, plan_.max_prefill_tokens, plan_.sizes.max_batch,
                plan_.sizes.max_seqlen),
        ring_(plan_.sizes),
        model_(graphs_.table(), std::max(plan_.max_prefill_tokens, plan_.sizes.max_batch),
               plan_.sizes.max_batch,
               (plan_.sizes.max_seqlen + plan_.sizes.page_size_tokens - 1) /
                   plan_.sizes.page_size_tokens,
               plan_.sizes.page_size_tokens, plan_.sizes.num_kv_pages, plan_.sizes.vocab_size),
        scheduler_(ring_, model_.buffers(), graphs_.table(), plan_.max_prefill_tokens) {
    for (uint32_t i = 0; i < plan_.sizes.num_front_ends; ++i) {
      front_ends_.emplace_back(ring_, i, scheduler_->limits.max_seqlen, plan_.odds);
    }
  }

  void run() {
    for (uint32_t i = 0; i < plan_.num_calls; ++i) take_turn(plan_.max_submits);
    if (!plan_.stops_early) drain();
    stop();
  }

  uint64_t digest() const { return digest_; }  // of all steps: rows, keys, order
  const blink_counters& counters() { return scheduler_->counters; }
  uint32_t num_requests() const {
    uint32_t sum = 0;
    for (const FakeFrontEnd& front_end : front_ends_) sum += front_end.num_submitted();
    return sum;
  }

 private:
  static constexpr uint32_t kDrainCalls = 20000;

  void take_turn(uint32_t max_submits) {
    for (FakeFrontEnd& front_end : front_ends_) front_end.act(random_, max_submits);
    model_.poison_inputs();
    const uint32_t oldest =
        scheduler_->num_running > 0 ? scheduler_->lanes[scheduler_->running[0]].slot : kNone;
    const uint64_t first_new = scheduler_->next_admit_number;
    call_schedule();
    check_invariants(scheduler_.get(), ring_);
    if (oldest != kNone) {
      BLINK_CHECK(scheduler_->slots[oldest].state != BLINK_STATE_DECODE_PAUSED,
                  "the oldest lane was paused");
    }
    check_admissions(first_new);
    if (scheduler_->action == kActionLaunch) {
      check_step();
      launch();
    } else {
      BLINK_CHECK(scheduler_->action == kActionIdle, "stopped by itself");
      BLINK_CHECK(scheduler_->num_running + scheduler_->num_paused + scheduler_->num_waiting == 0,
                  "idle while requests wait");
      now_ns_ += random_.between(1000, 300000);
    }
    for (FakeFrontEnd& front_end : front_ends_) front_end.poll(random_);
  }

  void call_schedule() {
    if (team_ == nullptr) {
      SingleThread single;
      schedule(scheduler_.get(), single, now_ns_);
      report(scheduler_.get(), 0, 1);
    } else {
      team_->run([&](TeamMember& member) {
        schedule(scheduler_.get(), member, now_ns_);
        report(scheduler_.get(), member.id(), member.count());
      });
    }
  }

  void check_admissions(uint64_t first_new) {
    for (uint32_t slot = 0; slot < plan_.sizes.num_slots; ++slot) {
      const SlotRecord& record = scheduler_->slots[slot];
      if (record.lane == kNone || record.admit_number < first_new) continue;
      for (FakeFrontEnd& front_end : front_ends_) {
        if (front_end.owns(slot)) front_end.check_is_first(slot);
      }
    }
  }

  void check_step() {
    const Scheduler* s = scheduler_.get();
    const bool is_prefill = s->step_kind == BLINK_GRAPH_PREFILL;
    uint32_t num_tokens = 0;
    uint32_t longest = 0;
    for (uint32_t i = 0; i < s->num_rows; ++i) {
      const StepRow& row = s->rows[i];
      const uint32_t end = row.first_position + row.num_tokens;
      BLINK_CHECK(row.first_position == s->lanes[row.lane].kv_len, "positions have a gap");
      BLINK_CHECK((row.samples != 0) == (end == history_tokens(s->slots[row.slot])),
                  "a row samples before its history is through, or not at its end");
      num_tokens += row.num_tokens;
      longest = std::max(longest, end);
      digest_ = mix64(digest_ + row.slot);
      digest_ = mix64(digest_ + (uint64_t{row.first_position} << 32 | row.num_tokens));
    }
    digest_ = mix64(digest_ + s->action_key);
    BLINK_CHECK(num_tokens == s->num_tokens, "num_tokens is wrong");
    BLINK_CHECK(s->action_key ==
                    graphs_.look_up(s->step_kind, s->num_rows, is_prefill ? num_tokens : longest),
                "not the cheapest key that fits");
    is_off_cache_ =
        !graphs_.has_exact_key(s->step_kind, s->num_rows, is_prefill ? num_tokens : longest);
    if (is_prefill) {
      BLINK_CHECK(num_tokens <= plan_.max_prefill_tokens, "too many tokens in a prefill step");
      BLINK_CHECK(s->num_rows <= plan_.max_prefill_batch, "too many prompts in a prefill step");
      BLINK_CHECK(!last_was_prefill_ || s->num_running == s->num_prefilling,
                  "two prefill steps in a row while lanes decode");
    } else {
      BLINK_CHECK(s->num_rows == s->num_running - s->num_prefilling, "a decoding lane is left out");
    }
    last_was_prefill_ = is_prefill;
  }

  void launch() {
    now_ns_ += random_.between(1000, 100000);
    const uint32_t fate = plan_.launch_failures == 0 ? 2 : random_.below(plan_.launch_failures);
    if (fate >= 2) {
      if (is_off_cache_) ++num_off_cache_steps_;
      model_.run(scheduler_->action_key);
      return;
    }
    for (uint32_t i = 0; i < scheduler_->num_rows; ++i) {
      for (FakeFrontEnd& front_end : front_ends_) {
        front_end.note_launch_failure(scheduler_->rows[i].slot);
      }
    }
    if (fate == 1) return;  // the graph is cut short: no completion
    SingleThread single;
    fail_step(scheduler_.get(), single, 719);
    check_invariants(scheduler_.get(), ring_);
    BLINK_CHECK(ring_.header().launch_error == 719, "the launch error is not readable");
  }

  void drain() {
    const auto is_busy = [&] {
      return std::any_of(front_ends_.begin(), front_ends_.end(),
                         [](const FakeFrontEnd& f) { return !f.in_flight().empty(); });
    };
    uint32_t num_calls = 0;
    while (is_busy()) {
      BLINK_CHECK(++num_calls < kDrainCalls, "requests that never end");
      take_turn(0);
    }
    for (uint32_t i = 0; i < 100; ++i) take_turn(0);  // releases, and what nobody rang the bell for
    const Scheduler* s = scheduler_.get();
    BLINK_CHECK(s->num_free_pages == s->limits.num_kv_pages, "pages leak");
    BLINK_CHECK(s->num_free_lanes == s->limits.max_batch, "lanes leak");
    for (uint32_t slot = 0; slot < s->limits.num_slots; ++slot) {
      BLINK_CHECK(s->slots[slot].state == BLINK_STATE_EMPTY, "a slot was never emptied");
    }
  }

  void stop() {
    ring_.header().stop = 1;
    call_schedule();
    const blink_counters& counters = ring_.header().counters;
    BLINK_CHECK(scheduler_->action == kActionStop && ring_.header().stopped == 1, "does not stop");
    BLINK_CHECK(ring_.header().scheduler_state == BLINK_SCHEDULER_STOPPED, "state is not stopped");
    BLINK_CHECK(counters.steps == counters.prefill_steps + counters.decode_steps, "steps");
    BLINK_CHECK(counters.max_wait_steps <= 1, "a lane waited for two prefill steps");
    BLINK_CHECK(counters.off_cache_steps == num_off_cache_steps_, "steps off the cache");
    BLINK_CHECK(counters.steps == ring_.header().trace_count, "traces");
    BLINK_CHECK(ring_.header().heartbeat > 0, "no heartbeat");
    if (counters.steps > 0) {
      const blink_trace_record& last = ring_.trace(counters.steps - 1);
      BLINK_CHECK(last.step == counters.steps && last.end_ns >= last.start_ns, "last trace record");
    }
  }

  RandomSource random_;
  ThreadTeam* team_;
  HistoryPlan plan_;
  RandomGraphs graphs_;
  TestRing ring_;
  FakeModel model_;
  TestScheduler scheduler_;
  std::vector<FakeFrontEnd> front_ends_;
  uint64_t now_ns_ = 1;
  uint64_t digest_ = 0;
  uint64_t num_off_cache_steps_ = 0;
  bool is_off_cache_ = false;
  bool last_was_prefill_ = false;
};

}  // namespace blink::testing

#endif  // BLINK_TESTS_SCHEDULER_HISTORY_H
