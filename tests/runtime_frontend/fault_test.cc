// What goes wrong between client, front end and ring; after each test nothing is lost or leaked:
// slots, file descriptors, connections, and every request that was begun has ended.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <random>

#include "byte_codec.h"
#include "fault_rig.h"

namespace blink::testing {
namespace {

constexpr std::string_view kOk = "HTTP/1.1 200 ";

// ---- clients that leave

// Receives `num_bytes` of the answer to `request` and leaves, with RST for odd numbers.
void leave_after(Rig& rig, const std::string& request, size_t num_bytes) {
  Socket socket(rig.port());
  if (num_bytes % 2 == 1) socket.reset_on_close();
  socket.send(request);
  // Tokens that share a chunk save its framing, so a whole answer may be some bytes shorter.
  const std::string received = socket.receive(num_bytes);
  CHECK(received.size() == num_bytes || received.ends_with("\r\n0\r\n\r\n"));
}

void leave_at_every_byte(bool streams) {
  Rig::Options options = Rig::defaults();
  options.owner.token_interval_us = 50;  // so that many leave while tokens are still to come
  Rig rig(options);
  const std::string request = completion("hello", 6, streams);
  const std::string whole = exchange(rig.port(), request);
  CHECK(whole.starts_with(kOk));
  CHECK_EQUAL(text_of(whole), std::string("hello"));
  rig.wait_until_at_rest();
  const size_t num_files = num_open_files();
  const uint64_t num_ended = rig.num_ended();
  for (size_t size = 1; size <= whole.size(); ++size) leave_after(rig, request, size);
  rig.wait_until_at_rest();
  wait_for([&] { return num_open_files() == num_files; }, "files to be closed");
  CHECK_EQUAL(rig.num_ended() - num_ended, uint64_t{whole.size()});
  CHECK_EQUAL(rig.metrics().sequence_mismatches.value(), uint64_t{0});
  CHECK_EQUAL(text_of(exchange(rig.port(), request)), std::string("hello"));
}

TEST(client_leaves_at_every_byte_of_a_stream) { leave_at_every_byte(true); }

TEST(client_leaves_at_every_byte_of_a_plain_answer) { leave_at_every_byte(false); }

TEST(client_leaves_at_every_byte_of_its_request) {
  Rig rig(Rig::defaults());
  const size_t num_files = num_open_files();
  const std::string request = completion("hello", 6, true);
  for (size_t size = 0; size < request.size(); ++size) {
    Socket socket(rig.port());
    if (size % 2 == 1) socket.reset_on_close();
    socket.send(request.substr(0, size));
  }
  rig.wait_until_at_rest();
  wait_for([&] { return num_open_files() == num_files; }, "files to be closed");
  CHECK_EQUAL(rig.num_ended(), uint64_t{0});  // none was whole
}

// ---- clients that are too many

// The bug: the connection was reset, as what the client had sent was not read; most clients saw
// that and not the answer.
TEST(a_refused_client_that_still_sends_hears_why) {
  Rig::Options options = Rig::defaults();
  options.config.max_connections = 1;
  Rig rig(options);
  Socket first(rig.port());
  const auto ask_first = [&] {
    first.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
    CHECK(first.receive_response().starts_with(kOk));
  };
  ask_first();
  Socket second(rig.port());
  const std::string request = completion(std::string(400, 'x'), 6, false);
  second.send(request.substr(0, request.size() / 2));
  wait_for([&] { return rig.metrics().connections_refused.value() == 1; }, "the refusal");
  ask_first();  // what followed the refusal has happened by now
  second.send(request.substr(request.size() / 2));
  CHECK(second.receive_response().starts_with("HTTP/1.1 503 "));
  CHECK_EQUAL(second.receive(1), std::string());
}

// ---- templates

// The bug: it counted as being rendered for ever, so that no chat was rendered inline any more.
TEST(a_template_that_throws_holds_up_no_other_chat) {
  const Rig::Options options = Rig::defaults();
  const ZeroedRing ring(options.sizes);
  const GenerationPipeline pipeline(
      options.config, connect_mapped(ring.memory.get(), ring.num_bytes),
      std::make_shared<ByteCodec>(),
      [](const std::string&) -> std::string { throw std::runtime_error("no text"); }, [] {});
  GenerationRequest request;
  request.is_chat = true;
  CHECK(pipeline.prepares_inline(request));
  CHECK(pipeline.prepare(request).has_value());
  CHECK(pipeline.prepares_inline(request));
}

// ---- slow readers

TEST(slow_readers_are_cut_off_and_others_are_not_slowed) {
  Rig::Options options = Rig::defaults();
  options.sizes.max_output_tokens = 32'768;
  options.sizes.max_seqlen = 40'000;
  options.config.max_buffered_bytes = 64 * 1024;
  Rig rig(options);
  {
    std::vector<std::unique_ptr<Socket>> slow;
    for (int i = 0; i < 4; ++i) {
      // More than the kernel's buffers and ours together: about 200 bytes an event.
      slow.push_back(std::make_unique<Socket>(rig.port(), 4096));
      slow.back()->send(
          post("{\"prompt\":\"w\",\"max_tokens\":32768,\"ignore_eos\":true,"
               "\"stream\":true}"));
    }
    // The others are answered while those wait.
    for (int i = 0; i < 50; ++i) {
      CHECK_EQUAL(text_of(exchange(rig.port(), completion("others", 10, i % 2 == 0))),
                  std::string("others"));
    }
    wait_for([&] { return rig.metrics().requests_running == 0; }, "slow readers to be cut off");
    // The aborted requests' slots are back although their clients still hold their sockets.
    CHECK_EQUAL(text_of(exchange(rig.port(), completion("more", 10, true))), std::string("more"));
  }
  rig.wait_until_at_rest();
  CHECK_EQUAL(rig.num_ended(), uint64_t{4 + 50 + 1});
}

// ---- links and owners

// Starts `count` long streams, which `interval` keeps alive.
std::vector<std::unique_ptr<Socket>> start_streams(Rig& rig, uint32_t count) {
  std::vector<std::unique_ptr<Socket>> sockets;
  for (uint32_t i = 0; i < count; ++i) {
    sockets.push_back(std::make_unique<Socket>(rig.port()));
    sockets.back()->send(
        post("{\"prompt\":\"abc\",\"max_tokens\":1000,\"ignore_eos\":true,\"stream\":true}"));
    CHECK_EQUAL(sockets.back()->receive(13), std::string(kOk));
  }
  return sockets;
}

std::string health_response(Rig& rig) {
  return exchange(rig.port(), "GET /health HTTP/1.1\r\nHost: x\r\n\r\n");
}

// Every slot is usable again: as many requests at once as there are slots.
void check_all_slots(Rig& rig, uint32_t num_slots) {
  std::vector<std::unique_ptr<Socket>> sockets;
  for (uint32_t i = 0; i < num_slots; ++i) {
    sockets.push_back(std::make_unique<Socket>(rig.port()));
    sockets.back()->send(completion("request " + std::to_string(i), 40, true));
  }
  for (uint32_t i = 0; i < num_slots; ++i) {
    CHECK_EQUAL(text_of(sockets[i]->receive_response()), "request " + std::to_string(i));
  }
}

TEST(link_goes_down_and_up) {
  Rig::Options options = Rig::defaults();
  options.owner.token_interval_us = 50'000;  // streams of fifty seconds
  Rig rig(options);
  for (uint64_t round = 1; round <= 3; ++round) {
    auto sockets = start_streams(rig, 8);
    rig.link().is_down = true;
    for (auto& socket : sockets) {  // cut off with an error, not as if they were whole
      const std::string rest = socket->receive_response();
      CHECK(rest.find("\"finish_reason\":\"") == std::string::npos);
    }
    sockets.clear();
    wait_for([&] { return rig.health() == Health::lost; }, "the loss to be noticed");
    CHECK(health_response(rig).starts_with("HTTP/1.1 503 "));
    CHECK(exchange(rig.port(), completion("x", 5, false)).starts_with("HTTP/1.1 503 "));
    rig.link().is_down = false;
    wait_for([&] { return rig.health() == Health::serving; }, "the ring to be found again");
    CHECK(health_response(rig).starts_with(kOk));
    CHECK_EQUAL(rig.metrics().ring_attachments.value(), round);
    rig.wait_until_at_rest();
    rig.wait_until_settled();
    check_all_slots(rig, options.sizes.num_slots);
    rig.wait_until_at_rest();
  }
}

TEST(owner_dies_and_another_comes_with_a_new_ring) {
  Rig::Options options = Rig::defaults();
  options.owner.token_interval_us = 50'000;  // streams of fifty seconds
  options.config.stall_timeout_ms = 2000;
  Rig rig(options);
  auto sockets = start_streams(rig, 8);
  rig.kill_owner();  // its memory is still there: only the heartbeat tells
  for (auto& socket : sockets) (void)socket->receive_response();
  sockets.clear();
  CHECK(rig.health() == Health::stalled);
  CHECK(health_response(rig).starts_with("HTTP/1.1 503 "));
  rig.link().is_down = true;  // now its memory goes too
  wait_for([&] { return rig.health() == Health::lost; }, "the loss to be noticed");
  rig.start_owner();
  rig.link().is_down = false;
  wait_for([&] { return rig.health() == Health::serving; }, "the new owner to be found");
  rig.wait_until_settled();
  check_all_slots(rig, options.sizes.num_slots);
  rig.wait_until_at_rest();
}

// The link breaks at a verb that nobody chose; whatever it was, the requests of the moment end, the
// next ones are served, and no slot is lost.
TEST(link_breaks_at_any_verb) {
  Rig::Options options = Rig::defaults();
  options.owner.token_interval_us = 500;
  Rig rig(options);
  std::mt19937 random(7);
  for (uint64_t round = 1; round <= 8; ++round) {
    std::vector<std::unique_ptr<Socket>> sockets;
    rig.link().verbs_until_failure = 1 + random() % 60;
    for (int i = 0; i < 6; ++i) {
      sockets.push_back(std::make_unique<Socket>(rig.port()));
      sockets.back()->send(completion("break " + std::to_string(i), 30, i % 2 == 0));
    }
    wait_for([&] { return rig.link().is_down.load(); }, "the verb that fails");
    for (int i = 0; i < 6; ++i) {  // whole and right, or an error; never cut text that looks whole
      const std::string response = sockets[i]->receive_response();
      if (response.find("\"finish_reason\":\"stop\"") != std::string::npos) {
        CHECK_EQUAL(text_of(response), "break " + std::to_string(i));
      } else {
        CHECK(!response.starts_with(kOk) || i % 2 == 0);
      }
    }
    sockets.clear();
    rig.link().is_down = false;
    // Before that the reader may not have noticed that the link was down at all.
    wait_for([&] { return rig.metrics().ring_attachments.value() == round; }, "a new link");
    wait_for([&] { return rig.health() == Health::serving; }, "the ring to be found again");
  }
  rig.wait_until_at_rest();
  rig.wait_until_settled();
  check_all_slots(rig, options.sizes.num_slots);
  rig.wait_until_at_rest();
}

TEST(slow_link_loses_nothing) {
  Rig rig(Rig::defaults());
  rig.link().read_delay_us = 5000;
  check_all_slots(rig, Rig::defaults().sizes.num_slots);
  rig.link().read_delay_us = 0;
  rig.wait_until_at_rest();
}

// ---- token reader

// The bound of poll_pacer.h, counted on the link of a real front end. Elapsed time is in the bound,
// so a slow machine cannot break it.
TEST(polls_per_second_are_bounded) {
  Rig::Options options = Rig::defaults();
  options.owner.token_interval_us = 300;
  options.config.max_polls_per_s = 2000;
  options.config.max_poll_interval_us = 1000;
  Rig rig(options);
  const auto begin = std::chrono::steady_clock::now();
  const uint64_t before = rig.link().num_polls;
  for (int round = 0; round < 10; ++round) {
    check_all_slots(rig, options.sizes.num_slots);
    rig.wait_until_at_rest();  // or the ring would be full
  }
  const uint64_t num_polls = rig.link().num_polls - before;
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  const double bound = PollPacer::kBurst + 2000 * elapsed.count() +
                       10.0 * options.sizes.num_slots;  // each may find the reader asleep
  CHECK(static_cast<double>(num_polls) <= bound);
  CHECK(num_polls > 0);
}

TEST(a_pass_takes_a_bounded_number_of_records) {
  Rig::Options options = Rig::defaults();
  options.sizes.num_slots = 128;
  options.owner.burst = 64;
  Rig rig(options);
  check_all_slots(rig, options.sizes.num_slots);
  rig.wait_until_at_rest();  // or the ring would be full
  std::vector<std::unique_ptr<Socket>> sockets;
  for (uint32_t i = 0; i < 128; ++i) {
    sockets.push_back(std::make_unique<Socket>(rig.port()));
    sockets.back()->send(post("{\"prompt\":\"abcdefgh\",\"max_tokens\":1000,\"ignore_eos\":true}"));
  }
  std::string expected;
  for (int i = 0; i < 125; ++i) expected += "abcdefgh";
  for (auto& socket : sockets) CHECK_EQUAL(text_of(socket->receive_response()), expected);
  CHECK(rig.link().most_records_a_pass < TokenReader::kMaxRecordsPerPass + RingClient::kMaxRecords);
  sockets.clear();
  rig.wait_until_at_rest();
}

// Over a link each read is a round trip: a pass must not make one for every slot with news.
TEST(slots_are_read_together) {
  Rig::Options options = Rig::defaults();
  options.sizes.num_slots = 128;
  options.owner.token_interval_us = 2000;
  options.owner.pace = FakeOwner::Pace::lockstep;
  Rig rig(options);
  check_all_slots(rig, options.sizes.num_slots);
  rig.wait_until_at_rest();
  const Link& link = rig.link();
  std::printf("%.1f slots a read, at most %u reads a pass\n",
              static_cast<double>(link.num_slots_read) / static_cast<double>(link.num_output_reads),
              static_cast<unsigned>(link.most_output_reads_a_pass));
  // Full reads of 64 slots, and a started one for each of the reader's two lists.
  CHECK(link.most_output_reads_a_pass <= 128 / RingClient::kMaxSlotsARead + 2);
  CHECK(link.num_slots_read > link.num_output_reads);
}

// ---- many idle connections

uint64_t resident_bytes() {
  long total = 0;
  long resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  CHECK(std::fscanf(file, "%ld %ld", &total, &resident) == 2);
  std::fclose(file);
  return static_cast<uint64_t>(resident) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// As many as `wanted`, or as the machine's limit on files allows beside some of our own.
uint32_t allow_files(uint32_t wanted) {
  rlimit limit{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = limit.rlim_max;
  CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
  return static_cast<uint32_t>(std::min<uint64_t>(wanted, limit.rlim_max - 200));
}

// The child: opens the connections, says so, and holds them until its standard input ends.
int hold_connections(uint16_t port, uint32_t count) {
  count = allow_files(count);
  std::vector<std::unique_ptr<Socket>> sockets;
  for (uint32_t i = 0; i < count; ++i) sockets.push_back(std::make_unique<Socket>(port));
  char byte = 'r';
  CHECK(::write(STDOUT_FILENO, &byte, 1) == 1);
  (void)!::read(STDIN_FILENO, &byte, 1);
  return 0;
}

TEST(ten_thousand_idle_connections) {
  const uint32_t count = allow_files(10'000);
  if (count < 10'000) std::printf("the limit on open files allows %u connections only\n", count);
  Rig::Options options = Rig::defaults();
  options.config.max_connections = count + 10;
  options.config.header_timeout_ms = options.config.idle_timeout_ms = 600'000;
  Rig rig(options);
  const uint64_t before = resident_bytes();
  const size_t num_files = num_open_files();
  std::array<int, 2> to_child{};
  std::array<int, 2> from_child{};
  CHECK(::pipe(to_child.data()) == 0 && ::pipe(from_child.data()) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(to_child[0], STDIN_FILENO);
    ::dup2(from_child[1], STDOUT_FILENO);
    for (int fd = 3; fd < 1000; ++fd) ::close(fd);
    ::execl("/proc/self/exe", "hold", "hold", std::to_string(rig.port()).c_str(),
            std::to_string(count).c_str(), nullptr);
    ::_exit(127);
  }
  ::close(to_child[0]);
  ::close(from_child[1]);
  char byte = 0;
  CHECK(::read(from_child[0], &byte, 1) == 1);
  wait_for([&] { return rig.metrics().connections_open == count; }, "all connections");
  std::printf("%u idle connections: %.1f KiB each\n", count,
              static_cast<double>(resident_bytes() - before) / 1024 / count);
  CHECK_EQUAL(text_of(exchange(rig.port(), completion("alive", 10, true))), std::string("alive"));
  ::close(to_child[1]);
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  ::close(from_child[0]);
  rig.wait_until_at_rest();
  wait_for([&] { return num_open_files() == num_files; }, "files to be closed");
}

}  // namespace
}  // namespace blink::testing

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "hold") {
    return blink::testing::hold_connections(static_cast<uint16_t>(std::atoi(argv[2])),
                                            static_cast<uint32_t>(std::atoi(argv[3])));
  }
  return blink::testing::run_all(argc, argv);
}
