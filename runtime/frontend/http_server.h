// Listens, owns the network thread, and keeps what its sessions share.
#ifndef BLINK_FRONTEND_HTTP_SERVER_H
#define BLINK_FRONTEND_HTTP_SERVER_H

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <unordered_set>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>

#include "frontend/front_end_config.h"
#include "frontend/generation_pipeline.h"

namespace blink {

class HttpSession;

// All members but stop() and port() belong to the network thread.
class HttpServer {
 public:
  // Binds at once, so that port() is known. Throws std::runtime_error naming the address.
  explicit HttpServer(const FrontEndConfig& config);
  ~HttpServer();

  // `pipeline` must outlive the server's stop().
  void start(GenerationPipeline& pipeline);
  // Refuses new connections and requests; running ones may end within `patience`.
  void stop_accepting();
  // Waits shortly for sessions to send what they have, then ends the network thread.
  void stop();

  uint16_t port() const { return port_; }
  // Any thread: the pipeline has output. Cheap when the network thread is already on its way.
  void wake();

  // For sessions.
  const FrontEndConfig& config() const { return config_; }
  GenerationPipeline& pipeline() { return *pipeline_; }
  boost::asio::io_context& io() { return io_; }
  boost::asio::thread_pool& prepare_pool() { return prepare_pool_; }
  bool is_stopping() const { return is_stopping_; }
  int64_t started_at_s() const { return started_at_s_; }
  void add(HttpSession* session) { sessions_.insert(session); }
  void remove(HttpSession* session);

 private:
  void accept_next();
  void drain_ready();

  const FrontEndConfig& config_;
  GenerationPipeline* pipeline_ = nullptr;
  std::unordered_set<HttpSession*> sessions_;  // outlives io_, which owns the sessions
  boost::asio::io_context io_{1};
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer accept_pause_;
  boost::asio::thread_pool prepare_pool_;
  uint16_t port_ = 0;
  int64_t started_at_s_ = 0;  // Unix time
  bool is_stopping_ = false;
  std::atomic<bool> is_wake_posted_{false};
  std::thread thread_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_SERVER_H
