#include "frontend/front_end.h"

#include <thread>

namespace blink {

FrontEnd::FrontEnd(FrontEndConfig config, std::unique_ptr<Transport> transport,
                   std::shared_ptr<const TextCodec> codec, TemplateRenderer render)
    : config_(std::move(config)),
      pipeline_(config_, std::move(transport), std::move(codec), std::move(render),
                [this] { server_.wake(); }),  // called after start() only
      server_(config_) {}

FrontEnd::~FrontEnd() { stop(std::chrono::milliseconds(0)); }

void FrontEnd::start() {
  pipeline_.start();
  server_.start(pipeline_);
  is_running_ = true;
}

void FrontEnd::stop(std::chrono::milliseconds patience) {
  if (!is_running_) return;
  is_running_ = false;
  server_.stop_accepting();
  const auto deadline = Clock::now() + patience;
  const auto has_requests = [this] {
    return pipeline_.metrics().requests_running.load(std::memory_order_relaxed) > 0;
  };
  while (has_requests() && pipeline_.is_healthy() && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  // Aborted requests get their last event, and their clients an error, before the network thread
  // ends.
  pipeline_.stop(std::chrono::milliseconds(1000));
  server_.stop();
}

}  // namespace blink
