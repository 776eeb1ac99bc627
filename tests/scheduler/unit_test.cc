// Situations that random histories meet seldom or never: races inside one scan, bursts, statistics.
#include <cstdio>
#include <functional>
#include <vector>

#include "fake_model.h"
#include "graph_grid.h"
#include "invariants.h"
#include "test_ring.h"

namespace blink::testing {
namespace {

// One thread that lets something happen in the middle of a scan: right after it found a command.
struct InterruptedThread : SingleThread {
  std::function<void()> interrupt;

  uint32_t append(uint32_t* counter) {
    if (interrupt) std::exchange(interrupt, nullptr)();
    return SingleThread::append(counter);
  }
};

struct Bench {
  explicit Bench(const RingSizes& sizes, uint32_t max_prefill_batch = 1)
      : random(7),
        graphs(random, max_prefill_batch, 32, sizes.max_batch, sizes.max_seqlen),
        ring(sizes),
        model(graphs.table(), std::max(32u, sizes.max_batch), sizes.max_batch,
              sizes.max_seqlen / sizes.page_size_tokens, sizes.page_size_tokens, sizes.num_kv_pages,
              sizes.vocab_size),
        scheduler(ring, model.buffers(), graphs.table(), 32) {
    ring.front_end(0).epoch = 1;
  }

  void submit(uint32_t slot, uint64_t number, uint32_t epoch = 1, uint32_t max_tokens = 4) {
    blink_slot_request request{};
    request.sequence = 1;
    request.epoch = epoch;
    request.submit_number = number;
    request.max_output_tokens = max_tokens;
    request.seed = 1;
    ring.submit(slot, request, {1, 2, 3});
    ++ring.front_end(0).submit_count;
  }

  template <typename Team>
  void step(Team& team, uint64_t duration_ns = 1000) {
    schedule(scheduler.get(), team, now_ns);
    report(scheduler.get(), 0, 1);
    check_invariants(scheduler.get(), ring);
    now_ns += duration_ns;
    if (scheduler->action == kActionLaunch) model.run(scheduler->action_key);
  }

  void step() {
    SingleThread team;
    step(team);
  }

  uint32_t state(uint32_t slot) { return ring.status_word(slot).state; }

  RandomSource random;
  RandomGraphs graphs;
  TestRing ring;
  FakeModel model;
  TestScheduler scheduler;
  uint64_t now_ns = 1;
};

RingSizes small_sizes() {
  RingSizes sizes;
  sizes.num_slots = 8;
  sizes.max_prompt_tokens = 32;
  sizes.max_output_tokens = 32;
  sizes.max_seqlen = 64;
  sizes.max_batch = 2;
  sizes.vocab_size = 100;
  sizes.page_size_tokens = 8;
  sizes.num_kv_pages = 16;
  sizes.trace_capacity = 4;
  return sizes;
}

// The scan passed slot 0, then request 1 was written there and request 2 into slot 5, which it then
// saw.
void test_order_survives_a_scan_that_sees_half() {
  Bench bench(small_sizes());
  bench.submit(5, 2);
  InterruptedThread team;
  team.interrupt = [&] { bench.submit(0, 1); };
  bench.step(team);
  BLINK_CHECK(bench.scheduler->num_rows == 1 && bench.scheduler->rows[0].slot == 0,
              "request 2 was admitted before request 1");
}

// Request 3 came during the first look: it must wait, because request 2 may be hidden from both.
void test_newer_requests_wait_for_the_next_scan() {
  Bench bench(small_sizes());
  bench.submit(5, 1);
  InterruptedThread team;
  team.interrupt = [&] { bench.submit(1, 3); };
  bench.step(team);
  BLINK_CHECK(bench.state(1) == BLINK_STATE_EMPTY, "request 3 was taken from the second look");
  bench.submit(6, 2);
  bench.step();
  BLINK_CHECK(bench.state(1) == BLINK_STATE_PREFILL_PENDING, "request 3 was lost");
  BLINK_CHECK(bench.state(6) == BLINK_STATE_PREFILL_PENDING, "request 2 was lost");
  BLINK_CHECK(bench.scheduler->slots[6].next == 1, "request 3 stands before request 2");
}

// The front end attached anew and submitted after the scheduler had read its epoch.
void test_a_request_of_an_epoch_not_seen_yet_is_not_lost() {
  Bench bench(small_sizes());
  bench.step();
  bench.submit(3, 1, 2);
  InterruptedThread team;
  team.interrupt = [&] { bench.ring.front_end(0).epoch = 2; };
  bench.step(team);
  BLINK_CHECK(bench.scheduler->counters.late_commands == 0, "the new epoch's request was dropped");
  bench.step();
  BLINK_CHECK(bench.state(3) == BLINK_STATE_PREFILL_PROCESSING, "the new epoch's request is lost");
}

// A burst that fills the ring, its numbers against the order of slots.
void test_a_full_ring_is_admitted_in_order() {
  RingSizes sizes = small_sizes();
  sizes.num_slots = 4096;
  sizes.max_batch = 8;
  sizes.num_kv_pages = 64;
  Bench bench(sizes, 8);
  for (uint32_t slot = 0; slot < sizes.num_slots; ++slot) {
    bench.submit(slot, sizes.num_slots - slot, 1, 1);
  }
  uint32_t next = sizes.num_slots;
  while (next > 0) {
    bench.step();
    BLINK_CHECK(bench.scheduler->action == kActionLaunch, "idle while requests wait");
    for (uint32_t i = 0; i < bench.scheduler->num_rows; ++i) {
      const StepRow& row = bench.scheduler->rows[i];
      if (row.first_position == 0) BLINK_CHECK(row.slot == --next, "out of order");
    }
  }
}

// With one count lost in every way, the slots are looked at after 64 steps, or a millisecond when
// idle.
void test_a_lost_bell_is_heard() {
  Bench bench(small_sizes());
  bench.step();
  bench.submit(1, 1);
  --bench.ring.front_end(0).submit_count;
  bench.step();
  BLINK_CHECK(bench.state(1) == BLINK_STATE_EMPTY, "the test's bell was heard");
  bench.now_ns += kIdleRescanNs;
  bench.step();
  BLINK_CHECK(bench.state(1) == BLINK_STATE_PREFILL_PROCESSING, "not found when idle");
  Bench busy(small_sizes());
  uint32_t num_steps = 0;
  busy.submit(0, 1, 1, 32);
  for (; busy.state(1) == BLINK_STATE_EMPTY && num_steps < 200; ++num_steps) {
    if (num_steps == 3) {
      busy.submit(1, 2);
      --busy.ring.front_end(0).submit_count;
    }
    if (busy.state(0) == BLINK_STATE_DECODE_COMPLETED) {
      busy.ring.command(0).word = pack_command(1, BLINK_COMMAND_RELEASE);
    }
    busy.step();
  }
  BLINK_CHECK(num_steps <= kRescanSteps + 1, "not found within 64 steps");
}

// The watchdog's yardstick forgets steps that are more than a minute old; traces wrap.
void test_statistics() {
  Bench bench(small_sizes());
  SingleThread team;
  bench.submit(0, 1, 1, 32);
  bench.step(team, 5000000);  // the prefill takes 5 ms
  bench.step(team, 1000);
  BLINK_CHECK(bench.ring.header().longest_step_ns == 5000000, "the longest step");
  for (uint32_t i = 0; i < 3; ++i) {
    bench.step(team, kStepWindowNs + 1);
  }
  BLINK_CHECK(bench.ring.header().longest_step_ns > 5000000, "a longer step");
  for (uint32_t i = 0; i < 8; ++i) bench.step(team, 1000);
  const uint64_t count = bench.ring.header().trace_count;
  BLINK_CHECK(count == bench.ring.header().counters.steps && count > 4, "traces");
  const blink_trace_record& last = bench.ring.trace(count - 1);
  BLINK_CHECK(last.step == count && last.end_ns - last.start_ns == 1000, "the last trace");
  BLINK_CHECK(last.kind == BLINK_GRAPH_DECODE && last.num_lanes == 1, "the last trace's step");
}

// What initialize_scheduler refuses, before it has written anything.
void test_initialization_is_checked() {
  Bench bench(small_sizes());
  SingleThread team;
  std::vector<uint64_t> memory(1 << 16);
  const uint64_t bytes = memory.size() * 8;
  const auto initialize = [&](uint64_t ring_bytes, uint64_t state_bytes, uint32_t max_prefill) {
    return initialize_scheduler(memory.data(), state_bytes, team, bench.ring.data(), ring_bytes,
                                bench.model.buffers(), bench.graphs.table(), max_prefill);
  };
  const uint64_t ring_bytes = bench.ring.bytes();
  BLINK_CHECK(initialize(ring_bytes, bytes, 32) == kInitializeOk, "a good ring");
  BLINK_CHECK(initialize(ring_bytes - 1, bytes, 32) == kInitializeRingTooSmall, "ring bytes");
  BLINK_CHECK(initialize(ring_bytes, 64, 32) == kInitializeStateTooSmall, "state bytes");
  BLINK_CHECK(initialize(ring_bytes, bytes, 33) == kInitializeBuffersDiffer, "prefill tokens");
  bench.ring.header().max_batch = 3;
  BLINK_CHECK(initialize(ring_bytes, bytes, 32) == kInitializeBuffersDiffer, "lanes");
  bench.ring.header().magic ^= 1;
  BLINK_CHECK(initialize(ring_bytes, bytes, 32) == kInitializeBadHeader, "magic");
}

}  // namespace
}  // namespace blink::testing

int main() {
  using namespace blink::testing;
  const struct {
    const char* name;
    void (*run)();
  } tests[] = {
      {"order_survives_a_scan_that_sees_half", test_order_survives_a_scan_that_sees_half},
      {"newer_requests_wait_for_the_next_scan", test_newer_requests_wait_for_the_next_scan},
      {"a_request_of_an_epoch_not_seen_yet_is_not_lost",
       test_a_request_of_an_epoch_not_seen_yet_is_not_lost},
      {"a_full_ring_is_admitted_in_order", test_a_full_ring_is_admitted_in_order},
      {"a_lost_bell_is_heard", test_a_lost_bell_is_heard},
      {"statistics", test_statistics},
      {"initialization_is_checked", test_initialization_is_checked},
  };
  int num_failed = 0;
  for (const auto& test : tests) {
    try {
      test.run();
    } catch (const std::exception& error) {
      std::printf("%s: %s\n", test.name, error.what());
      ++num_failed;
    }
  }
  return num_failed;
}
