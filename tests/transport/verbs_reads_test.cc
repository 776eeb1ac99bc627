// Batches of READs over a modelled card, which runs those without a fence backwards.
#include <array>
#include <cstring>
#include <vector>

#include "check.h"
#include "fake_verbs.h"
#include "transport/verbs.h"
#include "verbs_host.h"

namespace blink {
namespace {

TEST(reads_of_a_batch_are_fenced_and_small_ones_go_together) {
  on_fresh_card([] {
    const Host host;
    const auto transport = connect_verbs(host.config());
    const uint64_t base = ring_layout_from_sizes(small_sizes()).prompt_offset;
    for (uint32_t i = 0; i < 4096; ++i) {
      std::memcpy(host.bytes() + base + 4 * i, &i, sizeof(i));
    }
    std::vector<std::vector<uint32_t>> targets;
    std::vector<ReadRequest> batch;
    for (uint32_t i = 0; i < 50; ++i) targets.emplace_back(i % 7);
    uint32_t first = 0;
    for (auto& target : targets) {
      batch.push_back({base + 4 * first, std::as_writable_bytes(std::span(target))});
      first += static_cast<uint32_t>(target.size());
    }
    fake_card().num_posted = 0;
    fake_card().num_fenced = 0;
    CHECK(transport->read(batch) == Status::ok);
    first = 0;
    for (const auto& target : targets) {
      for (const uint32_t value : target) CHECK_EQUAL(value, first++);
    }
    const uint32_t num_empty = 8;  // 0, 7, 14 ...
    CHECK_EQUAL(fake_card().num_posted.load(), 50 - num_empty);
    CHECK(fake_card().num_fenced >= 50 - num_empty - 4);  // not the first of each chain
  });
}

// More than the landing memory and the send queue hold at once.
TEST(reads_without_order_wait_once) {
  on_fresh_card([] {
    const Host host;
    VerbsConnectConfig config = host.config();
    config.send_queue_depth = 64;
    config.signal_interval = 16;
    config.read_bytes = 4096;
    const auto transport = connect_verbs(config);
    const uint64_t base = ring_layout_from_sizes(small_sizes()).prompt_offset;
    for (uint32_t i = 0; i < 4096; ++i) {
      std::memcpy(host.bytes() + base + 4 * i, &i, sizeof(i));
    }
    std::vector<std::array<uint32_t, 20>> targets(200);
    std::vector<ReadRequest> batch;
    for (uint32_t i = 0; i < 200; ++i) {
      batch.push_back({base + 80 * i, std::as_writable_bytes(std::span(targets[i])), i == 150});
    }
    fake_card().num_fenced = 0;
    CHECK(transport->read(batch) == Status::ok);
    for (uint32_t i = 0; i < 200; ++i) {
      for (uint32_t k = 0; k < 20; ++k) CHECK_EQUAL(targets[i][k], 20 * i + k);
    }
    CHECK_EQUAL(fake_card().num_fenced.load(), 1u);
  });
}

// The bug: a status that is older than the records read with it. Here the owner starts another life
// of the slot before each READ: first its status, then its records.
TEST(an_ordered_read_waits_for_those_without_order) {
  on_fresh_card([] {
    const Host host;
    const RingView ring(host.bytes());
    uint64_t life = 0;
    fake_card().before_read = [&] {
      ring.status(3)->word = ++life;
      for (uint32_t i = 0; i < 4; ++i) std::memcpy(ring.output_record(3, i), &life, sizeof(life));
    };
    const auto transport = connect_verbs(host.config());
    std::array<uint64_t, 5> found{};  // records, then the status
    std::vector<ReadRequest> batch;
    for (uint32_t i = 0; i < 5; ++i) {
      const void* place = i < 4 ? static_cast<void*>(ring.output_record(3, i)) : ring.status(3);
      batch.push_back({static_cast<uint64_t>(static_cast<const std::byte*>(place) - host.bytes()),
                       std::as_writable_bytes(std::span(&found[i], 1)), i == 4});
    }
    CHECK(transport->read(batch) == Status::ok);
    CHECK_EQUAL(found[4], life);                                          // the last READ of all
    for (uint32_t i = 0; i + 1 < 4; ++i) CHECK(found[i] > found[i + 1]);  // the card's own order
    CHECK(found[0] < found[4]);
  });
}

}  // namespace
}  // namespace blink
