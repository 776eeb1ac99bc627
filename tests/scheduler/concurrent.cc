// The CPU placement and two front ends, each on a thread of its own, on one ring: concurrent
// [REQUESTS]
//
// Under TSAN this shows that acquire and release of abi.h order every payload, record and slot that
// is used again. Each front end keeps its slots full; its requests must be admitted in the order of
// its submits.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "blink/cpu/scheduler_loop.hpp"
#include "fake_front_end.h"
#include "fake_model.h"
#include "graph_grid.h"
#include "test_ring.h"

namespace blink::testing {
namespace {

constexpr uint32_t kFrontEnds = 2;

RingSizes ring_sizes() {
  RingSizes sizes;
  sizes.num_slots = 16;
  sizes.num_front_ends = kFrontEnds;
  sizes.max_prompt_tokens = 24;
  sizes.max_output_tokens = 12;
  sizes.max_seqlen = 40;
  sizes.max_batch = 4;
  sizes.vocab_size = 50;
  sizes.page_size_tokens = 4;
  sizes.num_kv_pages = 16;  // little more than one longest sequence: lanes pause
  sizes.trace_capacity = 64;
  return sizes;
}

// One front end's thread: fills free slots, reads records, releases.
class BusyFrontEnd {
 public:
  BusyFrontEnd(TestRing& ring, uint32_t index, uint32_t num_requests)
      : ring_(ring),
        index_(index),
        first_slot_(front_end_first_slot(index, ring.sizes().num_slots, kFrontEnds)),
        end_slot_(front_end_first_slot(index + 1, ring.sizes().num_slots, kFrontEnds)),
        num_requests_(num_requests),
        random_(index + 1),
        in_flight_(end_slot_ - first_slot_) {}

  void run() {
    store_release(&ring_.front_end(index_).epoch, 1u);
    while (num_done_ < num_requests_) {
      for (uint32_t slot = first_slot_; slot < end_slot_; ++slot) look_at(slot);
      std::this_thread::yield();
    }
  }

 private:
  struct Request {
    bool is_open = false;
    bool is_released = true;
    uint32_t sequence = 0;
    Expectation expectation;
  };

  void look_at(uint32_t slot) {
    Request& request = in_flight_[slot - first_slot_];
    // Acquire: pairs with the scheduler's release of the status word.
    const StatusWord word = unpack_status(load_acquire(&ring_.status(slot).word));
    if (request.is_released && word.state == BLINK_STATE_EMPTY) {
      if (num_submitted_ < num_requests_) submit(slot, request);
      return;
    }
    if (!request.is_open || word.sequence != request.sequence || !is_final_state(word.state))
      return;
    check(slot, request, word);
    request.is_open = false;
    request.is_released = true;
    ++num_done_;
    send(slot, pack_command(request.sequence, BLINK_COMMAND_RELEASE));
  }

  void submit(uint32_t slot, Request& request) {
    std::vector<uint32_t> prompt(random_.between(1, ring_.sizes().max_prompt_tokens));
    for (uint32_t& token : prompt) token = random_.below(ring_.sizes().vocab_size);
    blink_slot_request fields{};
    fields.sequence = ++request.sequence;
    fields.epoch = 1;
    fields.submit_number = ++num_submitted_;
    fields.seed = random_.next() >> 1;
    fields.max_output_tokens = random_.between(1, ring_.sizes().max_output_tokens);
    fields.num_prompt_tokens = static_cast<uint32_t>(prompt.size());
    fields.logit_bias_ids[0] = index_;  // tells the model whose it is
    request.expectation =
        expect(prompt, fields, ring_.sizes().max_seqlen, ring_.sizes().vocab_size);
    fields.checksum = request_checksum(&fields, prompt.data(), fields.num_prompt_tokens);
    std::copy(prompt.begin(), prompt.end(), ring_.prompt(slot));
    ring_.request(slot) = fields;
    store_relaxed(&ring_.command(slot).submit_number, fields.submit_number);
    request.is_open = true;
    request.is_released = false;
    send(slot, pack_command(fields.sequence, BLINK_COMMAND_SUBMIT));
  }

  void send(uint32_t slot, uint64_t word) {
    store_release(&ring_.command(slot).word, word);  // pairs with the scheduler's acquire
    store_release(&ring_.front_end(index_).submit_count, ++num_commands_);
  }

  void check(uint32_t slot, const Request& request, const StatusWord& word) {
    const Expectation& expectation = request.expectation;
    const bool is_nan = expectation.finish_reason == BLINK_FINISH_ERROR;
    BLINK_CHECK((word.state == BLINK_STATE_FAILED) == is_nan, "ended in another state");
    BLINK_CHECK(ring_.status(slot).finish_reason == expectation.finish_reason, "finish reason");
    BLINK_CHECK(word.num_generated == expectation.token_ids.size(), "number of tokens");
    for (uint32_t i = 0; i < word.num_generated; ++i) {
      BLINK_CHECK(ring_.output_token(slot, i) == expectation.token_ids[i], "token");
    }
  }

  TestRing& ring_;
  uint32_t index_;
  uint32_t first_slot_;
  uint32_t end_slot_;
  uint32_t num_requests_;
  RandomSource random_;
  std::vector<Request> in_flight_;
  uint64_t num_submitted_ = 0;
  uint64_t num_commands_ = 0;
  uint32_t num_done_ = 0;
};

// What a launch does: checks the order of first prefills, runs the model.
struct Steps {
  FakeModel* model;
  Scheduler* scheduler;
  uint64_t newest[kFrontEnds] = {};
  uint64_t num_admitted = 0;

  static int launch(void* argument, uint32_t key_index) {
    auto& self = *static_cast<Steps*>(argument);
    for (uint32_t i = 0; i < self.scheduler->num_rows; ++i)
      self.check_order(self.scheduler->rows[i]);
    self.model->run(key_index);
    return 0;
  }

  void check_order(const StepRow& row) {
    const SlotRecord& record = scheduler->slots[row.slot];
    if (record.admit_number < num_admitted) return;
    num_admitted = record.admit_number + 1;
    BLINK_CHECK(record.submit_number == newest[record.front_end] + 1,
                "not first come, first served");
    newest[record.front_end] = record.submit_number;
  }
};

void run(uint32_t num_requests) {
  const RingSizes sizes = ring_sizes();
  RandomSource random(1);
  const RandomGraphs graphs(random, 2, 16, sizes.max_batch, sizes.max_seqlen);
  TestRing ring(sizes);
  FakeModel model(graphs.table(), 16, sizes.max_batch, sizes.max_seqlen / sizes.page_size_tokens,
                  sizes.page_size_tokens, sizes.num_kv_pages, sizes.vocab_size);
  Steps steps{&model, nullptr};
  blink_cpu_scheduler* scheduler = nullptr;
  char error[200] = "";
  const int code =
      create_cpu_scheduler(ring.data(), ring.bytes(), &model.buffers(), graphs.table(), 16,
                           &Steps::launch, &steps, &scheduler, error, sizeof error);
  BLINK_CHECK(code == 0, error);
  steps.scheduler = scheduler->state();
  std::vector<BusyFrontEnd> front_ends;
  for (uint32_t i = 0; i < kFrontEnds; ++i) front_ends.emplace_back(ring, i, num_requests);
  std::thread loop([&] { run_cpu_scheduler(scheduler); });
  std::vector<std::thread> threads;
  for (BusyFrontEnd& front_end : front_ends) threads.emplace_back([&] { front_end.run(); });
  for (std::thread& thread : threads) thread.join();
  store_release(&ring.header().stop, 1u);
  loop.join();
  const blink_counters& counters = ring.header().counters;
  BLINK_CHECK(counters.admitted == uint64_t{kFrontEnds} * num_requests, "admitted");
  BLINK_CHECK(counters.checksum_retries == 0, "a payload was seen torn");
  std::printf("requests %llu steps %llu paused %llu\n",
              static_cast<unsigned long long>(counters.admitted),
              static_cast<unsigned long long>(counters.steps),
              static_cast<unsigned long long>(counters.paused));
  delete scheduler;
}

}  // namespace
}  // namespace blink::testing

int main(int argc, char** argv) {
  try {
    blink::testing::run(argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 1000);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  return 0;
}
