// One connection: reads requests, routes them, writes responses and streams. Network thread only.
#ifndef BLINK_FRONTEND_HTTP_SESSION_H
#define BLINK_FRONTEND_HTTP_SESSION_H

#include <memory>
#include <string>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "frontend/generation.h"
#include "frontend/http_message.h"
#include "frontend/request_parser.h"

namespace blink {

class HttpServer;

class HttpSession final : public OutputWaiter, public std::enable_shared_from_this<HttpSession> {
 public:
  HttpSession(boost::asio::ip::tcp::socket socket, HttpServer& server);
  ~HttpSession() override;

  void start();
  // Ends the connection: at once when idle, else after the running response.
  void stop();
  void wake() override;

 private:
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;
  using Request = boost::beast::http::request<boost::beast::http::string_body>;
  template <typename T>
  using Awaitable = boost::asio::awaitable<T>;

  Awaitable<void> run();
  Awaitable<bool> serve_one();
  Awaitable<bool> read_request(Parser& parser);
  Awaitable<bool> answer_read_error(boost::beast::error_code code, const Parser& parser);
  Awaitable<bool> answer(const Request& request);
  Awaitable<bool> answer_generation(Endpoint endpoint, const Request& request);
  Awaitable<bool> send_output(std::shared_ptr<Generation> generation);
  Awaitable<bool> send_chunk(std::string& bytes, bool is_first, bool is_last);
  Awaitable<bool> send(HttpResponse response);
  Awaitable<bool> send_error(const ApiError& error);
  Awaitable<bool> wait_for_output(Generation& generation);

  HttpResponse answer_get(std::string_view path) const;
  HttpResponse health_response() const;
  HttpResponse models_response() const;
  void watch_for_disconnect();

  HttpServer& server_;
  boost::beast::tcp_stream stream_;
  boost::beast::flat_buffer buffer_;
  boost::asio::steady_timer signal_;  // never expires; cancelling it wakes the coroutine
  bool has_signal_ = false;
  bool is_disconnected_ = false;
  bool is_idle_ = true;
  bool is_stopping_ = false;
  // Of the request being answered.
  unsigned version_ = 11;
  bool keeps_alive_ = true;
  bool is_head_ = false;
  std::string written_;  // the bytes being sent; its capacity is reused
};

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_SESSION_H
