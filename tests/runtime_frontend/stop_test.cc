// What clients and operators see while the HTTP server stops.
#include <atomic>
#include <thread>

#include "byte_codec.h"
#include "fault_rig.h"
#include "frontend/http_server.h"

namespace blink::testing {
namespace {

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

}  // namespace
}  // namespace blink::testing

BLINK_TEST_MAIN
