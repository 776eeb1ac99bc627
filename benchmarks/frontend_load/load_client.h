// An HTTP client for load: many keep-alive connections on one thread, as little work per byte as
// the figures allow.
#ifndef BLINK_BENCHMARKS_LOAD_CLIENT_H
#define BLINK_BENCHMARKS_LOAD_CLIENT_H

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace blink {

uint64_t monotonic_ns();  // CLOCK_MONOTONIC, the clock of all figures

// What one request is and how much came back.
struct LoadRequest {
  bool is_chat = false;
  bool streams = false;
  uint32_t max_tokens = 1;
  std::vector<std::string> prompts;  // request i sends prompt i modulo their number
};

struct Connection {
  int fd = -1;
  bool is_busy = false;
  uint32_t request = 0;       // its number, also its seed: the ring's owner stamps by it
  uint32_t num_received = 0;  // tokens of this request
  uint64_t head_left = 0;     // plain answer: 0 while the head is not complete
  uint64_t body_left = 0;
  std::string tail;  // bytes that do not end a line yet
};

// Calls its sink for each token as the bytes come in.
class LoadClient {
 public:
  struct Sink {
    virtual ~Sink() = default;
    // Token `index` of `request` was in what recv returned at `now_ns`.
    virtual void on_token(uint32_t request, uint32_t index, uint64_t now_ns) = 0;
    virtual void on_done(uint32_t request, uint64_t now_ns) = 0;
  };

  // Opens the connections to 127.0.0.1:port. Exits with a message when something is wrong: a
  // benchmark has nobody to tell.
  LoadClient(uint16_t port, uint32_t num_connections, const LoadRequest& request, Sink& sink);
  ~LoadClient();

  // A free connection, or null.
  Connection* idle();
  // Sends request number `number`; returns the time right before send.
  uint64_t send(Connection& connection, uint32_t number);
  // Waits up to `timeout_us` for answers, 0: looks only. Returns how many connections had some.
  uint32_t wait(uint32_t timeout_us);

  uint32_t num_busy() const { return num_busy_; }
  uint64_t num_tokens() const { return num_tokens_; }
  uint64_t num_refused() const { return num_refused_; }  // 429: sent again
  uint64_t num_receives() const { return num_receives_; }

 private:
  void receive(Connection& connection);
  void take_stream(Connection& connection, const char* bytes, size_t count, uint64_t now);
  void take_plain(Connection& connection, const char* bytes, size_t count, uint64_t now);
  void finish(Connection& connection, uint64_t now);
  std::string text_of(uint32_t number) const;

  LoadRequest request_;
  Sink& sink_;
  int epoll_ = -1;
  std::vector<Connection> connections_;
  std::deque<uint32_t> idle_;  // first in, first out: all connections are used
  uint32_t num_busy_ = 0;
  uint64_t num_tokens_ = 0;
  uint64_t num_refused_ = 0;
  uint64_t num_receives_ = 0;
  std::vector<char> buffer_;
};

}  // namespace blink

#endif  // BLINK_BENCHMARKS_LOAD_CLIENT_H
