// What every transport must do; runs over each that this machine has. And the ring's layout and
// header.
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#ifdef BLINK_HAS_VERBS
#include "fake_verbs.h"
#endif
#include "transport/fd.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"
#include "transport/verbs.h"

namespace blink {
namespace {

RingSizes small_sizes() {
  RingSizes sizes;
  sizes.num_slots = 16;
  sizes.num_front_ends = 2;
  sizes.max_prompt_tokens = 64;
  sizes.max_output_tokens = 64;
  sizes.max_seqlen = 128;
  sizes.max_batch = 4;
  sizes.vocab_size = 100;
  sizes.num_kv_pages = 8;
  return sizes;
}

// A ring's owner and a transport to it.
struct Link {
  std::string name;
  std::byte* ring;
  std::unique_ptr<Transport> transport;
};

void with_shm(const std::function<void(Link&)>& test) {
  const RingSizes sizes = small_sizes();
  const std::string name = "/blink-conformance-" + std::to_string(::getpid());
  SharedMemory memory = SharedMemory::create(name, ring_layout_from_sizes(sizes).ring_bytes);
  create_ring(memory.bytes(), sizes);
  Link link{"shm", memory.bytes().data(), connect_shm(name)};
  test(link);
}

void with_mapped(const std::function<void(Link&)>& test) {
  const RingSizes sizes = small_sizes();
  const size_t num_bytes = ring_layout_from_sizes(sizes).ring_bytes;
  std::unique_ptr<std::byte, void (*)(void*)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, num_bytes)), std::free);
  std::memset(memory.get(), 0, num_bytes);
  create_ring({memory.get(), num_bytes}, sizes);
  Link link{"mapped", memory.get(), connect_mapped(memory.get(), num_bytes)};
  test(link);
}

// Both ends in this process, each with its own queue pair; the bytes go through the card's driver,
// or through a modelled card.
void with_verbs(const char* name, const VerbsLibrary* library,
                const std::function<void(Link&)>& test) {
  const RingSizes sizes = small_sizes();
  const size_t num_bytes = ring_layout_from_sizes(sizes).ring_bytes;
  std::unique_ptr<std::byte, void (*)(void*)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, num_bytes)), std::free);
  std::memset(memory.get(), 0, num_bytes);
  create_ring({memory.get(), num_bytes}, sizes);
  VerbsRingMemory ring{.address = memory.get(), .num_bytes = num_bytes};
  std::memcpy(&ring.header, memory.get(), sizeof(ring.header));
  VerbsOwnerConfig owner_config{.host = "127.0.0.1"};
  owner_config.device.library = library;
  const auto owner = serve_verbs(ring, owner_config);
  VerbsConnectConfig config{.host = "127.0.0.1", .port = owner->port()};
  config.connect_timeout = config.transfer_timeout = std::chrono::seconds(60);
  config.device.library = library;
  Link link{name, memory.get(), connect_verbs(config)};
  test(link);
}

// Real verbs where there is a device; where BLINK_NEEDS_VERBS is set there must be one.
bool runs_verbs() {
  static const bool runs = [] {
    std::string why;
    const bool has_device = has_verbs_device(why);
    std::printf("verbs: %s%s\n", has_device ? "" : "not run: ", why.c_str());
    CHECK(has_device || std::getenv("BLINK_NEEDS_VERBS") == nullptr);
    return has_device;
  }();
  return runs;
}

void on_each(const std::function<void(Link&)>& test) {
  with_shm(test);
  with_mapped(test);
  if (runs_verbs()) {
    with_verbs("verbs", nullptr, test);
    return;
  }
#ifdef BLINK_HAS_VERBS
  with_verbs("modelled verbs", &fake_verbs(), test);
#endif
}

TEST(info_names_the_ring) {
  on_each([](Link& link) {
    const TransportInfo info = link.transport->info();
    CHECK(link.name.ends_with(info.kind));
    CHECK_EQUAL(info.ring_bytes, ring_layout_from_sizes(small_sizes()).ring_bytes);
  });
}

TEST(bytes_arrive_both_ways_at_any_alignment) {
  on_each([](Link& link) {
    const uint64_t base = ring_layout_from_sizes(small_sizes()).output_offset;
    std::vector<std::byte> sent(200);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i * 7 + 1);
    for (uint64_t shift = 0; shift < 9; ++shift) {
      for (const size_t size : {0, 1, 7, 8, 9, 16, 63, 200}) {
        const auto source = std::span(sent).first(size);
        CHECK(link.transport->write(WriteRequest{base + shift, source}) == Status::ok);
        CHECK(link.transport->flush() == Status::ok);
        CHECK(std::memcmp(link.ring + base + shift, source.data(), size) == 0);
        std::vector<std::byte> received(size);
        CHECK(link.transport->read(ReadRequest{base + shift, received}) == Status::ok);
        CHECK(std::equal(received.begin(), received.end(), source.begin()));
      }
    }
  });
}

TEST(source_may_be_reused_at_once) {
  on_each([](Link& link) {
    const uint64_t base = ring_layout_from_sizes(small_sizes()).prompt_offset;
    uint64_t value = 0;
    for (uint64_t i = 0; i < 100; ++i) {
      value = i + 1;
      CHECK(link.transport->write_object(base + 8 * i, value) == Status::ok);
    }
    CHECK(link.transport->flush() == Status::ok);
    for (uint64_t i = 0; i < 100; ++i) {
      CHECK(link.transport->read_object(base + 8 * i, value) == Status::ok);
      CHECK_EQUAL(value, i + 1);
    }
  });
}

TEST(outside_the_ring_nothing_is_transferred) {
  on_each([](Link& link) {
    const uint64_t end = link.transport->info().ring_bytes;
    const uint64_t base = ring_layout_from_sizes(small_sizes()).prompt_offset;
    const uint64_t value = 77;
    const auto bytes = std::as_bytes(std::span(&value, 1));
    for (const uint64_t offset : {end, end - 7, end + 1, ~uint64_t{0}, ~uint64_t{0} - 7}) {
      const std::vector<WriteRequest> batch = {{base, bytes}, {offset, bytes}};
      CHECK(link.transport->write(batch) == Status::out_of_range);
      uint64_t copy = 0;
      CHECK(link.transport->read_object(offset, copy) == Status::out_of_range);
    }
    uint64_t first = 0;
    CHECK(link.transport->read_object(base, first) == Status::ok);
    CHECK_EQUAL(first, uint64_t{0});
    CHECK(link.transport->write(WriteRequest{end, {}}) == Status::ok);
  });
}

TEST(closed_transport_says_so) {
  on_each([](Link& link) {
    link.transport->close();
    link.transport->close();
    uint64_t value = 0;
    CHECK(link.transport->read_object(0, value) == Status::closed);
    CHECK(link.transport->write_object(0, value) == Status::closed);
    CHECK(link.transport->flush() == Status::closed);
  });
}

// The bug: a status that is older than the records read with it, so that another request's tokens
// look like one's own. The owner marks the status before it reuses the records.
TEST(an_ordered_read_waits_for_those_without_order) {
  on_each([](Link& link) {
    const RingLayout layout = ring_layout_from_sizes(small_sizes());
    const RingView view(link.ring);
    std::atomic<bool> is_over{false};
    std::thread owner([&] {
      for (uint64_t life = 1; !is_over; ++life) {
        std::atomic_ref<uint64_t>(view.status(3)->word).store(life, std::memory_order_release);
        for (uint32_t i = 0; i < 8; ++i) {
          std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(view.output_record(3, i)))
              .store(life, std::memory_order_release);
        }
      }
    });
    const bool is_slow = runs_verbs() || link.name.ends_with("verbs");
    const uint64_t offset = static_cast<uint64_t>(view.output_record(3, 0) - link.ring);
    uint32_t num_older = 0;
    for (int round = 0; round < (is_slow ? 300 : 20'000); ++round) {
      std::array<uint64_t, 8> records{};
      uint64_t status = 0;
      std::array<ReadRequest, 9> batch;
      for (uint32_t i = 0; i < 8; ++i) {
        batch[i] = {offset + i * small_sizes().output_record_bytes,
                    std::as_writable_bytes(std::span(&records[i], 1)), false};
      }
      batch[8] = {layout.status_offset + 3 * sizeof(blink_slot_status),
                  std::as_writable_bytes(std::span(&status, 1)), true};
      CHECK(link.transport->read(batch) == Status::ok);
      for (const uint64_t record : records) num_older += record > status;
    }
    is_over = true;
    owner.join();
    CHECK_EQUAL(num_older, 0u);
  });
}

// The bug: a command word that is visible before its payload.
TEST(payload_is_visible_with_its_word) {
  on_each([](Link& link) {
    const RingLayout layout = ring_layout_from_sizes(small_sizes());
    const RingView view(link.ring);
    // A round trip each; in an emulated machine each may cost two time slices of a busy host.
    const bool is_slow = runs_verbs() || link.name.ends_with("verbs");
    const uint64_t num_rounds = is_slow ? 300 : 20'000;
    std::atomic<bool> is_torn{false};
    std::thread owner([&] {
      for (uint64_t seen = 0; seen < num_rounds;) {
        const uint64_t word =
            std::atomic_ref<uint64_t>(view.command(3)->word).load(std::memory_order_acquire);
        if (word == seen) {
          std::this_thread::yield();
          continue;
        }
        seen = word;
        uint32_t prompt[64];
        std::memcpy(prompt, view.prompt(3), sizeof(prompt));
        for (const uint32_t id : prompt) {
          if (id != static_cast<uint32_t>(seen)) is_torn = true;
        }
        // Back: a record, then the status word.
        std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(view.output_record(3, 0)))
            .store(seen, std::memory_order_relaxed);
        std::atomic_ref<uint64_t>(view.status(3)->word).store(seen, std::memory_order_release);
      }
    });
    for (uint64_t round = 1; round <= num_rounds; ++round) {
      const std::vector<uint32_t> prompt(64, static_cast<uint32_t>(round));
      const std::vector<WriteRequest> batch = {
          {layout.prompt_offset + 3 * 64 * 4, std::as_bytes(std::span(prompt))},
          {layout.command_offset + 3 * sizeof(blink_slot_command),
           std::as_bytes(std::span(&round, 1))}};
      CHECK(link.transport->write(batch) == Status::ok);
      uint64_t status = 0;
      uint64_t record = 0;
      while (status != round) {
        CHECK(link.transport->read_object(layout.status_offset + 3 * sizeof(blink_slot_status),
                                          status) == Status::ok);
        CHECK(link.transport->read_object(layout.output_offset + 3 * 64 * 8, record) == Status::ok);
        if (status != round) std::this_thread::yield();
      }
      CHECK_EQUAL(record, round);
    }
    owner.join();
    CHECK(!is_torn);
  });
}

TEST(peers_that_are_no_ring_are_refused) {
  const RingSizes sizes = small_sizes();
  const size_t num_bytes = ring_layout_from_sizes(sizes).ring_bytes;
  std::unique_ptr<std::byte, void (*)(void*)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, num_bytes)), std::free);
  const auto spoil = [&](auto change) {
    std::memset(memory.get(), 0, num_bytes);
    create_ring({memory.get(), num_bytes}, sizes);
    change(*reinterpret_cast<blink_ring_header*>(memory.get()));
    CHECK_THROWS(connect_mapped(memory.get(), num_bytes), RingError);
  };
  spoil([](blink_ring_header& header) { header.magic = 0; });
  spoil([](blink_ring_header& header) { header.abi_version = 2; });
  spoil([](blink_ring_header& header) { header.header_bytes = 512; });
  spoil([](blink_ring_header& header) { header.num_slots = 1u << 31; });
  spoil([](blink_ring_header& header) { header.num_slots = 17; });
  spoil([](blink_ring_header& header) { header.num_front_ends = 0; });
  spoil([](blink_ring_header& header) { header.max_prompt_tokens = ~0u; });
  spoil([](blink_ring_header& header) { header.output_offset += 8; });
  spoil([](blink_ring_header& header) { header.trace_capacity = 3; });
  spoil([](blink_ring_header& header) { header.ring_bytes *= 2; });
  spoil([](blink_ring_header& header) { header.output_record_bytes = 9; });
  std::memset(memory.get(), 0, num_bytes);
  create_ring({memory.get(), num_bytes}, sizes);
  CHECK_THROWS(connect_mapped(memory.get(), num_bytes - 4096), RingError);
  CHECK_THROWS(connect_mapped(memory.get(), 100), RingError);
  CHECK_THROWS(connect_shm("/blink-no-such-ring"), RingError);
}

SharedMemory make_ring(const std::string& name) {
  const RingSizes sizes = small_sizes();
  SharedMemory memory = SharedMemory::create(name, ring_layout_from_sizes(sizes).ring_bytes);
  create_ring(memory.bytes(), sizes);
  return memory;
}

void leave_ring(const std::string& name) {
  const pid_t child = ::fork();
  if (child == 0) {
    const SharedMemory memory = make_ring(name);
    ::_exit(0);  // no destructor, as when killed
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
}

// The bug: two owners began at once and found a dead one's ring under their name. One removed it
// and took the name; then the other removed that.
TEST(a_name_that_another_has_taken_meanwhile_is_not_removed) {
  const std::string name = "/test-stale-" + std::to_string(::getpid()) + "-name";
  leave_ring(name);
  const Fd fd(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  CHECK(fd.is_open());
  CHECK_EQUAL(SharedMemory::remove_stale(name), 1);
  CHECK(!SharedMemory::remove_if_stale(fd, name));  // nobody's name
  {
    const SharedMemory taken = make_ring(name);
    CHECK(!SharedMemory::remove_if_stale(fd, name));
    CHECK(SharedMemory::is_taken(name));
  }
  CHECK(!SharedMemory::is_taken(name));
}

// The bug: a killed process leaves its ring in memory for ever.
TEST(rings_of_dead_processes_are_removed) {
  const size_t num_bytes = ring_layout_from_sizes(small_sizes()).ring_bytes;
  // Not of the family "/blink-": every server that starts on this machine clears that one.
  const std::string prefix = "/test-stale-" + std::to_string(::getpid()) + "-";
  leave_ring(prefix + "dead");
  const SharedMemory living = make_ring(prefix + "living");
  const SharedMemory other = SharedMemory::create(prefix + "no-ring", 4096);
  CHECK_EQUAL(SharedMemory::open(prefix + "dead").bytes().size(), num_bytes);
  CHECK_EQUAL(SharedMemory::remove_stale(prefix), 1);
  CHECK_EQUAL(SharedMemory::remove_stale(prefix), 0);
  CHECK_THROWS(SharedMemory::open(prefix + "dead"), RingError);
  CHECK_EQUAL(SharedMemory::open(prefix + "living").bytes().size(), num_bytes);
  CHECK_THROWS(SharedMemory::create(prefix + "living", num_bytes), RingError);
  CHECK_EQUAL(SharedMemory::open(prefix + "living").bytes().size(), num_bytes);
}

TEST(tables_of_a_ring_do_not_overlap) {
  RingSizes sizes = small_sizes();
  for (const uint32_t slots : {1u, 7u, 64u, 4096u}) {
    sizes.num_slots = slots;
    sizes.num_front_ends = std::min(slots, 16u);
    const RingLayout layout = ring_layout_from_sizes(sizes);
    CHECK(layout.front_end_offset >= sizeof(blink_ring_header));
    CHECK(layout.command_offset >= layout.front_end_offset + sizes.num_front_ends * 64);
    CHECK(layout.request_offset >= layout.command_offset + slots * 16ull);
    CHECK(layout.status_offset >= layout.request_offset + slots * 512ull);
    CHECK(layout.prompt_offset >= layout.status_offset + slots * 16ull);
    CHECK(layout.output_offset >= layout.prompt_offset + slots * 64ull * 4);
    CHECK(layout.trace_offset >= layout.output_offset + slots * 64ull * 8);
    CHECK(layout.ring_bytes >= layout.trace_offset + sizes.trace_capacity * 64ull);
    uint32_t covered = 0;
    for (uint32_t f = 0; f < sizes.num_front_ends; ++f) {
      CHECK_EQUAL(front_end_first_slot(f, slots, sizes.num_front_ends), covered);
      covered = front_end_first_slot(f + 1, slots, sizes.num_front_ends);
    }
    CHECK_EQUAL(covered, slots);
  }
}

TEST(words_unpack_to_what_was_packed) {
  for (const uint32_t sequence : {0u, 1u, 0x80000000u, 0xFFFFFFFFu}) {
    for (const uint32_t state : {0u, 6u, 255u}) {
      for (const uint32_t count : {0u, 1u, 0xFFFFFFu}) {
        const StatusWord word = unpack_status(pack_status(sequence, state, count));
        CHECK(word.sequence == sequence && word.state == state && word.num_generated == count);
      }
    }
    const CommandWord word = unpack_command(pack_command(sequence, BLINK_COMMAND_RELEASE));
    CHECK(word.sequence == sequence && word.command == BLINK_COMMAND_RELEASE);
  }
}

TEST(checksum_sees_every_word_and_its_place) {
  blink_slot_request request{};
  std::vector<uint32_t> prompt = {5, 6, 7};
  request.sequence = 3;
  request.num_prompt_tokens = 3;
  const uint64_t sum = request_checksum(&request, prompt.data(), 3);
  uint64_t shared = 0;  // several threads' shares add up
  for (uint32_t i = 0; i < 32; ++i) shared += partial_checksum(&request, prompt.data(), 3, i, 32);
  CHECK_EQUAL(shared, sum);
  std::swap(prompt[0], prompt[1]);
  CHECK(request_checksum(&request, prompt.data(), 3) != sum);
  std::swap(prompt[0], prompt[1]);
  auto* bytes = reinterpret_cast<unsigned char*>(&request);
  for (size_t i = offsetof(blink_slot_request, sequence); i < sizeof(request); ++i) {
    bytes[i] ^= 1;
    CHECK(request_checksum(&request, prompt.data(), 3) != sum);
    bytes[i] ^= 1;
  }
  request.checksum = 99;  // not part of itself
  CHECK_EQUAL(request_checksum(&request, prompt.data(), 3), sum);
}

}  // namespace
}  // namespace blink

BLINK_TEST_MAIN
