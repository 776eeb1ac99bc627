#include "frontend/http_server.h"

#include <cstring>
#include <ctime>
#include <future>
#include <stdexcept>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>

#include "frontend/chat_page.h"
#include "frontend/http_session.h"
#include "frontend/open_api.h"
#include "frontend/urgent_thread.h"
#include "transport/held_address.h"

namespace blink {
namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;
using boost::system::error_code;

constexpr auto kAcceptPause = std::chrono::milliseconds(10);
// For last bytes, when stopping. Looks and not a deadline: a pause of the machine takes none away.
constexpr int kNumSendLooks = 250;
constexpr auto kSendLookInterval = std::chrono::milliseconds(2);
// How late a deadline or a client's leave may be noticed; one pass costs a look at each session.
constexpr auto kSweepInterval = std::chrono::milliseconds(50);
constexpr size_t kOverflowBytes = 64 * 1024;
constexpr size_t kMaxRefused = 64;  // connections at once; more are closed without a good-bye

constexpr std::string_view kPageHeaders =
    "X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'\r\n";

// A household of IPv6 has a /64 at least, so one address says nothing there.
std::string peer_key_of(const asio::ip::address& address) {
  if (!address.is_v6()) return address.to_string();
  auto bytes = address.to_v6().to_bytes();
  std::fill(bytes.begin() + 8, bytes.end(), static_cast<unsigned char>(0));
  return asio::ip::address_v6(bytes).to_string();
}

}  // namespace

HttpServer::HttpServer(const FrontEndConfig& config, HttpEntrance entrance)
    : config_(config),
      api_keys_(std::move(entrance.api_keys)),
      tls_(std::move(entrance.tls)),
      overflow_(kOverflowBytes),
      acceptor_(io_),
      accept_pause_(io_),
      sweep_timer_(io_),
      prepare_pool_(config.num_prepare_threads),
      port_(entrance.port),
      started_at_s_(std::time(nullptr)),
      random_(std::random_device{}()) {
  if (const int error = listen_on_held(entrance.listener, SOMAXCONN); error != 0) {
    throw std::runtime_error("cannot listen on " + config.host + ":" + std::to_string(port_) +
                             ": " + std::strerror(error));
  }
  acceptor_.assign(entrance.is_ipv6 ? tcp::v6() : tcp::v4(), entrance.listener.release());
  if (entrance.access_log.is_open()) {
    access_log_ = std::make_unique<AccessLog>(config.access_log, std::move(entrance.access_log),
                                              http_metrics_.access_log_dropped);
  }
}

HttpServer::~HttpServer() { stop(); }

void HttpServer::start(GenerationPipeline& pipeline) {
  const std::lock_guard lock(control_mutex_);
  pipeline_ = &pipeline;
  accept_next();
  sweep();
  thread_ = std::thread([this] {
    become_urgent_thread("blink-network");
    io_.run();
  });
}

void HttpServer::run_on_network_thread(const std::function<void()>& work) {
  std::promise<void> done;
  asio::post(io_, [&] {
    work();
    done.set_value();
  });
  done.get_future().wait();
}

void HttpServer::drain() {
  run_on_network_thread([this] {
    is_stopping_ = true;
    const auto sessions = sessions_;  // stop() may remove some
    for (HttpSession* session : sessions) session->stop();
  });
}

void HttpServer::stop() {
  const std::lock_guard lock(control_mutex_);
  if (!thread_.joinable()) return;
  run_on_network_thread([this] {
    accept_waiting();  // closing would reset them
    error_code ignored;
    acceptor_.close(ignored);
    accept_pause_.cancel();
  });
  prepare_pool_.join();
  wait_for_sessions();
  run_on_network_thread([this] {
    for (HttpSession* session : sessions_) session->cut();  // wakes coroutines, as sweep() does
  });
  wait_for_sessions();
  io_.stop();
  thread_.join();
}

void HttpServer::wait_for_sessions() const {
  const std::atomic<int64_t>& num_open = pipeline_->metrics().connections_open;
  for (int i = 0; i < kNumSendLooks && num_open.load(std::memory_order_relaxed) > 0; ++i) {
    std::this_thread::sleep_for(kSendLookInterval);
  }
}

void HttpServer::reload() {
  ApiKeys keys = ApiKeys::load(config_.api_keys, config_.api_key_file);
  std::shared_ptr<const TlsContext> tls = load_tls(config_);
  if (access_log_) access_log_->reopen();
  // Connections keep the certificate they began with; requests whose head is read keep their key.
  const auto take = [&] {
    std::swap(api_keys_, keys);
    std::swap(tls_, tls);
    http_metrics_.reloads.add();
  };
  const std::lock_guard lock(control_mutex_);
  if (thread_.joinable()) {
    run_on_network_thread(take);
  } else {
    take();
  }
}

void HttpServer::wake() {
  // Acquire-release: a wake-up that was posted but has not run yet will see what was pushed before
  // this.
  if (is_wake_posted_.exchange(true, std::memory_order_acq_rel)) return;
  asio::post(io_, [this] { drain_ready(); });
}

void HttpServer::drain_ready() {
  is_wake_posted_.exchange(false, std::memory_order_acq_rel);  // before the queue is looked at
  std::shared_ptr<Generation> generation;
  while (pipeline_->ready().pop(generation)) {
    // Before the output is taken: what is appended later queues it again. Pairs with publish's
    // exchange.
    generation->is_queued.exchange(false, std::memory_order_acq_rel);
    if (generation->waiter != nullptr) generation->waiter->wake();
  }
}

void HttpServer::remove(HttpSession* session) {
  sessions_.erase(session);
  pipeline_->metrics().connections_open.fetch_sub(1, std::memory_order_relaxed);
  if (session->peer_key().empty()) return;
  const auto peer = peers_.find(session->peer_key());
  if (--peer->second == 0) peers_.erase(peer);
}

void HttpServer::accept_next() {
  acceptor_.async_accept([this](error_code code, tcp::socket socket) {
    if (code == asio::error::operation_aborted || !acceptor_.is_open()) return;
    if (code) {
      // Out of file descriptors, most likely: give the others time to end.
      accept_pause_.expires_after(kAcceptPause);
      accept_pause_.async_wait([this](error_code wait_code) {
        if (!wait_code) accept_next();
      });
      return;
    }
    take(std::move(socket));
    accept_next();
  });
}

// Those who connected before this; more than a full queue of them are none that came before.
void HttpServer::accept_waiting() {
  error_code code;
  acceptor_.non_blocking(true, code);
  for (int i = 0; i < SOMAXCONN && !code; ++i) {
    tcp::socket socket(io_);
    acceptor_.accept(socket, code);
    if (!code) take(std::move(socket));
  }
}

void HttpServer::take(tcp::socket socket) {
  Metrics& metrics = pipeline_->metrics();
  error_code code;
  const auto endpoint = socket.remote_endpoint(code);
  if (code) return;  // gone again
  if (sessions_.size() >= config_.max_connections) {
    metrics.connections_refused.add();
    return refuse(std::move(socket));
  }
  std::string peer_key;
  if (config_.max_connections_per_address > 0) {
    peer_key = peer_key_of(endpoint.address());
    uint32_t& count = peers_[peer_key];
    if (count >= config_.max_connections_per_address) {
      http_metrics_.connections_over_share.add();
      return refuse(std::move(socket));
    }
    ++count;
  }
  metrics.connections_accepted.add();
  metrics.connections_open.fetch_add(1, std::memory_order_relaxed);
  socket.set_option(tcp::no_delay(true), code);
  std::make_shared<HttpSession>(std::move(socket), *this, std::move(peer_key))
      ->start(endpoint.address().to_string());
}

// Says why, if the socket takes it at once, and closes. Nobody speaks TLS yet at this point. Most
// clients have begun to send their request, so that a hard close would hide the answer from them.
void HttpServer::refuse(tcp::socket socket) {
  if (tls_) return;
  const HttpResponse response = response_of(
      retry_error(503, "too_many_connections",
                  "Too many connections (--max-connections, --max-connections-per-address)."));
  std::string id;
  make_request_id(id);
  std::string bytes;
  append_head(response, {.keeps_alive = false, .request_id = id, .date = date_}, bytes);
  bytes += response.body;
  http_metrics_.count_response(503);
  error_code ignored;
  socket.non_blocking(true, ignored);
  socket.write_some(asio::buffer(bytes), ignored);
  if (refused_.size() >= kMaxRefused) return;
  refused_.push_back(std::make_shared<HttpConnection>(std::move(socket), nullptr, overflow_));
  asio::co_spawn(io_, [connection = refused_.back()] { return connection->end(); }, asio::detached);
}

// Deadlines, clients that left, the date.
void HttpServer::sweep() {
  const Clock::time_point now = Clock::now();
  const int64_t unix_s = std::time(nullptr);
  if (unix_s != date_s_) {
    date_s_ = unix_s;
    date_ = date_text(unix_s);
  }
  polled_.clear();
  polled_sessions_.clear();
  for (HttpSession* session : sessions_) {
    session->expire(now);  // wakes coroutines, which run later: the set does not change here
    if (session->is_generating()) {
      polled_.push_back({session->native_handle(), POLLRDHUP, 0});
      polled_sessions_.push_back(session);
    }
  }
  find_gone_clients();
  for (const auto& connection : refused_) connection->expire(now);
  std::erase_if(refused_, [](const auto& connection) { return !connection->is_open(); });
  sweep_timer_.expires_after(kSweepInterval);
  sweep_timer_.async_wait([this](error_code code) {
    if (!code) sweep();
  });
}

// One call for all sockets. A request that waits in the socket (pipelining) does not hide the end
// behind it.
void HttpServer::find_gone_clients() {
  if (polled_.empty() || ::poll(polled_.data(), polled_.size(), 0) <= 0) return;
  for (size_t i = 0; i < polled_.size(); ++i) {
    if (polled_[i].revents != 0) polled_sessions_[i]->on_client_gone();
  }
}

// 128 random bits, so that no two servers make the same.
void HttpServer::make_request_id(std::string& out) {
  static constexpr char kHex[] = "0123456789abcdef";
  out = "req-";
  for (int word = 0; word < 2; ++word) {
    uint64_t bits = random_();
    for (int i = 0; i < 16; ++i, bits >>= 4) out += kHex[bits & 15];
  }
}

std::optional<ApiError> HttpServer::refusal_of_load() const {
  if (is_stopping_) return stopping_error();
  if (num_requests_ <= config_.max_requests) return std::nullopt;
  return rate_limit_error("too_many_requests", "Too many requests at a time; try again soon.");
}

HttpResponse HttpServer::answer_get(Route route, std::string_view path) {
  HttpResponse response;
  switch (route) {
    case Route::health:
      return health_response();
    case Route::models:
      return models_response();
    case Route::model:
      return model_response(path);
    case Route::metrics:
      response.content_type = "text/plain; version=0.0.4; charset=utf-8";
      response.body = pipeline_->prometheus_text();
      http_metrics_.append_text(response.body);
      return response;
    case Route::open_api:
      response.body = open_api();
      return response;
    case Route::chat_page:
      if (!config_.serves_chat_page) break;
      response.content_type = "text/html; charset=utf-8";
      response.body = chat_page();
      response.extra_headers = kPageHeaders;
      return response;
    case Route::unknown:
    case Route::server:
    case Route::completions:
    case Route::chat_completions:
      break;
  }
  return response_of(http_error(404, "not_found", "No such path: " + printable(path)));
}

HttpResponse HttpServer::health_response() {
  const Health health = pipeline_->health();
  HttpResponse response;
  response.status = health == Health::serving && !is_stopping_ ? 200 : 503;
  response.body =
      std::string("{\"status\":\"") + (is_stopping_ ? "stopping" : health_name(health)) + "\"}";
  return response;
}

HttpResponse HttpServer::models_response() {
  HttpResponse response;
  std::string& body = response.body;
  body = "{\"object\":\"list\",\"data\":[{\"id\":\"";
  append_json_escaped(config_.model_name, body);
  body += "\",\"object\":\"model\",\"created\":" + std::to_string(started_at_s_);
  body += ",\"owned_by\":\"blink\",\"max_model_len\":";
  body += std::to_string(pipeline_->ring_sizes().max_seqlen) + "}]}";
  return response;
}

ApiError HttpServer::unknown_model_error(std::string_view name) const {
  return http_error(404, "model_not_found",
                    "The model '" + shortened(name) + "' does not exist; this server has '" +
                        config_.model_name + "'.");
}

HttpResponse HttpServer::model_response(std::string_view path) {
  constexpr std::string_view kPrefix = "/v1/models/";
  const std::string name =
      percent_decoded(path.substr(kPrefix.size()));  // "owner/model" comes as owner%2Fmodel
  if (name != config_.model_name) {
    return response_of(unknown_model_error(printable(name)));
  }
  HttpResponse response = models_response();  // {"object":"list","data":[{...}]}
  const size_t begin = response.body.find('[') + 1;
  response.body = response.body.substr(begin, response.body.rfind(']') - begin);
  return response;
}

}  // namespace blink
