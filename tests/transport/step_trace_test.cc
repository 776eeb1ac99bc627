// The reader of the step trace: order, wrap, what is lost, and a scheduler that overtakes it.
#include "transport/step_trace.h"

#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "check.h"
#include "transport/ring_layout.h"

namespace blink {
namespace {

constexpr uint64_t kCapacity = 16;

RingSizes small_sizes() {
  return {.num_slots = 4,
          .max_prompt_tokens = 8,
          .max_output_tokens = 8,
          .max_seqlen = 16,
          .max_batch = 4,
          .vocab_size = 100,
          .num_kv_pages = 4,
          .trace_capacity = kCapacity};
}

// A ring and its scheduler, who writes records whose every field says which one it is.
class TestRing {
 public:
  TestRing() : memory_(ring_layout_from_sizes(small_sizes()).ring_bytes / 4096 + 1) {
    create_ring(std::as_writable_bytes(std::span(memory_)), small_sizes());
    view_ = RingView(memory_.data());
  }

  std::unique_ptr<Transport> connect() {
    return connect_mapped(memory_.data(), memory_.size() * sizeof(Page));
  }

  // As publish_trace of statistics.cuh: words relaxed, the count released.
  void write(uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t step = ++num_written_;
      auto* words = reinterpret_cast<uint64_t*>(view_.trace(step - 1));
      for (size_t w = 0; w < sizeof(blink_trace_record) / 8; ++w) {
        std::atomic_ref<uint64_t>(words[w]).store(step, std::memory_order_relaxed);
      }
      std::atomic_ref<uint64_t>(view_.header()->trace_count).store(step, std::memory_order_release);
    }
  }

  void restart() {
    num_written_ = 0;
    std::atomic_ref<uint64_t>(view_.header()->trace_count).store(0, std::memory_order_release);
  }

 private:
  struct alignas(4096) Page {
    std::byte bytes[4096] = {};
  };

  std::vector<Page> memory_;
  RingView view_;
  uint64_t num_written_ = 0;
};

// Lets the scheduler write `count` records after the batch's first piece was read.
class OvertakenTransport final : public Transport {
 public:
  OvertakenTransport(TestRing& ring, uint64_t count)
      : ring_(ring), inner_(ring.connect()), count_(count) {}

  Status write(std::span<const WriteRequest> batch) override { return inner_->write(batch); }
  Status read(std::span<const ReadRequest> batch) override {
    for (const ReadRequest& request : batch) {
      if (const Status status = inner_->read(std::span(&request, 1)); status != Status::ok) {
        return status;
      }
      if (batch.size() > 1 && count_ > 0) ring_.write(std::exchange(count_, 0));
    }
    return Status::ok;
  }
  Status flush() override { return inner_->flush(); }
  TransportInfo info() const override { return inner_->info(); }
  void close() override { inner_->close(); }

 private:
  TestRing& ring_;
  std::unique_ptr<Transport> inner_;
  uint64_t count_;
};

void check_whole(const StepTraceReader& reader, uint64_t first_step) {
  uint64_t step = first_step;
  for (const blink_trace_record& record : reader.records()) {
    CHECK(record.step == step);
    uint64_t words[sizeof(record) / 8];
    std::memcpy(words, &record, sizeof(record));
    for (const uint64_t word : words) CHECK(word == step);
    ++step;
  }
}

TEST(in_order) {
  TestRing ring;
  const auto transport = ring.connect();
  StepTraceReader reader(*transport, small_sizes());
  CHECK(reader.poll() == Status::ok);
  CHECK(reader.records().empty());
  uint64_t total = 0;
  for (const uint64_t count : {1u, 0u, 5u, 16u, 3u, 15u}) {
    ring.write(count);
    CHECK(reader.poll() == Status::ok);
    CHECK(reader.records().size() == count - (count == kCapacity ? 1 : 0));
    check_whole(reader, total + 1 + (count == kCapacity ? 1 : 0));
    total += count;
  }
  // Of a whole ring the oldest record may be the one that is being overwritten.
  CHECK(reader.num_missed() == 1);
}

TEST(missed) {
  TestRing ring;
  const auto transport = ring.connect();
  StepTraceReader reader(*transport, small_sizes());
  ring.write(50);
  CHECK(reader.poll() == Status::ok);
  CHECK(reader.records().size() == kCapacity - 1);
  check_whole(reader, 50 - kCapacity + 2);
  CHECK(reader.num_missed() == 50 - kCapacity + 1);
  ring.write(40);
  CHECK(reader.skip_to_newest() == Status::ok);
  CHECK(reader.poll() == Status::ok);
  CHECK(reader.records().empty());
  CHECK(reader.num_missed() == 50 - kCapacity + 1);
  CHECK(reader.next_index() == 90);
}

// The scheduler writes while the reader is between the pieces of a batch.
TEST(overtaken) {
  for (const uint64_t extra : {1u, 4u, 11u, 15u, 16u, 40u}) {
    TestRing ring;
    ring.write(20);  // of which 12.. are kept, in two pieces
    OvertakenTransport transport(ring, extra);
    StepTraceReader reader(transport, small_sizes());
    CHECK(reader.poll() == Status::ok);
    const uint64_t oldest = 20 + extra - kCapacity + 2;  // step numbers are from 1
    CHECK(reader.records().size() == (oldest > 20 ? 0 : 20 - oldest + 1));
    check_whole(reader, oldest);
    CHECK(reader.num_missed() + reader.records().size() == 20);
    CHECK(reader.poll() == Status::ok);
    check_whole(reader, std::max<uint64_t>(21, oldest));
    CHECK(reader.next_index() == 20 + extra);
  }
}

// The owner was replaced: its trace begins anew.
TEST(begins_anew) {
  TestRing ring;
  const auto transport = ring.connect();
  StepTraceReader reader(*transport, small_sizes());
  ring.write(9);
  CHECK(reader.poll() == Status::ok);
  ring.restart();
  ring.write(3);
  CHECK(reader.poll() == Status::ok);
  CHECK(reader.records().size() == 3);
  check_whole(reader, 1);
  CHECK(reader.num_missed() == 0);
}

TEST(closed) {
  TestRing ring;
  const auto transport = ring.connect();
  StepTraceReader reader(*transport, small_sizes());
  ring.write(3);
  transport->close();
  CHECK(reader.poll() == Status::closed);
  CHECK(reader.records().empty());
}

// Every record comes whole or not at all, beside a scheduler that never waits.
TEST(beside_writer) {
  TestRing ring;
  const auto transport = ring.connect();
  StepTraceReader reader(*transport, small_sizes());
  constexpr uint64_t kSteps = 200000;
  std::atomic<bool> is_done{false};
  std::thread writer([&] {
    for (uint64_t i = 0; i < kSteps; ++i) {
      ring.write(1);
      if (i % 64 == 0) std::this_thread::yield();
    }
    is_done.store(true, std::memory_order_release);
  });
  uint64_t num_read = 0;
  while (true) {
    const bool was_done = is_done.load(std::memory_order_acquire);
    CHECK(reader.poll() == Status::ok);
    uint64_t last = 0;
    for (const blink_trace_record& record : reader.records()) {
      CHECK(record.step > last);
      CHECK(record.start_ns == record.step && record.reserved == record.step);
      last = record.step;
    }
    num_read += reader.records().size();
    if (was_done) break;
  }
  writer.join();
  CHECK(num_read + reader.num_missed() == kSteps);
}

}  // namespace
}  // namespace blink

BLINK_TEST_MAIN
