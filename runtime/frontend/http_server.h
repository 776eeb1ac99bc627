// Listens, owns the network thread, and keeps what its sessions share.
#ifndef BLINK_FRONTEND_HTTP_SERVER_H
#define BLINK_FRONTEND_HTTP_SERVER_H

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>

#include "frontend/access_log.h"
#include "frontend/api_keys.h"
#include "frontend/front_end_config.h"
#include "frontend/generation_pipeline.h"
#include "frontend/http_connection.h"
#include "frontend/http_entrance.h"
#include "frontend/http_message.h"
#include "frontend/http_metrics.h"
#include "frontend/http_routes.h"
#include "frontend/tls_channel.h"

namespace blink {

class HttpSession;

// Members belong to the network thread, but for those that say otherwise.
class HttpServer {
 public:
  // `entrance` was made of the same config. Listens at once: whoever connects waits for start().
  // Throws std::runtime_error.
  HttpServer(const FrontEndConfig& config, HttpEntrance entrance);
  ~HttpServer();

  // Any thread below: the owner's.
  // `pipeline` must outlive the server's stop().
  void start(GenerationPipeline& pipeline);
  // Refuses new generations and ends idle connections; running requests go on.
  void drain();
  // Answers whoever has connected by now, accepts no more, waits shortly for sessions to send what
  // they have, tells those whose request is not whole, ends the network thread.
  void stop();
  // Reads API keys and certificate again and opens the log anew; before start() and beside stop()
  // too. Throws std::runtime_error; what was there before stays then.
  void reload();
  uint16_t port() const { return port_; }
  // The pipeline has output. Cheap when the network thread is already on its way.
  void wake();

  // For sessions.
  const FrontEndConfig& config() const { return config_; }
  GenerationPipeline& pipeline() { return *pipeline_; }
  boost::asio::io_context& io() { return io_; }
  boost::asio::thread_pool& prepare_pool() { return prepare_pool_; }
  const ApiKeys& api_keys() const { return api_keys_; }
  std::shared_ptr<const TlsContext> tls() const { return tls_; }
  AccessLog* access_log() { return access_log_.get(); }
  HttpMetrics& http_metrics() { return http_metrics_; }
  std::span<char> overflow() { return overflow_; }
  bool is_stopping() const { return is_stopping_; }
  std::string_view date() const { return date_; }
  void make_request_id(std::string& out);
  void count_body_bytes(int64_t change) { num_body_bytes_ += change; }
  bool holds_body_limit() const {
    return num_body_bytes_ <= static_cast<int64_t>(config_.max_total_body_bytes);
  }
  // Why no generation may begin now.
  std::optional<ApiError> refusal_of_load() const;
  HttpResponse answer_get(Route route, std::string_view path);
  ApiError unknown_model_error(std::string_view name) const;
  // Sends on what generations have meanwhile. For a session about to compute for long: of many
  // requests that came at once each would otherwise delay the tokens of all who wait.
  void send_ready() {
    if (is_wake_posted_.load(std::memory_order_relaxed)) drain_ready();
  }
  void add(HttpSession* session) { sessions_.insert(session); }
  void remove(HttpSession* session);

  // Counts a generation from its body to its last byte.
  class RequestSlot {
   public:
    explicit RequestSlot(HttpServer& server) : server_(server) { ++server_.num_requests_; }
    ~RequestSlot() { --server_.num_requests_; }
    RequestSlot(const RequestSlot&) = delete;
    RequestSlot& operator=(const RequestSlot&) = delete;

   private:
    HttpServer& server_;
  };

 private:
  void accept_next();
  void accept_waiting();
  void wait_for_sessions() const;
  void take(boost::asio::ip::tcp::socket socket);
  bool takes_peer(const boost::asio::ip::address& address);
  void refuse(boost::asio::ip::tcp::socket socket);
  void drain_ready();
  void sweep();
  void find_gone_clients();
  HttpResponse health_response();
  HttpResponse models_response();
  HttpResponse model_response(std::string_view path);
  void run_on_network_thread(const std::function<void()>& work);

  const FrontEndConfig& config_;
  GenerationPipeline* pipeline_ = nullptr;
  HttpMetrics http_metrics_;
  std::unique_ptr<AccessLog> access_log_;
  ApiKeys api_keys_;
  std::shared_ptr<const TlsContext> tls_;
  std::vector<char> overflow_;
  std::unordered_set<HttpSession*> sessions_;  // outlives io_, which owns the sessions
  std::map<std::string, uint32_t> peers_;      // connections by address, where they are limited
  // Told that there are too many; they still say good-bye.
  std::vector<std::shared_ptr<HttpConnection>> refused_;
  std::vector<pollfd> polled_;
  std::vector<HttpSession*> polled_sessions_;
  boost::asio::io_context io_{1};
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer accept_pause_;
  boost::asio::steady_timer sweep_timer_;
  boost::asio::thread_pool prepare_pool_;
  uint16_t port_ = 0;
  int64_t started_at_s_ = 0;  // Unix time
  int64_t date_s_ = 0;        // Unix time of date_
  std::string date_;
  std::mt19937_64 random_;  // request ids
  int64_t num_body_bytes_ = 0;
  uint32_t num_requests_ = 0;
  bool is_stopping_ = false;
  std::atomic<bool> is_wake_posted_{false};
  std::mutex control_mutex_;  // guards thread_: what is posted to it runs before it ends
  std::thread thread_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_SERVER_H
