// One client's socket: plain or TLS, with deadlines. Network thread only.
#ifndef BLINK_FRONTEND_HTTP_CONNECTION_H
#define BLINK_FRONTEND_HTTP_CONNECTION_H

#include <array>
#include <chrono>
#include <memory>
#include <span>
#include <string>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "frontend/generation.h"
#include "frontend/tls_channel.h"

namespace blink {

class HttpConnection {
 public:
  template <typename T>
  using Awaitable = boost::asio::awaitable<T>;

  // `tls` null: plain. `overflow`: memory of the network thread for what comes beyond a small
  // request, so that an idle connection keeps little.
  HttpConnection(boost::asio::ip::tcp::socket socket, std::shared_ptr<const TlsContext> tls,
                 std::span<char> overflow);

  // Waits for bytes of the client and appends them to received(). False: the client ended or broke
  // the connection, or the deadline passed.
  Awaitable<bool> receive(Clock::time_point deadline);

  // Sends to_send() and clears it. False: the client is gone, or took nothing for `timeout`.
  Awaitable<bool> send(std::chrono::milliseconds timeout);

  // Plain connections: sends what the socket takes at once. False: the rest is in to_send() still;
  // what is wrong, if something is, send() will find out.
  bool send_now();

  // Says good-bye so that the last answer arrives: what the client still sends is thrown away for a
  // moment, as a close with unread bytes would reset the connection.
  Awaitable<void> end();

  std::string& received() { return received_; }
  std::string& to_send() { return to_send_; }

  // Ends the wait that is on its way if its deadline has passed. Called now and then by the server:
  // cheaper than a timer per wait.
  void expire(Clock::time_point now);
  bool is_late() const { return is_late_; }
  // After a deadline: there is something to say to the client all the same.
  void clear_late() { is_late_ = false; }

  bool is_tls() const { return tls_ != nullptr; }
  // The client sent plain HTTP where TLS is served. From then on the connection is plain, so that
  // it can be told.
  bool lacks_tls() const { return lacks_tls_; }
  bool has_failed_handshake() const {
    return lacks_tls_ || (tls_ != nullptr && !tls_->is_established());
  }
  bool is_open() const { return socket_.is_open(); }
  // The client has sent what nobody has read yet.
  bool has_unread_bytes();
  int native_handle() { return socket_.native_handle(); }
  boost::asio::any_io_executor executor() { return socket_.get_executor(); }
  void close();

 private:
  bool take(std::string_view bytes);
  Awaitable<bool> write(std::string_view bytes, std::chrono::milliseconds timeout);

  boost::asio::ip::tcp::socket socket_;
  std::unique_ptr<TlsChannel> tls_;
  bool has_begun_ = false;  // bytes have come
  bool lacks_tls_ = false;
  std::span<char> overflow_;
  Clock::time_point deadline_ = Clock::time_point::max();
  bool is_late_ = false;
  std::array<char, 1024> first_;  // a usual request fits
  std::string received_;          // not yet taken by the session
  std::string to_send_;
  std::string encrypted_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_CONNECTION_H
