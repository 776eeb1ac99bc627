#include "frontend/http_server.h"

#include <sys/prctl.h>

#include <ctime>
#include <future>
#include <stdexcept>

#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>

#include "frontend/http_session.h"

namespace blink {
namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;

constexpr auto kAcceptPause = std::chrono::milliseconds(10);
constexpr auto kSendPatience = std::chrono::milliseconds(500);  // for last bytes, when stopping

}  // namespace

HttpServer::HttpServer(const FrontEndConfig& config)
    : config_(config),
      acceptor_(io_),
      accept_pause_(io_),
      prepare_pool_(config.num_prepare_threads) {
  const std::string address = config.host + ":" + std::to_string(config.port);
  try {
    const auto host =
        asio::ip::make_address(config.host == "localhost" ? "127.0.0.1" : config.host);
    const tcp::endpoint endpoint(host, config.port);
    acceptor_.open(endpoint.protocol());
    acceptor_.set_option(asio::socket_base::reuse_address(true));
    acceptor_.bind(endpoint);
    acceptor_.listen(asio::socket_base::max_listen_connections);
    port_ = acceptor_.local_endpoint().port();
  } catch (const boost::system::system_error& error) {
    throw std::runtime_error("cannot listen on " + address + ": " + error.code().message());
  }
  started_at_s_ = std::time(nullptr);
}

HttpServer::~HttpServer() { stop(); }

void HttpServer::start(GenerationPipeline& pipeline) {
  pipeline_ = &pipeline;
  accept_next();
  thread_ = std::thread([this] {
    ::prctl(PR_SET_NAME, "blink-network");
    io_.run();
  });
}

void HttpServer::stop_accepting() {
  std::promise<void> done;
  asio::post(io_, [this, &done] {
    is_stopping_ = true;
    boost::system::error_code ignored;
    acceptor_.close(ignored);
    accept_pause_.cancel();
    const auto sessions = sessions_;  // stop() may remove some
    for (HttpSession* session : sessions) session->stop();
    done.set_value();
  });
  done.get_future().wait();
}

void HttpServer::stop() {
  if (!thread_.joinable()) return;
  prepare_pool_.join();
  const auto deadline = Clock::now() + kSendPatience;
  const std::atomic<int64_t>& num_open = pipeline_->metrics().connections_open;
  while (num_open.load(std::memory_order_relaxed) > 0 && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  io_.stop();
  thread_.join();
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
}

void HttpServer::accept_next() {
  acceptor_.async_accept([this](boost::system::error_code code, tcp::socket socket) {
    if (code == asio::error::operation_aborted || !acceptor_.is_open()) return;
    Metrics& metrics = pipeline_->metrics();
    if (!code && sessions_.size() >= config_.max_connections) {
      metrics.connections_refused.add();
      static constexpr std::string_view kFull =
          "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n"
          "Connection: close\r\n\r\n";
      boost::system::error_code ignored;
      socket.non_blocking(true, ignored);
      socket.write_some(asio::buffer(kFull), ignored);
    } else if (!code) {
      metrics.connections_accepted.add();
      metrics.connections_open.fetch_add(1, std::memory_order_relaxed);
      boost::system::error_code ignored;
      socket.set_option(tcp::no_delay(true), ignored);
      std::make_shared<HttpSession>(std::move(socket), *this)->start();
    }
    if (code) {
      // Out of file descriptors, most likely: give the others time to end.
      accept_pause_.expires_after(kAcceptPause);
      accept_pause_.async_wait([this](boost::system::error_code wait_code) {
        if (!wait_code) accept_next();
      });
      return;
    }
    accept_next();
  });
}

}  // namespace blink
