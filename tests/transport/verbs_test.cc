// The verbs transport over a modelled card: bootstrap, refusals, accounting, errors, loss, dma-buf.
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "fake_verbs.h"
#include "transport/reconnecting_transport.h"
#include "transport/send_window.h"
#include "transport/tcp_socket.h"
#include "transport/verbs.h"
#include "transport/verbs_bootstrap.h"
#include "verbs_host.h"

namespace blink {
namespace {

using std::chrono::milliseconds;

std::string why_refused(const std::function<void()>& action) {
  try {
    action();
  } catch (const RingError& error) {
    return error.what();
  }
  return "not refused";
}

#define CHECK_CONTAINS(text, part)                                                          \
  if (const std::string whole = (text); whole.find(part) == std::string::npos) {            \
    blink::testing::fail(__FILE__, __LINE__, "no '" + std::string(part) + "' in " + whole); \
  }

void wait_until(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(120'000);
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(milliseconds(5));
  }
}

// Null: refused.
std::unique_ptr<Transport> connected(const VerbsConnectConfig& config) {
  try {
    return connect_verbs(config);
  } catch (const RingError&) {
    return nullptr;
  }
}

// A host at a port that stays its own when the host has gone: not one of those that the system
// hands out to whoever asks for any.
std::unique_ptr<Host> host_at_a_port_of_its_own() {
  constexpr uint16_t kFirst = 20'000;  // below Linux' range of those, from 32768
  std::mt19937 random(static_cast<uint32_t>(::getpid()));
  for (int tries = 0; tries < 1000; ++tries) {
    try {
      return std::make_unique<Host>(5, static_cast<uint16_t>(kFirst + random() % 12'000));
    } catch (const RingError&) {  // somebody has this one
    }
  }
  blink::testing::fail(__FILE__, __LINE__, "no port is free");
}

TEST(peers_that_do_not_fit_are_told_why) {
  on_fresh_card([] {
    const Host host;
    const auto refused = [&](auto change) {
      VerbsConnectConfig config = host.config();
      change(config);
      return why_refused([&] { (void)connect_verbs(config); });
    };
    CHECK_CONTAINS(refused([](auto& c) { c.bundle_id = 6; }), "front end has bundle");
    CHECK_CONTAINS(refused([](auto& c) { c.front_end_index = 2; }), "indices start at 0");
    CHECK_CONTAINS(refused([](auto& c) { c.device.device = "mlx5_9"; }), "named 'mlx5_9'");
    CHECK_CONTAINS(refused([](auto& c) { c.device.gid_index = 9; }), "gid 9");
    CHECK_CONTAINS(refused([](auto& c) { c.signal_interval = 100; }), "must be 4 intervals");
    const auto first = connect_verbs(host.config());
    wait_until([&] { return host.owner().sessions().size() == 1; });
    CHECK_CONTAINS(refused([](auto& c) { c.client_id = 12; }), "still connected");
    VerbsConnectConfig other = host.config();
    other.client_id = 12;
    other.front_end_index = 1;
    const auto second = connect_verbs(other);
    wait_until([&] { return host.owner().sessions().size() == 2; });
    fake_card().has_device = false;
    CHECK_CONTAINS(refused([](auto&) {}), "no RDMA device");
  });
}

TEST(whoever_is_no_front_end_is_turned_away) {
  on_fresh_card([] {
    const Host host;
    const auto deadline = [] { return std::chrono::steady_clock::now() + milliseconds(30'000); };
    const auto answer_of = [&](const Host& who, const void* bytes, size_t num_bytes) {
      const Fd socket = tcp_connect("127.0.0.1", who.port(), deadline());
      tcp_send(socket, {static_cast<const std::byte*>(bytes), num_bytes}, deadline(), "owner");
      BootstrapWelcome welcome{};
      tcp_receive(socket, std::as_writable_bytes(std::span(&welcome, 1)), deadline(), "owner");
      return welcome;
    };
    const auto answer_to = [&](const void* bytes, size_t num_bytes) {
      return answer_of(host, bytes, num_bytes);
    };
    const char http[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    CHECK_CONTAINS(answer_to(http, sizeof(http)).message, "not a blink link");
    BootstrapHello hello{};
    hello.prefix = bootstrap_prefix<BootstrapHello>();
    hello.abi_version = BLINK_ABI_VERSION + 1;
    CHECK_CONTAINS(answer_to(&hello, sizeof(hello)).message, "abi_version is 1");
    hello.prefix.version = 2;
    CHECK_CONTAINS(answer_to(&hello, sizeof(hello)).message, "version 2 of the link's bootstrap");
    hello.prefix = {kBootstrapMagic, kBootstrapVersion, 64};
    CHECK_CONTAINS(answer_to(&hello, sizeof(hello)).message, "a message of 64 bytes");
    hello.prefix = bootstrap_prefix<BootstrapHello>();
    hello.abi_version = BLINK_ABI_VERSION;
    hello.queue_pair.link_layer = IBV_LINK_LAYER_INFINIBAND;
    CHECK_CONTAINS(answer_to(&hello, sizeof(hello)).message, "InfiniBand");
    CHECK(host.owner().num_refused() >= 5);
    // Half a hello, then silence; the next one is served all the same, if it says its own in time.
    const Host hasty(5, 0, milliseconds(2000));
    CHECK_CONTAINS(answer_of(hasty, &hello, 20).message, "no complete message in time");
    CHECK(hasty.owner().num_refused() >= 1);
    std::unique_ptr<Transport> transport;
    wait_until([&] {  // again where this thread got no core meanwhile, and was too late itself
      transport = connected(hasty.config());
      return transport != nullptr;
    });
    uint64_t magic = 0;
    CHECK(transport->read_object(0, magic) == Status::ok);
    CHECK_EQUAL(magic, uint64_t{BLINK_MAGIC});
  });
}

// The front end trusts an owner no more than the owner trusts it.
TEST(owners_that_lie_are_refused) {
  BootstrapHello hello{};
  hello.prefix = bootstrap_prefix<BootstrapHello>();
  hello.abi_version = BLINK_ABI_VERSION;
  hello.bundle_id = 5;
  blink_ring_header ring{};
  fill_ring_header(ring, small_sizes());
  ring.bundle_id = 5;
  const auto why = [&](auto change) {
    BootstrapWelcome welcome{};
    fill_welcome(welcome, ring, 0);
    welcome.ring_address = 4096;
    change(welcome);
    return why_refused([&] { check_welcome(welcome, hello, "owner"); });
  };
  CHECK_EQUAL(why([](auto&) {}), std::string("not refused"));
  CHECK_CONTAINS(why([](auto& w) { w.prefix.magic = 1; }), "not a blink link");
  CHECK_CONTAINS(why([](auto& w) { w.prefix.num_bytes = 8; }), "a message of 8 bytes");
  CHECK_CONTAINS(why([](auto& w) { w.abi_version = 9; }), "abi_version is 9");
  CHECK_CONTAINS(why([](auto& w) { w.bundle_id = 9; }), "bundle");
  CHECK_CONTAINS(why([](auto& w) { w.num_slots = 1u << 30; }), "no sense");
  CHECK_CONTAINS(why([](auto& w) { w.num_front_ends = 17; }), "no sense");
  CHECK_CONTAINS(why([](auto& w) { w.num_front_ends = 0; }), "indices start at 0");
  CHECK_CONTAINS(why([](auto& w) { w.ring_bytes = 100; }), "no sense");
  CHECK_CONTAINS(why([](auto& w) { w.ring_bytes = ~0ull; }), "no sense");
  CHECK_CONTAINS(why([](auto& w) { w.ring_address = ~0ull - 10; }), "no sense");
  CHECK_CONTAINS(why([](auto& w) { w.first_slot = 3; }), "slot range");
  CHECK_CONTAINS(why([](auto& w) { w.range_slots = 16; }), "slot range");
  CHECK_CONTAINS(why([](auto& w) {
                   w.refusal = 77;
                   std::memset(w.message, '\x1b', sizeof(w.message));
                 }),
                 "refused (malformed): ????");
}

TEST(late_completions_never_tear_what_was_written) {
  on_fresh_card([] {
    const Host host;
    VerbsConnectConfig config = host.config();
    config.send_queue_depth = 16;
    config.signal_interval = 4;
    config.staging_bytes = 4096;
    config.read_bytes = 4096;
    const auto transport = connect_verbs(config);
    const uint64_t base = ring_layout_from_sizes(small_sizes()).prompt_offset;
    std::vector<std::byte> shadow(64 * 1024);
    std::mt19937 random(7);
    std::vector<std::byte> source(9000);
    for (int round = 0; round < 2000; ++round) {
      fake_card().requests_a_poll = 1 + random() % 4;
      std::vector<WriteRequest> batch;
      size_t used = 0;
      for (uint32_t i = 0, count = 1 + random() % 5; i < count; ++i) {
        const size_t size = random() % 4 == 0 ? 8 : random() % 1800;
        const size_t offset = random() % (shadow.size() - size);
        for (size_t k = 0; k < size; ++k) source[used + k] = static_cast<std::byte>(random());
        const auto part = std::span(source).subspan(used, size);
        std::copy(part.begin(), part.end(), shadow.begin() + static_cast<ptrdiff_t>(offset));
        batch.push_back({base + offset, part});
        used += size;
      }
      CHECK(transport->write(batch) == Status::ok);
      std::fill(source.begin(), source.end(), std::byte{0xEE});  // may be reused at once
    }
    CHECK(fake_card().num_signalled < fake_card().num_posted);
    std::vector<std::byte> found(shadow.size());  // in many pieces
    CHECK(transport->read(ReadRequest{base, found}) == Status::ok);
    CHECK(found == shadow);
    CHECK(std::memcmp(host.bytes() + base, shadow.data(), shadow.size()) == 0);
  });
}

TEST(a_card_without_inline_works) {
  on_fresh_card([] {
    fake_card().max_inline = 0;
    const Host host;
    const auto transport = connect_verbs(host.config());
    const uint64_t base = ring_layout_from_sizes(small_sizes()).prompt_offset;
    for (uint64_t i = 0; i < 500; ++i) {
      CHECK(transport->write_object(base + 8 * (i % 100), i) == Status::ok);
    }
    uint64_t last = 0;
    CHECK(transport->read_object(base + 8 * 99, last) == Status::ok);
    CHECK_EQUAL(last, uint64_t{499});
  });
}

TEST(a_broken_link_is_lost_with_its_reason) {
  on_fresh_card([] {
    const Host host;
    VerbsConnectConfig config = host.config();
    config.transfer_timeout = milliseconds(200);
    uint64_t word = 1;
    {
      const auto transport = connect_verbs(config);
      fake_card().is_link_up = false;
      CHECK(transport->read_object(0, word) == Status::lost);
      CHECK(transport->write_object(0, word) == Status::lost);
      CHECK(transport->flush() == Status::lost);
      CHECK_CONTAINS(transport->info().problem, "retry counter exceeded");
      CHECK(transport->reconnect() == Status::lost);  // this life is over
    }
    fake_card().is_link_up = true;
    {
      const auto transport = connect_verbs(config);
      fake_card().answers = false;
      CHECK(transport->read_object(0, word) == Status::lost);
      CHECK_CONTAINS(transport->info().problem, "no completion within 200 ms");
    }
    fake_card().answers = true;
    {
      // A full queue is a bounded wait as well.
      config.send_queue_depth = 4;
      config.signal_interval = 1;
      const auto transport = connect_verbs(config);
      fake_card().answers = false;
      const uint64_t base = ring_layout_from_sizes(small_sizes()).prompt_offset;
      Status status = Status::ok;
      for (int i = 0; i < 5; ++i) status = transport->write_object(base, word);
      CHECK(status == Status::lost);
      CHECK_CONTAINS(transport->info().problem, "send queue stays full");
    }
  });
}

// The bug: a link was given up whose completion had come, because the thread that waits for it got
// no core until its deadline was over.
TEST(a_wait_looks_once_more_after_its_deadline) {
  on_fresh_card([] {
    const Host host;
    VerbsConnectConfig config = host.config();
    config.transfer_timeout = milliseconds(50);
    const auto transport = connect_verbs(config);
    fake_card().requests_a_poll = 1;
    bool has_paused = false;
    fake_card().before_read = [&] {
      if (!std::exchange(has_paused, true)) std::this_thread::sleep_for(milliseconds(100));
    };
    std::array<uint64_t, 2> words{};
    const std::array<ReadRequest, 2> batch = {
        ReadRequest{0, std::as_writable_bytes(std::span(&words[0], 1)), true},
        ReadRequest{0, std::as_writable_bytes(std::span(&words[1], 1)), true}};
    CHECK(transport->read(batch) == Status::ok);
    CHECK(has_paused && words[1] == BLINK_MAGIC);
  });
}

TEST(an_owner_that_ends_is_noticed_and_its_successor_found) {
  on_fresh_card([] {
    auto host = host_at_a_port_of_its_own();
    const VerbsConnectConfig config = host->config();
    ReconnectingTransport transport([&] { return connect_verbs(config); });
    const uint64_t first = transport.info().incarnation;
    CHECK(transport.flush() == Status::ok);
    host.reset();
    wait_until([&] { return transport.flush() == Status::lost; });
    CHECK(transport.reconnect() == Status::lost);
    CHECK_CONTAINS(transport.info().problem, "cannot connect");
    host = std::make_unique<Host>(6, config.port);
    CHECK(transport.reconnect() == Status::lost);
    CHECK_CONTAINS(transport.info().problem, "other bundle");
    host.reset();
    host = std::make_unique<Host>(5, config.port);
    CHECK(transport.reconnect() == Status::ok);
    CHECK(transport.flush() == Status::ok);
    CHECK(transport.info().incarnation != first);
    CHECK(transport.info().problem.empty());
    // Again without the owner's end: one's own old session is in nobody's way.
    CHECK(transport.reconnect() == Status::ok);
    CHECK(transport.flush() == Status::ok);
    transport.close();
    CHECK(transport.reconnect() == Status::closed);
  });
}

TEST(a_front_end_that_ends_leaves_its_range) {
  on_fresh_card([] {
    const Host host;
    VerbsConnectConfig config = host.config();
    for (uint64_t life = 1; life <= 3; ++life) {
      config.client_id = life;
      std::unique_ptr<Transport> transport;
      wait_until([&] {
        transport = connected(config);  // refused until the owner has seen the end
        return transport != nullptr;
      });
      uint64_t magic = 0;
      CHECK(transport->read_object(0, magic) == Status::ok);
    }
    wait_until([&] { return host.owner().sessions().empty(); });
  });
}

// GPU memory: reached through a dma-buf, named by an address that this process cannot touch.
TEST(a_ring_behind_a_dma_buf) {
  on_fresh_card([] {
    constexpr uint64_t kGpuAddress = 0x7f1234560000;
    constexpr uint64_t kOffset = 8192;
    const uint64_t num_bytes = ring_layout_from_sizes(small_sizes()).ring_bytes;
    const Fd file(::memfd_create("gpu", MFD_CLOEXEC));
    CHECK(::ftruncate(file.get(), static_cast<off_t>(kOffset + num_bytes)) == 0);
    void* mapping =
        ::mmap(nullptr, kOffset + num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    CHECK(mapping != MAP_FAILED);
    std::byte* ring_bytes = static_cast<std::byte*>(mapping) + kOffset;
    create_ring({ring_bytes, num_bytes}, small_sizes(), 5);
    VerbsRingMemory ring{.address = reinterpret_cast<void*>(kGpuAddress), .num_bytes = num_bytes};
    ring.dmabuf_fd = file.get();
    ring.dmabuf_offset = kOffset;
    std::memcpy(&ring.header, ring_bytes, sizeof(ring.header));
    VerbsOwnerConfig config{.host = "127.0.0.1"};
    config.device.library = &fake_verbs();
    {
      const auto owner = serve_verbs(ring, config);
      VerbsConnectConfig connect{.host = "127.0.0.1", .port = owner->port()};
      connect.device.library = &fake_verbs();
      const auto transport = connect_verbs(connect);
      const uint64_t value = 42;
      const uint64_t offset = ring_layout_from_sizes(small_sizes()).prompt_offset;
      CHECK(transport->write_object(offset, value) == Status::ok);
      CHECK(transport->flush() == Status::ok);
      CHECK(std::memcmp(ring_bytes + offset, &value, 8) == 0);
      CHECK_EQUAL(fake_card().last_dmabuf_access.load(),
                  IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    }
    VerbsLibrary old = fake_verbs();
    old.reg_dmabuf_mr = nullptr;
    config.device.library = &old;
    CHECK_CONTAINS(why_refused([&] { (void)serve_verbs(ring, config); }), "rdma-core 34");
    old.reg_dmabuf_mr = [](ibv_pd*, uint64_t, size_t, uint64_t, int, int) -> ibv_mr* {
      errno = EOPNOTSUPP;  // as Soft-RoCE
      return nullptr;
    };
    CHECK_CONTAINS(why_refused([&] { (void)serve_verbs(ring, config); }), "takes no dma-buf");
    ::munmap(mapping, kOffset + num_bytes);
  });
}

}  // namespace
}  // namespace blink

BLINK_TEST_MAIN
