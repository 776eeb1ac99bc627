// What clients and operators see while the HTTP server stops.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

#include "byte_codec.h"
#include "fault_rig.h"
#include "frontend/http_connection.h"
#include "frontend/http_server.h"

namespace blink::testing {
namespace {

namespace asio = boost::asio;

constexpr std::string_view kGetHealth = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
constexpr std::string_view kStopping = "{\"status\":\"stopping\"}";

// An HTTP server over a ring that nobody owns.
class Served {
 public:
  explicit Served(FrontEndConfig config = Rig::defaults().config)
      : config_(std::move(config)),
        ring_(Rig::defaults().sizes),
        pipeline_(
            config_, connect_mapped(ring_.memory.get(), ring_.num_bytes),
            std::make_shared<ByteCodec>(), [](const std::string&) { return std::string("chat"); },
            [this] { server_.wake(); }),
        server_(config_, HttpEntrance(config_)) {
    pipeline_.start();
    server_.start(pipeline_);
  }
  ~Served() { pipeline_.stop(std::chrono::milliseconds(0)); }

  HttpServer& server() { return server_; }
  // Once the server knows of them, not only its kernel.
  void wait_for_connections(int64_t count) {
    wait_for([&] { return pipeline_.metrics().connections_open == count; }, "connections");
  }
  void stop() {
    server_.drain();
    server_.stop();
  }

 private:
  FrontEndConfig config_;
  ZeroedRing ring_;
  GenerationPipeline pipeline_;
  HttpServer server_;
};

// Nothing happens on the network thread in this object's life.
class Standstill {
 public:
  explicit Standstill(HttpServer& server) {
    asio::post(server.io(), [this] {
      has_begun_ = true;
      while (!is_over_) std::this_thread::yield();
      has_ended_ = true;
    });
    wait_for([this] { return has_begun_.load(); }, "the network thread");
  }
  ~Standstill() {
    is_over_ = true;
    while (!has_ended_) std::this_thread::yield();
  }

 private:
  std::atomic<bool> has_begun_{false};
  std::atomic<bool> is_over_{false};
  std::atomic<bool> has_ended_{false};
};

// A thread that has begun `work` and waits for somebody in it: here, for the network thread.
class Waiting {
 public:
  explicit Waiting(std::function<void()> work) {
    thread_ = std::thread([this, work = std::move(work)] {
      id_ = ::syscall(SYS_gettid);
      work();
    });
    wait_for([this] { return id_ != 0 && is_asleep(); }, "a thread to wait");
  }
  ~Waiting() { thread_.join(); }

 private:
  bool is_asleep() const {
    std::ifstream file("/proc/self/task/" + std::to_string(id_) + "/stat");
    std::string stat;
    if (!std::getline(file, stat)) return true;  // it has ended
    return stat.substr(stat.rfind(')') + 1).starts_with(" S");
  }

  std::atomic<long> id_{0};
  std::thread thread_;
};

// The bug: it was on its way from the kernel to an idle session, which closed its connection.
TEST(a_request_that_came_before_the_drain_is_answered) {
  Served served;
  Socket socket(served.server().port());
  served.wait_for_connections(1);
  {
    std::optional<Standstill> standstill(served.server());
    socket.send(kGetHealth);
    const Waiting drain([&] { served.server().drain(); });
    standstill.reset();
  }
  const std::string answer = socket.receive_response();
  CHECK(answer.ends_with(kStopping));
  CHECK(answer.find("Connection: close") != std::string::npos);
  CHECK_EQUAL(socket.receive(1), std::string());
}

// The bug: the session had read it, but was told so only after it had closed the connection.
TEST(a_request_that_comes_just_before_the_drain_is_answered) {
  for (int round = 0; round < 200; ++round) {
    Served served;
    Socket socket(served.server().port());
    socket.send(kGetHealth);
    served.wait_for_connections(1);
    served.server().drain();
    CHECK(socket.receive_response().starts_with("HTTP/1.1 503 "));
  }
}

TEST(an_idle_connection_ends_with_the_drain) {
  Served served;
  Socket socket(served.server().port());
  served.wait_for_connections(1);
  served.server().drain();
  CHECK_EQUAL(socket.receive(1), std::string());
}

// The bug: it was connected, but not accepted yet, and reset when the listening socket was closed.
TEST(a_connection_that_came_before_the_stop_is_answered) {
  Served served;
  served.server().drain();
  std::optional<Standstill> standstill(served.server());
  std::vector<std::unique_ptr<Socket>> sockets;
  for (int i = 0; i < 3; ++i) {
    sockets.push_back(std::make_unique<Socket>(served.server().port()));
    sockets.back()->send(kGetHealth);
  }
  const Waiting stop([&] { served.server().stop(); });
  standstill.reset();
  for (const auto& socket : sockets) CHECK(socket->receive_response().ends_with(kStopping));
}

std::string whole_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The bug: its connection was closed without a word, and the access log had none of it either.
TEST(a_client_in_the_middle_of_its_request_hears_of_the_stop) {
  const std::string request = completion("hello", 6, true);
  for (const size_t size : {size_t{1}, size_t{20}, request.size() - 1}) {
    FrontEndConfig config = Rig::defaults().config;
    config.access_log = "/tmp/blink-stop-test-" + std::to_string(::getpid());
    {
      Served served(config);
      Socket socket(served.server().port());
      socket.send(request.substr(0, size));
      served.wait_for_connections(1);
      const Waiting stop([&] { served.stop(); });
      const std::string answer = socket.receive_response();
      CHECK(answer.starts_with("HTTP/1.1 503 "));
      CHECK(answer.find("\"code\":\"stopping\"") != std::string::npos);
    }
    const std::string log = whole_file(config.access_log);
    std::remove(config.access_log.c_str());
    CHECK(log.find("\"status\":503") != std::string::npos);
  }
}

// The bug: the network thread ended without having looked at what it was asked for, and whoever
// asked waited for ever.
TEST(files_are_read_again_beside_a_stop) {
  for (int round = 0; round < 200; ++round) {
    Served served;
    std::atomic<bool> is_stopped{false};
    std::thread operators([&] {
      while (!is_stopped) served.server().reload();
    });
    served.stop();
    is_stopped = true;
    operators.join();
  }
}

// The bug: the deadline of the read, whose bytes were here, cut off an answer that the socket did
// not take at once.
TEST(a_request_that_came_with_its_deadline_is_answered_whole) {
  asio::io_context io(1);
  asio::ip::tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), 0});
  Socket client(acceptor.local_endpoint().port());
  asio::ip::tcp::socket socket = acceptor.accept();
  client.send("request");
  wait_for([&] { return socket.available() == 7; }, "bytes");
  std::vector<char> overflow(4096);
  HttpConnection connection(std::move(socket), nullptr, overflow);
  connection.to_send() = std::string(64 << 20, 'x');  // more than the kernel keeps
  const size_t num_bytes = connection.to_send().size();
  bool is_received = false;
  bool is_sent = false;
  asio::co_spawn(
      io,
      [&]() -> asio::awaitable<void> {
        is_received = co_await connection.receive(Clock::now());
        is_sent = co_await connection.send(std::chrono::hours(1));
        connection.close();
      },
      asio::detached);
  io.run_one();  // has read, and does not know yet
  CHECK(!is_received);
  connection.expire(Clock::now());
  io.poll();
  CHECK(is_received);
  std::thread network([&] { io.run(); });
  const size_t num_received = client.receive(num_bytes).size();
  network.join();
  CHECK(is_sent);
  CHECK_EQUAL(num_received, num_bytes);
}

}  // namespace
}  // namespace blink::testing

BLINK_TEST_MAIN
