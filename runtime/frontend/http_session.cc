#include "frontend/http_session.h"

#include <chrono>

#include <boost/asio/bind_executor.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "frontend/http_server.h"
#include "frontend/response_writer.h"

namespace blink {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using std::chrono::milliseconds;

constexpr int kClientGone = 499;  // in the log alone: nobody is there to be told
// A refused request's body up to this is read, so that its connection can go on.
constexpr uint64_t kMaxUnwantedBytes = 64 * 1024;

HttpLimits limits_of(const FrontEndConfig& config) {
  return {config.max_header_bytes, config.max_headers, config.max_body_bytes};
}

uint64_t ns_since(Clock::time_point begin) {
  return static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - begin).count());
}

std::string text_of_time(uint32_t ms) {
  return ms % 1000 == 0 ? std::to_string(ms / 1000) + " s" : std::to_string(ms) + " ms";
}

int64_t unix_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

HttpSession::HttpSession(asio::ip::tcp::socket socket, HttpServer& server, std::string peer_key)
    : server_(server),
      peer_key_(std::move(peer_key)),
      connection_(std::move(socket), server.tls(), server.overflow()),
      parser_(limits_of(server.config())),
      signal_(connection_.executor()) {
  signal_.expires_at(asio::steady_timer::time_point::max());
  server_.add(this);
}

HttpSession::~HttpSession() {
  server_.count_body_bytes(-static_cast<int64_t>(num_counted_bytes_));
  server_.remove(this);
}

void HttpSession::start(std::string_view peer) {
  entry_.peer = peer;
  asio::co_spawn(
      connection_.executor(), [self = shared_from_this()] { return self->run(); }, asio::detached);
}

void HttpSession::stop() {
  is_stopping_ = true;
  // A request that is here already is answered: it may wait in the socket, or have been read while
  // the coroutine does not know yet. So the wait is ended, not the connection.
  if (is_idle_ && !connection_.has_unread_bytes()) cut();
}

// The generation has output.
void HttpSession::wake() {
  if (waits_for_ == nullptr || !send_directly()) resume();
}

void HttpSession::resume() {
  waits_for_ = nullptr;
  has_signal_ = true;
  signal_.cancel();
}

void HttpSession::expire(Clock::time_point now) {
  connection_.expire(now);
  if (is_generating_ && now >= generation_deadline_) {
    is_overdue_ = true;
    resume();
  }
}

void HttpSession::on_client_gone() {
  is_client_gone_ = true;
  resume();
}

asio::awaitable<void> HttpSession::run() {
  try {
    while (co_await serve_one() && !is_stopping_) {
    }
    if (connection_.has_failed_handshake()) server_.http_metrics().tls_failures.add();
    co_await connection_.end();
  } catch (const std::exception&) {
    // The socket failed outside a checked call, or memory is short: this connection is over, others
    // go on.
  }
  connection_.close();
}

// Reads and answers one request. False: the connection is to be closed.
asio::awaitable<bool> HttpSession::serve_one() {
  parser_.reset();
  is_idle_ = true;
  const auto& config = server_.config();
  const auto timeout = milliseconds(is_first_ ? config.header_timeout_ms : config.idle_timeout_ms);
  if (connection_.received().empty() && !co_await connection_.receive(Clock::now() + timeout)) {
    co_return false;
  }
  is_idle_ = false;
  is_first_ = false;
  begin_request();
  const bool is_answered = co_await read_request() && co_await answer();
  server_.count_body_bytes(-static_cast<int64_t>(num_counted_bytes_));
  num_counted_bytes_ = 0;
  log_request();
  co_return is_answered&& keeps_alive_;
}

void HttpSession::begin_request() {
  begun_at_ = Clock::now();
  route_ = Route::unknown;
  keeps_alive_ = true;
  is_head_judged_ = false;
  refusal_.reset();
  cors_headers_.clear();
  request_id_.clear();
  const auto peer = entry_.peer;
  entry_ = AccessLogEntry{};
  entry_.peer = peer;
  entry_.begun_at_ns = unix_ns();
}

// False: the connection is to be closed; what there was to say has been said.
asio::awaitable<bool> HttpSession::read_request() {
  const FrontEndConfig& config = server_.config();
  auto deadline = begun_at_ + milliseconds(config.header_timeout_ms);
  while (true) {
    std::string& received = connection_.received();
    received.erase(0, parser_.feed(received));
    if (parser_.has_head() && !is_head_judged_) {
      judge_head();
      deadline = Clock::now() + milliseconds(config.body_timeout_ms);
      const HttpRequest& head = parser_.request();
      const bool waits = !head.expect.empty() && head.version != 10;
      if (!parser_.is_complete() && parser_.fault() == HttpFault::none && refusal_ &&
          (waits || head.is_chunked || head.content_length > kMaxUnwantedBytes)) {
        keeps_alive_ = false;
        co_return true;
      }
      if (waits && !parser_.is_complete() && parser_.fault() == HttpFault::none) {
        connection_.to_send() = "HTTP/1.1 100 Continue\r\n\r\n";
        if (!co_await connection_.send(milliseconds(config.write_timeout_ms))) co_return false;
      }
    }
    if (parser_.fault() != HttpFault::none || !holds_body_limit()) {
      co_return co_await answer_read_failure();
    }
    if (parser_.is_complete()) co_return true;
    if (!co_await connection_.receive(deadline)) co_return co_await answer_read_failure();
  }
}

// The head is whole: everything that does not need the body.
void HttpSession::judge_head() {
  is_head_judged_ = true;
  const HttpRequest& request = parser_.request();
  const FrontEndConfig& config = server_.config();
  keeps_alive_ = request.keeps_alive && !is_stopping_;
  route_ = route_of_path(request.path);
  entry_.path = request.path;
  if (is_sane_request_id(request.request_id)) request_id_ = request.request_id;
  cors_headers_ = cors_headers(request.origin, config.cors_origins);
  const ApiKeys& keys = server_.api_keys();
  const std::string* key_name = keys.asks_for_key() ? keys.name_of(request.authorization) : nullptr;
  if (key_name != nullptr) entry_.key_name = *key_name;
  refusal_ = refusal_of_head(request, route_, key_name != nullptr || !keys.asks_for_key(),
                             config.cors_origins);
  if (connection_.lacks_tls()) {
    refusal_ = plain_http_error();
    keeps_alive_ = false;
  }
}

// Counts the body's bytes in the sum of all connections. False: the sum is over its limit.
bool HttpSession::holds_body_limit() {
  const size_t num_bytes = parser_.body().size();
  server_.count_body_bytes(static_cast<int64_t>(num_bytes - num_counted_bytes_));
  num_counted_bytes_ = num_bytes;
  return num_bytes <= kMaxUnwantedBytes || server_.holds_body_limit();
}

// Tells the client what was wrong with its request, if it can still hear it. Always ends the
// connection.
asio::awaitable<bool> HttpSession::answer_read_failure() {
  keeps_alive_ = false;
  const bool is_late = connection_.is_late();
  connection_.clear_late();  // there is something to say all the same
  if (connection_.lacks_tls() && (parser_.fault() != HttpFault::none || is_late)) {
    co_await send_error(plain_http_error());
  } else if (parser_.fault() != HttpFault::none) {
    const HttpFaultText text = text_of_fault(parser_.fault(), limits_of(server_.config()));
    co_await send_error(http_error(text.status, text.code, text.message));
  } else if (is_late && server_.is_stopping()) {
    co_await send_error(stopping_error());
  } else if (is_late) {
    const FrontEndConfig& config = server_.config();
    const char* part = parser_.has_head() ? "body" : "header";
    const uint32_t limit_ms =
        parser_.has_head() ? config.body_timeout_ms : config.header_timeout_ms;
    co_await send_error(http_error(408, "timeout",
                                   std::string("The request's ") + part + " took longer than " +
                                       text_of_time(limit_ms) + "."));
  } else if (num_counted_bytes_ > 0 && !server_.holds_body_limit()) {
    co_await send_error(retry_error(503, "body_memory", "Too many large requests at once."));
  } else {
    entry_.status = kClientGone;
  }
  co_return false;
}

asio::awaitable<bool> HttpSession::answer() {
  if (refusal_) {
    HttpResponse response = response_of(*refusal_);
    if (response.status == 405) {
      response.extra_headers = "Allow: " + std::string(allowed_methods(route_)) + "\r\n";
    }
    co_return co_await send(std::move(response));
  }
  if (parser_.request().method == HttpMethod::options) {
    const bool is_cors = !server_.config().cors_origins.empty();
    co_return co_await send(options_response(route_, is_cors));
  }
  if (route_ == Route::completions) co_return co_await answer_generation(Endpoint::completions);
  if (route_ == Route::chat_completions) {
    co_return co_await answer_generation(Endpoint::chat_completions);
  }
  co_return co_await send(server_.answer_get(route_, parser_.request().path));
}

asio::awaitable<bool> HttpSession::answer_generation(Endpoint endpoint) {
  GenerationPipeline& pipeline = server_.pipeline();
  const HttpServer::RequestSlot counted(server_);
  if (auto error = server_.refusal_of_load()) co_return co_await send_error(*error);
  server_.send_ready();
  const RequestLimits limits = pipeline.request_limits();
  auto parsed = parse_generation_request(endpoint, parser_.body(), limits);
  if (const auto* error = std::get_if<ApiError>(&parsed)) co_return co_await send_error(*error);
  auto& wanted = std::get<GenerationRequest>(parsed);
  if (!wanted.model.empty() && wanted.model != server_.config().model_name) {
    co_return co_await send_error(server_.unknown_model_error(wanted.model));
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
  if (auto error = server_.refusal_of_load()) co_return co_await send_error(*error);
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
      session.is_generating_ = false;
      if (!is_complete) generation.is_abort_requested.store(true, std::memory_order_relaxed);
      session.log_tokens(generation);
    }
  } guard{*this, *generation};
  generation->waiter = this;
  has_signal_ = true;  // the output may have come before the waiter was set
  is_generating_ = true;
  is_client_gone_ = is_overdue_ = false;
  generation_deadline_ = begun_at_ + milliseconds(server_.config().request_timeout_ms);
  bool is_first = true;
  while (true) {
    if (!co_await wait_for_output(is_first ? nullptr : generation.get())) {
      if (is_overdue_) co_return co_await send_overdue(is_first);
      if (is_first) entry_.status = kClientGone;
      co_return false;
    }
    if (!connection_.to_send().empty() &&  // what send_directly could not send
        !co_await connection_.send(milliseconds(server_.config().write_timeout_ms))) {
      co_return false;
    }
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
    if (is_complete) {
      entry_.is_complete = true;
      co_return parser_.request().version != 10;
    }
  }
}

// The request's time is over: a stream that has begun ends with the error.
asio::awaitable<bool> HttpSession::send_overdue(bool is_first) {
  const ApiError error = server_error(
      504, "timeout",
      "The request took longer than the " + text_of_time(server_.config().request_timeout_ms) +
          " that this server allows (--request-timeout); ask for fewer tokens.");
  if (is_first) co_return co_await send_error(error);
  keeps_alive_ = false;
  std::string events;
  ResponseWriter::append_error_events(error, events);
  entry_.is_complete = co_await send_chunk(events, false, true);
  co_return false;
}

// False: the client has gone, or its time is over. `stream`: what of it may be sent on meanwhile.
asio::awaitable<bool> HttpSession::wait_for_output(Generation* stream) {
  error_code ignored;
  if (!has_signal_ && !connection_.is_tls()) waits_for_ = stream;
  while (!has_signal_) {
    co_await signal_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
  waits_for_ = nullptr;
  has_signal_ = false;
  co_return !is_client_gone_ && !is_overdue_;
}

// Sends what a stream has without waking the coroutine that waits for it, which costs more than
// the send. False: it must be woken, as this was the end, or the socket did not take everything.
bool HttpSession::send_directly() {
  {
    const std::lock_guard lock(waits_for_->output_mutex);
    if (waits_for_->is_output_complete || waits_for_->failure) return false;
    written_.clear();
    std::swap(written_, waits_for_->output);
  }
  if (written_.empty()) return true;
  append_chunk(written_, false);
  entry_.num_sent_bytes += connection_.to_send().size();
  return connection_.send_now();
}

void HttpSession::append_chunk(const std::string& bytes, bool is_last) {
  std::string& out = connection_.to_send();
  const bool is_chunked = parser_.request().version != 10;
  if (is_chunked && !bytes.empty()) append_chunk_head(bytes.size(), out);
  out += bytes;
  if (is_chunked && !bytes.empty()) out += "\r\n";
  if (is_chunked && is_last) out += "0\r\n\r\n";
}

// One write for head, chunk framing and bytes.
asio::awaitable<bool> HttpSession::send_chunk(const std::string& bytes, bool is_first,
                                              bool is_last) {
  if (is_first) {
    append_stream_head(head_context(), connection_.to_send());
    server_.http_metrics().count_response(200);
    entry_.status = 200;
  }
  append_chunk(bytes, is_last);
  return send_bytes();
}

asio::awaitable<bool> HttpSession::send_error(const ApiError& error) {
  return send(response_of(error));
}

asio::awaitable<bool> HttpSession::send(HttpResponse response) {
  server_.http_metrics().count_response(response.status);
  entry_.status = response.status;
  std::string& out = connection_.to_send();
  append_head(response, head_context(), out);
  if (parser_.request().method != HttpMethod::head) out += response.body;
  entry_.is_complete = co_await send_bytes();
  co_return entry_.is_complete;
}

asio::awaitable<bool> HttpSession::send_bytes() {
  entry_.num_sent_bytes += connection_.to_send().size();
  return connection_.send(milliseconds(server_.config().write_timeout_ms));
}

HeadContext HttpSession::head_context() {
  if (request_id_.empty()) server_.make_request_id(request_id_);
  if (is_stopping_ || server_.is_stopping()) keeps_alive_ = false;
  return {parser_.request().version, keeps_alive_, request_id_, server_.date(), cors_headers_};
}

// What of a generation belongs into the log; its detokenizer may still be at work.
void HttpSession::log_tokens(const Generation& generation) {
  entry_.has_tokens = true;
  entry_.num_prompt_tokens = generation.num_prompt_tokens;
  entry_.num_output_tokens = generation.num_seen_tokens.load(std::memory_order_relaxed);
  entry_.ttft_ns = generation.ttft_ns.load(std::memory_order_relaxed);
}

void HttpSession::log_request() {
  AccessLog* log = server_.access_log();
  if (log == nullptr) return;
  if (request_id_.empty()) server_.make_request_id(request_id_);
  entry_.id = request_id_;
  entry_.method = parser_.has_head() ? name_of_method(parser_.request().method) : "-";
  entry_.e2e_ns = ns_since(begun_at_);
  entry_.num_received_bytes = parser_.body().size();
  log->add(entry_);
}

}  // namespace blink
