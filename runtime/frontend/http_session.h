// One connection's requests: reads, routes, answers, logs. Network thread only.
#ifndef BLINK_FRONTEND_HTTP_SESSION_H
#define BLINK_FRONTEND_HTTP_SESSION_H

#include <memory>
#include <optional>
#include <string>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>

#include "frontend/access_log.h"
#include "frontend/generation.h"
#include "frontend/http_connection.h"
#include "frontend/http_message.h"
#include "frontend/http_request.h"
#include "frontend/http_routes.h"
#include "frontend/request_parser.h"

namespace blink {

class HttpServer;

class HttpSession final : public OutputWaiter, public std::enable_shared_from_this<HttpSession> {
 public:
  // `peer_key`: what the connection counts as where addresses have a limit.
  HttpSession(boost::asio::ip::tcp::socket socket, HttpServer& server, std::string peer_key);
  ~HttpSession() override;

  // `peer`: the client's address, for the log.
  void start(std::string_view peer);
  // Ends the connection: at once when idle, else after the running response.
  void stop();
  // Ends the wait for the client that is on its way, if there is one.
  void cut() { connection_.expire(Clock::time_point::max()); }
  void wake() override;

  // The server's housekeeping: ends what is past its deadline.
  void expire(Clock::time_point now);
  // A generation runs, and only the socket can tell whether the client is still there.
  bool is_generating() const { return is_generating_; }
  int native_handle() { return connection_.native_handle(); }
  void on_client_gone();
  const std::string& peer_key() const { return peer_key_; }

 private:
  template <typename T>
  using Awaitable = boost::asio::awaitable<T>;

  Awaitable<void> run();
  Awaitable<bool> serve_one();
  Awaitable<bool> read_request();
  Awaitable<bool> answer_read_failure();
  Awaitable<bool> answer();
  Awaitable<bool> answer_generation(Endpoint endpoint);
  Awaitable<bool> send_output(std::shared_ptr<Generation> generation);
  Awaitable<bool> send_chunk(const std::string& bytes, bool is_first, bool is_last);
  Awaitable<bool> send(HttpResponse response);
  Awaitable<bool> send_error(const ApiError& error);
  Awaitable<bool> send_bytes();
  Awaitable<bool> send_overdue(bool is_first);
  Awaitable<bool> wait_for_output(Generation* stream);
  bool send_directly();
  void append_chunk(const std::string& bytes, bool is_last);
  void resume();

  void begin_request();
  void judge_head();
  bool holds_body_limit();
  HeadContext head_context();
  void log_tokens(const Generation& generation);
  void log_request();

  HttpServer& server_;
  const std::string peer_key_;
  HttpConnection connection_;
  HttpRequestParser parser_;
  boost::asio::steady_timer signal_;  // never expires; cancelling it wakes the coroutine
  bool has_signal_ = false;
  bool is_client_gone_ = false;
  bool is_idle_ = true;
  bool is_first_ = true;  // request of the connection
  bool is_stopping_ = false;
  bool is_generating_ = false;
  Generation* waits_for_ = nullptr;  // its stream may be sent on while the coroutine waits
  bool is_overdue_ = false;
  Clock::time_point generation_deadline_;
  // Of the request being answered.
  Clock::time_point begun_at_;
  Route route_ = Route::unknown;
  bool keeps_alive_ = true;
  bool is_head_judged_ = false;
  std::optional<ApiError> refusal_;
  std::string request_id_;
  std::string cors_headers_;
  size_t num_counted_bytes_ = 0;  // of the body, in the server's sum
  AccessLogEntry entry_;
  std::string written_;  // the bytes being sent; its capacity is reused
};

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_SESSION_H
