// The whole front end under load, over a fake owner in the same process: every stream must carry
// its own text.
//
// load_test [STREAMS TOKENS REQUESTS]: concurrent connections, tokens of each answer, requests in
// all. Prints figures; as a test it runs small, under the sanitizers.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "byte_codec.h"
#include "check.h"
#include "fake_owner.h"
#include "frontend/front_end.h"

namespace blink {
namespace {

struct Load {
  uint32_t num_streams = 16;
  uint32_t num_tokens = 64;
  uint32_t num_requests = 200;
};

// A keep-alive connection that sends one request after the other.
class Client {
 public:
  explicit Client(uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int one = 1;
    ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    CHECK(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  }
  ~Client() { ::close(fd_); }

  // Streams `prompt` back and returns the number of events with text.
  uint32_t stream(bool is_chat, const std::string& prompt, uint32_t num_tokens) {
    const std::string input =
        is_chat ? "\"messages\":[{\"role\":\"user\",\"content\":\"" + prompt + "\"}]"
                : "\"prompt\":\"" + prompt + "\"";
    const std::string body = "{" + input + ",\"max_tokens\":" + std::to_string(num_tokens) +
                             ",\"stream\":true,\"ignore_eos\":true}";
    const std::string request =
        std::string("POST ") + (is_chat ? "/v1/chat/completions" : "/v1/completions") +
        " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body;
    // 429: every slot is held or not yet emptied by the owner; a client tries again.
    while (!exchange(request)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return check(is_chat ? "\"content\":\"" : "\"text\":\"", prompt, num_tokens);
  }

 private:
  // Sends a request and reads its whole response. False: 429.
  bool exchange(const std::string& request) {
    CHECK(::send(fd_, request.data(), request.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(request.size()));
    received_.clear();
    const auto is_error = [this] { return received_.size() > 12 && received_[9] != '2'; };
    while (!received_.ends_with("\r\n0\r\n\r\n") && !(is_error() && received_.ends_with("}}"))) {
      char bytes[65536];
      const ssize_t count = ::recv(fd_, bytes, sizeof(bytes), 0);
      CHECK(count > 0);
      received_.append(bytes, static_cast<size_t>(count));
    }
    if (received_.starts_with("HTTP/1.1 429 ")) return false;
    if (is_error()) testing::fail(__FILE__, __LINE__, received_);
    return true;
  }

  uint32_t check(std::string_view key, const std::string& prompt, uint32_t num_tokens) {
    CHECK(received_.starts_with("HTTP/1.1 200 "));
    CHECK(received_.find("data: [DONE]") != std::string::npos);
    std::string text;
    uint32_t num_events = 0;
    for (size_t at = received_.find(key); at != std::string::npos; at = received_.find(key, at)) {
      at += key.size();
      const size_t end = received_.find('"', at);
      if (end > at) ++num_events;
      text.append(received_, at, end - at);
    }
    std::string expected;
    while (expected.size() < num_tokens) expected += prompt;
    expected.resize(num_tokens);
    CHECK_EQUAL(text, expected);
    return num_events;
  }

  int fd_;
  std::string received_;
};

RingSizes sizes_for(const Load& load) {
  RingSizes sizes;
  sizes.num_slots = load.num_streams + load.num_streams / 4 + 1;
  sizes.max_prompt_tokens = 256;
  sizes.max_output_tokens = load.num_tokens;
  sizes.max_seqlen = 256 + load.num_tokens;
  sizes.max_batch = load.num_streams;
  sizes.vocab_size = 300;
  sizes.num_kv_pages = 1 << 20;
  return sizes;
}

// The only message's content.
std::variant<std::string, ApiError> render(const std::string& input) {
  static constexpr std::string_view kContent = "\"content\":\"";
  const size_t begin = input.find(kContent) + kContent.size();
  return input.substr(begin, input.find('"', begin) - begin);
}

int run(const Load& load) {
  const RingSizes sizes = sizes_for(load);
  const size_t num_bytes = ring_layout_from_sizes(sizes).ring_bytes;
  std::unique_ptr<std::byte, void (*)(void*)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, num_bytes)), std::free);
  std::memset(memory.get(), 0, num_bytes);
  create_ring({memory.get(), num_bytes}, sizes);
  FakeOwner owner(memory.get(), FakeOwner::Options{});
  std::thread owner_thread([&] { owner.run(); });

  FrontEndConfig config;
  config.port = 0;
  config.model_name = "fake";
  config.eos_token_ids = {FakeOwner::kEos};
  config.max_connections = load.num_streams + 16;
  // No thread's pause on a busy machine is a client that is late, or an owner that is dead.
  config.header_timeout_ms = config.idle_timeout_ms = config.stall_timeout_ms = 600'000;
  FrontEnd front_end(config, connect_mapped(memory.get(), num_bytes), std::make_shared<ByteCodec>(),
                     render);
  front_end.start();
  while (front_end.health() != Health::serving) std::this_thread::yield();

  std::atomic<uint32_t> next{0};
  std::atomic<uint64_t> num_events{0};
  const auto begin = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> clients;
    for (uint32_t i = 0; i < load.num_streams; ++i) {
      clients.emplace_back([&] {
        Client client(front_end.port());
        for (uint32_t n = next++; n < load.num_requests; n = next++) {
          num_events +=
              client.stream(n % 4 == 0, "request " + std::to_string(n) + " ", load.num_tokens);
        }
      });
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  front_end.stop(std::chrono::seconds(60));
  std::atomic_ref<uint32_t>(RingView(memory.get()).header()->stop)
      .store(1, std::memory_order_release);
  owner_thread.join();
  const uint64_t expected = static_cast<uint64_t>(load.num_requests) * load.num_tokens;
  std::printf(
      "%u streams, %u requests of %u tokens: %.0f tokens/s, %.0f requests/s, %.3f events a token\n",
      load.num_streams, load.num_requests, load.num_tokens,
      static_cast<double>(expected) / seconds.count(), load.num_requests / seconds.count(),
      static_cast<double>(num_events) / static_cast<double>(expected));
  CHECK_EQUAL(num_events.load(), expected);
  const RingView view(memory.get());
  for (uint32_t slot = 0; slot < sizes.num_slots; ++slot) {
    CHECK_EQUAL(unpack_status(view.status(slot)->word).state, BLINK_STATE_EMPTY);
  }
  return 0;
}

}  // namespace
}  // namespace blink

int main(int argc, char** argv) {
  blink::Load load;
  if (argc > 1) load.num_streams = static_cast<uint32_t>(std::atoi(argv[1]));
  if (argc > 2) load.num_tokens = static_cast<uint32_t>(std::atoi(argv[2]));
  if (argc > 3) load.num_requests = static_cast<uint32_t>(std::atoi(argv[3]));
  return blink::run(load);
}
