#include "frontend/http_connection.h"

#include <sys/socket.h>

#include <cerrno>

#include <boost/asio/buffer.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace blink {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr size_t kMaxReceivedBytes = 256 * 1024;  // at once; the socket holds the rest
constexpr size_t kKeptBytes = 64 * 1024;          // capacity that outlives its message
constexpr auto kLinger = std::chrono::seconds(1);
constexpr size_t kMaxLingerBytes = 4 * 1024 * 1024;

auto with_error(error_code& code) { return asio::redirect_error(asio::use_awaitable, code); }

void clear_and_shrink(std::string& bytes) {
  if (bytes.capacity() > kKeptBytes) bytes = std::string();
  bytes.clear();
}

// TLS begins with the type of its first record, which is no such byte.
bool begins_text(char byte) {
  return (byte >= 'A' && byte <= 'Z') || (byte >= 'a' && byte <= 'z') || byte == '\r' ||
         byte == '\n';
}

}  // namespace

HttpConnection::HttpConnection(asio::ip::tcp::socket socket, std::shared_ptr<const TlsContext> tls,
                               std::span<char> overflow)
    : socket_(std::move(socket)), overflow_(overflow) {
  if (tls) tls_ = std::make_unique<TlsChannel>(std::move(tls));
}

asio::awaitable<bool> HttpConnection::receive(Clock::time_point deadline) {
  if (received_.empty()) clear_and_shrink(received_);
  const size_t num_before = received_.size();
  while (received_.size() == num_before) {  // TLS has records without bytes of ours
    if (is_late_) co_return false;
    deadline_ = deadline;
    error_code code;
    const size_t count = co_await socket_.async_read_some(asio::buffer(first_), with_error(code));
    deadline_ = Clock::time_point::max();
    if (code) co_return false;
    bool is_good = take({first_.data(), count});
    for (bool is_full = count == first_.size(); is_full && is_good;) {
      const ssize_t more =
          ::recv(socket_.native_handle(), overflow_.data(), overflow_.size(), MSG_DONTWAIT);
      if (more > 0) is_good = take({overflow_.data(), static_cast<size_t>(more)});
      is_full = more == static_cast<ssize_t>(overflow_.size()) &&
                received_.size() - num_before < kMaxReceivedBytes;
    }
    if (tls_) {  // handshake, or the alert that says what was wrong
      tls_->take_to_send(encrypted_);
      const bool is_sent =
          encrypted_.empty() || co_await write(encrypted_, std::chrono::milliseconds(1000));
      clear_and_shrink(encrypted_);
      if (!is_sent || !is_good) co_return false;
    }
  }
  co_return true;
}

bool HttpConnection::take(std::string_view bytes) {
  if (tls_ && !has_begun_ && !bytes.empty()) {
    has_begun_ = true;
    lacks_tls_ = begins_text(bytes.front());
    if (lacks_tls_) tls_.reset();
  }
  if (tls_) return tls_->receive(bytes, received_);
  received_.append(bytes);
  return true;
}

asio::awaitable<bool> HttpConnection::send(std::chrono::milliseconds timeout) {
  bool is_sent = false;
  if (!tls_) {
    is_sent = co_await write(to_send_, timeout);
  } else if (tls_->send(to_send_)) {
    tls_->take_to_send(encrypted_);
    is_sent = co_await write(encrypted_, timeout);
    clear_and_shrink(encrypted_);
  }
  clear_and_shrink(to_send_);
  co_return is_sent;
}

bool HttpConnection::send_now() {
  const ssize_t count = ::send(socket_.native_handle(), to_send_.data(), to_send_.size(),
                               MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count == static_cast<ssize_t>(to_send_.size())) {
    clear_and_shrink(to_send_);
    return true;
  }
  if (count > 0) to_send_.erase(0, static_cast<size_t>(count));
  return false;
}

asio::awaitable<bool> HttpConnection::write(std::string_view bytes,
                                            std::chrono::milliseconds timeout) {
  while (!bytes.empty()) {
    const ssize_t count =
        ::send(socket_.native_handle(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count > 0) {
      bytes.remove_prefix(static_cast<size_t>(count));
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK) co_return false;
    is_late_ = false;  // as a read may have been whose bytes were here before it was told
    deadline_ = Clock::now() + timeout;
    error_code code;
    co_await socket_.async_wait(asio::ip::tcp::socket::wait_write, with_error(code));
    deadline_ = Clock::time_point::max();
    if (code || is_late_) co_return false;
  }
  co_return true;
}

asio::awaitable<void> HttpConnection::end() {
  if (!is_open()) co_return;
  error_code code;
  if (tls_) {
    tls_->close();
    tls_->take_to_send(encrypted_);
    ::send(socket_.native_handle(), encrypted_.data(), encrypted_.size(),
           MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, code);
  const Clock::time_point deadline = Clock::now() + kLinger;
  for (size_t num_bytes = 0; !code && !is_late_ && num_bytes < kMaxLingerBytes;) {
    deadline_ = deadline;
    num_bytes += co_await socket_.async_read_some(asio::buffer(first_), with_error(code));
    while (!code) {
      const ssize_t more =
          ::recv(socket_.native_handle(), overflow_.data(), overflow_.size(), MSG_DONTWAIT);
      if (more <= 0 || num_bytes >= kMaxLingerBytes) break;
      num_bytes += static_cast<size_t>(more);
    }
  }
  close();
}

void HttpConnection::expire(Clock::time_point now) {
  if (now < deadline_) return;
  deadline_ = Clock::time_point::max();
  is_late_ = true;
  error_code ignored;
  socket_.cancel(ignored);
}

bool HttpConnection::has_unread_bytes() {
  error_code ignored;
  return socket_.available(ignored) > 0;
}

void HttpConnection::close() {
  error_code ignored;
  socket_.close(ignored);
}

}  // namespace blink
