#include "frontend/http_session.h"

#include <sys/socket.h>

#include <array>
#include <chrono>

#include <boost/asio/bind_executor.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/read.hpp>

#include "frontend/chat_page.h"
#include "frontend/http_server.h"

namespace blink {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using beast::error_code;

auto with_error(error_code& code) { return asio::redirect_error(asio::use_awaitable, code); }

std::string_view path_of(std::string_view target) { return target.substr(0, target.find('?')); }

std::string_view view(beast::string_view text) { return {text.data(), text.size()}; }

bool is_json_or_missing(std::string_view content_type) {
  const std::string_view type = content_type.substr(0, content_type.find(';'));
  return type.empty() || beast::iequals(type, "application/json") ||
         beast::iequals(type, "application/json ");
}

HttpResponse response_of(const ApiError& error) {
  HttpResponse response{.status = error.http_status, .body = json_from_error(error)};
  if (error.retry_after_s > 0) {
    response.extra_headers = "Retry-After: " + std::to_string(error.retry_after_s) + "\r\n";
  }
  if (error.http_status == 401) response.extra_headers += "WWW-Authenticate: Bearer\r\n";
  return response;
}

constexpr std::string_view kPageHeaders =
    "X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'\r\n";

ApiError http_error(int status, std::string code, std::string message) {
  return ApiError{status, "invalid_request_error", std::move(code), "", std::move(message)};
}

ApiError error_of_parser(const error_code& code) {
  if (code == http::error::body_limit) {
    return http_error(413, "body_too_large", "The request body is too large.");
  }
  if (code == http::error::header_limit || code == http::error::buffer_overflow) {
    return http_error(431, "headers_too_large", "The request headers are too large.");
  }
  if (code == http::error::bad_version) {
    return http_error(505, "http_version", "Only HTTP/1.0 and HTTP/1.1 are served.");
  }
  return http_error(400, "malformed_http", "Malformed HTTP request: " + code.message() + ".");
}

}  // namespace

HttpSession::HttpSession(asio::ip::tcp::socket socket, HttpServer& server)
    : server_(server), stream_(std::move(socket)), signal_(stream_.get_executor()) {
  signal_.expires_at(asio::steady_timer::time_point::max());
  server_.add(this);
}

HttpSession::~HttpSession() { server_.remove(this); }

void HttpSession::start() {
  asio::co_spawn(
      stream_.get_executor(), [self = shared_from_this()] { return self->run(); }, asio::detached);
}

void HttpSession::stop() {
  is_stopping_ = true;
  if (is_idle_) stream_.close();
}

void HttpSession::wake() {
  has_signal_ = true;
  signal_.cancel();
}

asio::awaitable<void> HttpSession::run() {
  try {
    while (co_await serve_one() && !is_stopping_) {
    }
  } catch (const std::exception&) {
    // The socket failed outside a checked call, or memory is short: this connection is over, others
    // go on.
  }
  error_code ignored;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  stream_.close();
}

// Reads and answers one request. False: the connection is to be closed.
asio::awaitable<bool> HttpSession::serve_one() {
  Parser parser;
  parser.header_limit(server_.config().max_header_bytes);
  parser.body_limit(server_.config().max_body_bytes);
  is_idle_ = true;
  version_ = 11;
  keeps_alive_ = true;
  is_head_ = false;
  if (!co_await read_request(parser)) co_return false;
  is_idle_ = false;
  stream_.expires_never();
  const Request request = parser.release();
  version_ = request.version();
  keeps_alive_ = request.keep_alive() && !is_stopping_;
  is_head_ = request.method() == http::verb::head;
  co_return co_await answer(request) && keeps_alive_;
}

// Waits up to idle_timeout for a first byte; then the header's and the body's own deadlines run.
asio::awaitable<bool> HttpSession::read_request(Parser& parser) {
  const FrontEndConfig& config = server_.config();
  error_code code;
  if (buffer_.size() == 0) {
    stream_.expires_after(std::chrono::milliseconds(config.idle_timeout_ms));
    const size_t count = co_await stream_.async_read_some(buffer_.prepare(4096), with_error(code));
    if (code) co_return false;
    buffer_.commit(count);
  }
  stream_.expires_after(std::chrono::milliseconds(config.header_timeout_ms));
  co_await http::async_read_header(stream_, buffer_, parser, with_error(code));
  if (code) co_return co_await answer_read_error(code, parser);
  const Request& head = parser.get();
  version_ = head.version();
  if (version_ != 10 && version_ != 11) {
    co_return co_await answer_read_error(http::make_error_code(http::error::bad_version), parser);
  }
  const auto expect = head.find(http::field::expect);
  if (expect != head.end() && !parser.is_done()) {
    if (!beast::iequals(expect->value(), "100-continue")) {
      keeps_alive_ = false;
      co_await send_error(
          http_error(417, "expectation", "Only 'Expect: 100-continue' is understood."));
      co_return false;
    }
    static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
    co_await asio::async_write(stream_, asio::buffer(kContinue), with_error(code));
    if (code) co_return false;
  }
  stream_.expires_after(std::chrono::milliseconds(config.body_timeout_ms));
  co_await http::async_read(stream_, buffer_, parser, with_error(code));
  if (code) co_return co_await answer_read_error(code, parser);
  co_return true;
}

// Tells the client what was wrong with its request, if it can still hear it. Always ends the
// connection.
asio::awaitable<bool> HttpSession::answer_read_error(error_code code, const Parser& parser) {
  keeps_alive_ = false;
  if (code == http::error::end_of_stream || code == asio::error::connection_reset ||
      code == asio::error::operation_aborted || code == asio::error::eof) {
    co_return false;
  }
  if (code == beast::error::timeout) {
    // tcp_stream closes its socket on a timeout; there is nobody to send a 408 to.
    server_.pipeline().metrics().count_response(408);
    co_return false;
  }
  (void)parser;
  co_await send_error(error_of_parser(code));
  co_return false;
}

asio::awaitable<bool> HttpSession::answer(const Request& request) {
  const std::string_view path = path_of(view(request.target()));
  const bool is_api = path.starts_with("/v1/");
  if (is_api &&
      !has_valid_key(view(request[http::field::authorization]), server_.config().api_keys)) {
    co_return co_await send_error(
        http_error(401, "invalid_api_key", "Send a valid key as 'Authorization: Bearer KEY'."));
  }
  const bool is_completions = path == "/v1/completions";
  const bool is_chat = path == "/v1/chat/completions";
  if (is_completions || is_chat) {
    if (request.method() == http::verb::post) {
      co_return co_await answer_generation(
          is_chat ? Endpoint::chat_completions : Endpoint::completions, request);
    }
    HttpResponse response = response_of(http_error(405, "method_not_allowed", "Use POST here."));
    response.extra_headers = "Allow: POST\r\n";
    co_return co_await send(std::move(response));
  }
  HttpResponse response = answer_get(path);
  const bool is_get = request.method() == http::verb::get || is_head_;
  if (response.status != 404 && !is_get) {
    response = response_of(http_error(405, "method_not_allowed", "Use GET here."));
    response.extra_headers = "Allow: GET, HEAD\r\n";
  }
  co_return co_await send(std::move(response));
}

HttpResponse HttpSession::answer_get(std::string_view path) const {
  if (path == "/health") return health_response();
  if (path == "/v1/models") return models_response();
  if (path == "/metrics") {
    return {.content_type = "text/plain; version=0.0.4; charset=utf-8",
            .body = server_.pipeline().prometheus_text()};
  }
  if (path == "/" && server_.config().serves_chat_page) {
    return {.content_type = "text/html; charset=utf-8",
            .body = std::string(chat_page()),
            .extra_headers = std::string(kPageHeaders)};
  }
  const std::string& model = server_.config().model_name;
  if (path.starts_with("/v1/models/")) {
    const std::string name =
        percent_decoded(path.substr(11));  // "owner/model" comes as owner%2Fmodel
    if (name == model) {
      std::string body = models_response().body;  // {"object":"list","data":[{...}]}
      const size_t begin = body.find('[') + 1;
      return {.body = body.substr(begin, body.rfind(']') - begin)};
    }
    return response_of(
        http_error(404, "model_not_found", "The model '" + printable(name) + "' does not exist."));
  }
  return response_of(http_error(404, "not_found", "No such path: " + printable(path)));
}

HttpResponse HttpSession::health_response() const {
  const Health health = server_.pipeline().health();
  const bool is_healthy = health == Health::serving && !server_.is_stopping();
  const char* name = server_.is_stopping() ? "stopping" : health_name(health);
  return {.status = is_healthy ? 200 : 503, .body = std::string("{\"status\":\"") + name + "\"}"};
}

HttpResponse HttpSession::models_response() const {
  std::string body = "{\"object\":\"list\",\"data\":[{\"id\":\"";
  append_json_escaped(server_.config().model_name, body);
  body += "\",\"object\":\"model\",\"created\":" + std::to_string(server_.started_at_s());
  body += ",\"owned_by\":\"blink\",\"max_model_len\":";
  body += std::to_string(server_.pipeline().ring_sizes().max_seqlen) + "}]}";
  return {.body = std::move(body)};
}

asio::awaitable<bool> HttpSession::answer_generation(Endpoint endpoint, const Request& request) {
  GenerationPipeline& pipeline = server_.pipeline();
  if (!is_json_or_missing(view(request[http::field::content_type]))) {
    co_return co_await send_error(http_error(415, "unsupported_media_type",
                                             "Send the body as 'Content-Type: application/json'."));
  }
  const RequestLimits limits = pipeline.request_limits();
  auto parsed = parse_generation_request(endpoint, request.body(), limits);
  if (const auto* error = std::get_if<ApiError>(&parsed)) co_return co_await send_error(*error);
  auto& wanted = std::get<GenerationRequest>(parsed);
  if (!wanted.model.empty() && wanted.model != server_.config().model_name) {
    co_return co_await send_error(http_error(404, "model_not_found",
                                             "The model '" + wanted.model +
                                                 "' does not exist; this server has '" +
                                                 server_.config().model_name + "'."));
  }
  std::optional<ApiError> failure;
  if (pipeline.prepares_inline(wanted)) {
    failure = pipeline.prepare(wanted);
  } else {
    // Over to a prepare thread and back; this session's members are not touched there.
    co_await asio::post(asio::bind_executor(server_.prepare_pool(), asio::use_awaitable));
    failure = pipeline.prepare(wanted);
    co_await asio::post(asio::bind_executor(server_.io(), asio::use_awaitable));
  }
  if (failure) co_return co_await send_error(*failure);
  if (server_.is_stopping()) {
    co_return co_await send_error(server_error(503, "stopping", "The server is stopping."));
  }
  auto submitted = pipeline.submit(wanted);
  if (const auto* error = std::get_if<ApiError>(&submitted)) co_return co_await send_error(*error);
  co_return co_await send_output(std::move(std::get<std::shared_ptr<Generation>>(submitted)));
}

// Sends a generation's output as it comes (a stream) or when it is complete.
asio::awaitable<bool> HttpSession::send_output(std::shared_ptr<Generation> generation) {
  struct Guard {  // whatever ends this coroutine: nobody is woken any more, and an unfinished
                  // request aborts
    HttpSession& session;
    Generation& generation;
    bool is_complete = false;
    ~Guard() {
      generation.waiter = nullptr;
      if (!is_complete) generation.is_abort_requested.store(true, std::memory_order_relaxed);
      error_code ignored;
      session.stream_.socket().cancel(ignored);  // the disconnect watch
    }
  } guard{*this, *generation};
  generation->waiter = this;
  has_signal_ = true;  // the output may have come before the waiter was set
  watch_for_disconnect();
  bool is_first = true;
  while (true) {
    if (!co_await wait_for_output(*generation)) co_return false;
    bool is_complete = false;
    std::optional<ApiError> failure;
    written_.clear();
    {
      const std::lock_guard lock(generation->output_mutex);
      is_complete = generation->is_output_complete;
      if (!generation->streams && !is_complete) continue;
      std::swap(written_, generation->output);
      failure = std::move(generation->failure);
      generation->failure.reset();
    }
    guard.is_complete = is_complete;
    if (failure && is_first && written_.empty()) co_return co_await send_error(*failure);
    if (failure) co_return false;  // a stream cut off in the middle must not look whole
    if (!generation->streams) {
      HttpResponse response;
      response.body = std::move(written_);
      co_return co_await send(std::move(response));
    }
    if (written_.empty() && !is_complete) continue;
    if (!co_await send_chunk(written_, is_first, is_complete)) co_return false;
    is_first = false;
    if (is_complete) co_return version_ != 10;
  }
}

// False: the client has gone.
asio::awaitable<bool> HttpSession::wait_for_output(Generation&) {
  error_code ignored;
  while (!has_signal_ && !is_disconnected_) co_await signal_.async_wait(with_error(ignored));
  has_signal_ = false;
  co_return !is_disconnected_;
}

// A readable socket while we answer: closed by the client, or its next request (left where it is).
void HttpSession::watch_for_disconnect() {
  stream_.socket().async_wait(
      asio::ip::tcp::socket::wait_read, [weak = weak_from_this()](error_code code) {
        const auto self = weak.lock();
        if (code || !self || !self->stream_.socket().is_open()) return;
        char byte;
        const ssize_t count =
            ::recv(self->stream_.socket().native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR))) return;
        self->is_disconnected_ = true;
        self->wake();
      });
}

// One write for head, chunk framing and bytes.
asio::awaitable<bool> HttpSession::send_chunk(std::string& bytes, bool is_first, bool is_last) {
  std::string before;
  if (is_first) {
    before = head_of_stream(version_, keeps_alive_);
    server_.pipeline().metrics().count_response(200);
  }
  std::string_view after;
  if (version_ != 10) {
    if (!bytes.empty()) before += chunk_head(bytes.size());
    after = is_last ? (bytes.empty() ? "0\r\n\r\n" : "\r\n0\r\n\r\n") : "\r\n";
  }
  const std::array<asio::const_buffer, 3> buffers = {asio::buffer(before), asio::buffer(bytes),
                                                     asio::buffer(after)};
  error_code code;
  stream_.expires_after(std::chrono::milliseconds(server_.config().write_timeout_ms));
  co_await asio::async_write(stream_, buffers, with_error(code));
  stream_.expires_never();
  co_return !code;
}

asio::awaitable<bool> HttpSession::send_error(const ApiError& error) {
  co_return co_await send(response_of(error));
}

asio::awaitable<bool> HttpSession::send(HttpResponse response) {
  server_.pipeline().metrics().count_response(response.status);
  const std::string head = head_of_response(response, version_, keeps_alive_);
  if (is_head_) response.body.clear();
  const std::array<asio::const_buffer, 2> buffers = {asio::buffer(head),
                                                     asio::buffer(response.body)};
  error_code code;
  stream_.expires_after(std::chrono::milliseconds(server_.config().write_timeout_ms));
  co_await asio::async_write(stream_, buffers, with_error(code));
  stream_.expires_never();
  co_return !code;
}

}  // namespace blink
