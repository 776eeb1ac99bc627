// The ring's end of verbs links: answers bootstraps, keeps a queue pair per front end.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "transport/tcp_socket.h"
#include "transport/verbs.h"
#include "transport/verbs_device.h"

namespace blink {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRingAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

// A connection, from accept to its end.
struct Connection {
  Fd socket;
  std::string peer;
  Clock::time_point deadline;  // for hello, then for ready
  std::array<std::byte, sizeof(BootstrapHello)> bytes;
  size_t num_received = 0;
  std::unique_ptr<QueuePair> queue_pair;  // once the hello was accepted
  uint64_t client_id = 0;
  uint32_t front_end_index = 0;
  bool is_ready = false;  // established; from now on its socket only tells that it lives
};

struct Place final : public VerbsPlace {
  explicit Place(const VerbsOwnerConfig& given)
      : config(given),
        listener(tcp_hold(given.host, given.port)),
        device(given.device, tcp_local_ipv4(listener)) {}

  VerbsOwnerConfig config;
  Fd listener;
  VerbsDevice device;
};

class Owner final : public VerbsOwner {
 public:
  Owner(const VerbsRingMemory& ring, std::unique_ptr<Place> place)
      : place_(std::move(place)),
        config_(place_->config),
        listener_(place_->listener),
        device_(place_->device),
        header_(ring.header),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        ring_mr_(register_ring(ring)),
        ring_address_(reinterpret_cast<uint64_t>(ring.address)) {
    check_ring_header(header_, ring.num_bytes);
    tcp_listen(listener_);
    thread_ = std::thread([this] { run(); });
  }

  ~Owner() override {
    is_stopping_.store(true, std::memory_order_relaxed);
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
    thread_.join();
  }

  uint16_t port() const override { return tcp_local_port(listener_); }
  std::string device() const override { return device_.name(); }
  uint64_t num_refused() const override { return num_refused_.load(std::memory_order_relaxed); }

  std::vector<VerbsSessionInfo> sessions() const override {
    const std::lock_guard lock(mutex_);
    return sessions_;
  }

 private:
  VerbsHandle<ibv_mr> register_ring(const VerbsRingMemory& ring) const {
    if (ring.dmabuf_fd < 0)
      return device_.register_memory(ring.address, ring.num_bytes, kRingAccess);
    return device_.register_dmabuf(ring.dmabuf_fd, ring.dmabuf_offset, ring.num_bytes,
                                   reinterpret_cast<uint64_t>(ring.address), kRingAccess);
  }

  void run() {
    while (!is_stopping_.load(std::memory_order_relaxed)) {
      wait();
      accept_new();
      for (Connection& connection : connections_) {
        if (connection.socket.is_open() && !serve(connection)) connection.socket.reset();
      }
      const size_t before = connections_.size();
      std::erase_if(connections_, [](const Connection& c) { return !c.socket.is_open(); });
      if (connections_.size() != before || has_changed_) publish_sessions();
      has_changed_ = false;
    }
  }

  // Sleeps until something comes; wakes for deadlines only while a bootstrap is under way.
  void wait() {
    std::vector<pollfd> entries = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    bool has_deadline = false;
    for (const Connection& connection : connections_) {
      entries.push_back({connection.socket.get(), POLLIN, 0});
      has_deadline |= !connection.is_ready;
    }
    (void)::poll(entries.data(), entries.size(), has_deadline ? 100 : -1);
  }

  void accept_new() {
    for (;;) {
      Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.is_open()) return;
      tcp_watch_peer(socket);
      const auto pending = std::count_if(connections_.begin(), connections_.end(),
                                         [](const Connection& c) { return !c.is_ready; });
      if (static_cast<uint32_t>(pending) >= config_.max_pending) {
        refuse(socket, Refusal::busy, "too many connections at once");
        continue;
      }
      Connection& connection = connections_.emplace_back();
      connection.peer = tcp_peer_name(socket);
      connection.socket = std::move(socket);
      connection.deadline = Clock::now() + config_.bootstrap_timeout;
    }
  }

  // False: the connection is over.
  bool serve(Connection& connection) {
    if (connection.is_ready) return !tcp_is_closed(connection.socket);
    const size_t num_wanted =
        connection.queue_pair == nullptr ? sizeof(BootstrapHello) : sizeof(BootstrapReady);
    while (connection.num_received < num_wanted) {
      const ssize_t count =
          ::recv(connection.socket.get(), connection.bytes.data() + connection.num_received,
                 num_wanted - connection.num_received, MSG_DONTWAIT);
      if (count == 0) return false;
      if (count < 0) {
        if (errno != EAGAIN && errno != EINTR) return false;
        if (Clock::now() < connection.deadline) return true;
        return refuse(connection.socket, Refusal::malformed, "no complete message in time");
      }
      connection.num_received += static_cast<size_t>(count);
      // A stranger is told at once, not when it has said as much as a hello.
      if (!has_valid_prefix(connection, num_wanted)) return false;
    }
    connection.num_received = 0;
    if (connection.queue_pair == nullptr) return answer_hello(connection);
    connection.is_ready = true;
    has_changed_ = true;
    return true;
  }

  bool has_valid_prefix(const Connection& connection, size_t num_wanted) {
    if (connection.num_received < sizeof(BootstrapPrefix)) return true;
    BootstrapPrefix prefix;
    std::memcpy(&prefix, connection.bytes.data(), sizeof(prefix));
    const std::string why = check_prefix(prefix, num_wanted);
    return why.empty() || refuse(connection.socket, Refusal::malformed, why);
  }

  bool answer_hello(Connection& connection) {
    BootstrapHello hello;
    std::memcpy(&hello, connection.bytes.data(), sizeof(hello));
    std::string why;
    const Refusal refusal = check_hello(hello, header_, why);
    if (refusal != Refusal::none) return refuse(connection.socket, refusal, why);
    for (Connection& other : connections_) {
      if (other.queue_pair == nullptr || other.front_end_index != hello.front_end_index) continue;
      if (!other.socket.is_open()) continue;
      // The same process again: its old link broke and it knew before we did.
      if (other.client_id == hello.client_id && hello.client_id != 0) {
        other.queue_pair.reset();
        other.socket.reset();
        continue;
      }
      return refuse(connection.socket, Refusal::slot_range,
                    "front end " + std::to_string(hello.front_end_index) + " is " + other.peer +
                        ", which is still connected; choose another --front-end");
    }
    BootstrapWelcome welcome{};
    fill_welcome(welcome, header_, hello.front_end_index);
    welcome.ring_address = ring_address_;
    welcome.rkey = ring_mr_->rkey;
    try {
      connection.queue_pair = std::make_unique<QueuePair>(device_, 1, 0, kRingAccess);
      connection.queue_pair->connect(hello.queue_pair);
    } catch (const RingError& error) {
      return refuse(connection.socket, Refusal::device, error.what());
    }
    welcome.queue_pair = connection.queue_pair->address();
    connection.client_id = hello.client_id;
    connection.front_end_index = hello.front_end_index;
    connection.deadline = Clock::now() + config_.bootstrap_timeout;
    return send(connection.socket, welcome);
  }

  // Always false, so that callers end the connection with it.
  bool refuse(const Fd& socket, Refusal refusal, const std::string& why) {
    num_refused_.fetch_add(1, std::memory_order_relaxed);
    (void)send(socket, refusing_welcome(refusal, why));
    ::shutdown(socket.get(), SHUT_WR);
    return false;
  }

  // A welcome fits an empty socket buffer; whoever leaves no room for it is dropped.
  static bool send(const Fd& socket, const BootstrapWelcome& welcome) {
    return ::send(socket.get(), &welcome, sizeof(welcome), MSG_NOSIGNAL | MSG_DONTWAIT) ==
           static_cast<ssize_t>(sizeof(welcome));
  }

  void publish_sessions() {
    const std::lock_guard lock(mutex_);
    sessions_.clear();
    for (const Connection& connection : connections_) {
      if (connection.is_ready) sessions_.push_back({connection.front_end_index, connection.peer});
    }
  }

  std::unique_ptr<Place> place_;
  const VerbsOwnerConfig& config_;
  const Fd& listener_;
  const VerbsDevice& device_;
  blink_ring_header header_;
  Fd wake_;
  VerbsHandle<ibv_mr> ring_mr_;
  uint64_t ring_address_;
  std::vector<Connection> connections_;  // the thread's own; queue pairs go before ring_mr_
  bool has_changed_ = false;
  mutable std::mutex mutex_;  // guards sessions_
  std::vector<VerbsSessionInfo> sessions_;
  std::atomic<uint64_t> num_refused_{0};  // relaxed: a count
  std::atomic<bool> is_stopping_{false};  // relaxed: the eventfd carries the order
  std::thread thread_;
};

}  // namespace

std::unique_ptr<VerbsPlace> hold_verbs_place(const VerbsOwnerConfig& config) {
  return std::make_unique<Place>(config);
}

std::unique_ptr<VerbsOwner> serve_verbs(const VerbsRingMemory& ring,
                                        std::unique_ptr<VerbsPlace> place) {
  // There is no other kind of place.
  return std::make_unique<Owner>(ring,
                                 std::unique_ptr<Place>(static_cast<Place*>(place.release())));
}

std::unique_ptr<VerbsOwner> serve_verbs(const VerbsRingMemory& ring,
                                        const VerbsOwnerConfig& config) {
  return serve_verbs(ring, hold_verbs_place(config));
}

}  // namespace blink
