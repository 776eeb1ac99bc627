#include "load_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace blink {
namespace {

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "frontend_bench: %s\n", what.c_str());
  std::exit(1);
}

int connect_to(uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int one = 1;
  if (fd < 0 || ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) != 0 ||
      ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    fail(std::string("cannot connect: ") + std::strerror(errno));
  }
  return fd;
}

}  // namespace

uint64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

LoadClient::LoadClient(uint16_t port, uint32_t num_connections, const LoadRequest& request,
                       Sink& sink)
    : request_(request), sink_(sink), epoll_(::epoll_create1(EPOLL_CLOEXEC)), buffer_(1 << 16) {
  connections_.resize(num_connections);
  for (uint32_t i = 0; i < num_connections; ++i) {
    connections_[i].fd = connect_to(port);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = i;
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, connections_[i].fd, &event) != 0) fail("epoll_ctl");
    idle_.push_back(i);
  }
}

LoadClient::~LoadClient() {
  for (const Connection& connection : connections_) ::close(connection.fd);
  ::close(epoll_);
}

Connection* LoadClient::idle() {
  if (idle_.empty()) return nullptr;
  Connection& connection = connections_[idle_.front()];
  idle_.pop_front();
  return &connection;
}

std::string LoadClient::text_of(uint32_t number) const {
  std::string body =
      request_.is_chat ? "{\"messages\":[{\"role\":\"user\",\"content\":\"" : "{\"prompt\":\"";
  body += request_.prompts[number % request_.prompts.size()];
  body += request_.is_chat ? "\"}]" : "\"";
  body += ",\"max_tokens\":" + std::to_string(request_.max_tokens);
  body += ",\"seed\":" + std::to_string(number) + ",\"ignore_eos\":true";
  if (request_.streams) body += ",\"stream\":true";
  body += "}";
  return std::string("POST ") + (request_.is_chat ? "/v1/chat/completions" : "/v1/completions") +
         " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body;
}

uint64_t LoadClient::send(Connection& connection, uint32_t number) {
  connection.is_busy = true;
  connection.request = number;
  connection.num_received = 0;
  connection.head_left = connection.body_left = 0;
  connection.tail.clear();
  ++num_busy_;
  const std::string text = text_of(number);
  const uint64_t now = monotonic_ns();
  if (::send(connection.fd, text.data(), text.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(text.size())) {
    fail(std::string("cannot send a request: ") + std::strerror(errno));
  }
  return now;
}

uint32_t LoadClient::wait(uint32_t timeout_us) {
  epoll_event events[256];
  const timespec timeout{timeout_us / 1'000'000, timeout_us % 1'000'000 * 1000L};
  const int count = ::epoll_pwait2(epoll_, events, 256, &timeout, nullptr);
  for (int i = 0; i < count; ++i) receive(connections_[events[i].data.u32]);
  return count < 0 ? 0 : static_cast<uint32_t>(count);
}

void LoadClient::receive(Connection& connection) {
  const ssize_t count = ::recv(connection.fd, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
  const uint64_t now = monotonic_ns();
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count <= 0) fail("the server closed a connection");
  if (!connection.is_busy) fail("bytes without a request");
  ++num_receives_;
  const auto size = static_cast<size_t>(count);
  if (connection.tail.empty() && connection.num_received == 0 && connection.body_left == 0 &&
      !std::string_view(buffer_.data(), size).starts_with("HTTP/1.1 200 ")) {
    if (!std::string_view(buffer_.data(), size).starts_with("HTTP/1.1 429 ")) {
      fail("an answer that is no 200: " + std::string(buffer_.data(), size));
    }
    ++num_refused_;
    --num_busy_;
    send(connection, connection.request);
    return;
  }
  if (request_.streams) {
    take_stream(connection, buffer_.data(), size, now);
  } else {
    take_plain(connection, buffer_.data(), size, now);
  }
}

// Every event ends with an empty line. Of a stream of n tokens there are n + 2: the last two are
// the finish_reason and [DONE], and the chunk that ends the body follows.
void LoadClient::take_stream(Connection& connection, const char* bytes, size_t count,
                             uint64_t now) {
  const char* const end = bytes + count;
  char last = connection.tail.empty() ? 'x' : connection.tail.back();
  for (const char* at = bytes; at < end;) {
    const auto* line_end =
        static_cast<const char*>(std::memchr(at, '\n', static_cast<size_t>(end - at)));
    if (line_end == nullptr) break;
    const char before = line_end == bytes ? last : line_end[-1];
    if (before == '\n') {
      if (connection.num_received < request_.max_tokens) {
        sink_.on_token(connection.request, connection.num_received, now);
        ++num_tokens_;
      }
      ++connection.num_received;
    }
    at = line_end + 1;
  }
  // The last bytes that came, as recv may cut anywhere.
  connection.tail.append(bytes + (count > 8 ? count - 8 : 0), std::min<size_t>(count, 8));
  if (connection.tail.size() > 8) connection.tail.erase(0, connection.tail.size() - 8);
  if (!connection.tail.ends_with("\r\n0\r\n\r\n")) return;
  if (connection.num_received != request_.max_tokens + 2) {
    fail("a stream of " + std::to_string(connection.num_received) + " events instead of " +
         std::to_string(request_.max_tokens + 2));
  }
  finish(connection, now);
}

void LoadClient::take_plain(Connection& connection, const char* bytes, size_t count, uint64_t now) {
  if (connection.body_left == 0) {
    connection.tail.append(bytes, count);
    const size_t head_end = connection.tail.find("\r\n\r\n");
    if (head_end == std::string::npos) return;
    static constexpr std::string_view kLength = "Content-Length: ";
    const size_t at = connection.tail.find(kLength);
    if (at == std::string::npos || at > head_end) fail("an answer without Content-Length");
    const uint64_t length =
        std::strtoull(connection.tail.c_str() + at + kLength.size(), nullptr, 10);
    connection.body_left = length - (connection.tail.size() - head_end - 4);
  } else {
    connection.body_left -= count;
  }
  if (connection.body_left > 0) return;
  sink_.on_token(connection.request, request_.max_tokens - 1, now);
  num_tokens_ += request_.max_tokens;
  finish(connection, now);
}

void LoadClient::finish(Connection& connection, uint64_t now) {
  connection.is_busy = false;
  --num_busy_;
  idle_.push_back(static_cast<uint32_t>(&connection - connections_.data()));
  sink_.on_done(connection.request, now);
}

}  // namespace blink
