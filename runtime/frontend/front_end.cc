#include "frontend/front_end.h"

#include <stdexcept>
#include <string>
#include <thread>

namespace blink {
namespace {

FrontEndConfig checked(FrontEndConfig config) {
  check_front_end_config(config);
  return config;
}

}  // namespace

void check_front_end_config(const FrontEndConfig& config) {
  struct Row {
    const char* name;
    uint32_t value;
    uint32_t low;
  };
  const Row rows[] = {
      {"max_connections", config.max_connections, 1},
      {"max_requests", config.max_requests, 1},
      {"max_headers", config.max_headers, 1},
      {"max_total_body_bytes", config.max_total_body_bytes, config.max_body_bytes},
      {"request_timeout_ms", config.request_timeout_ms, 1},
      {"max_header_bytes", config.max_header_bytes, 256},
      {"max_body_bytes", config.max_body_bytes, 256},
      {"max_json_depth", config.max_json_depth, 4},
      {"max_buffered_bytes", config.max_buffered_bytes, 1024},
      {"header_timeout_ms", config.header_timeout_ms, 1},
      {"body_timeout_ms", config.body_timeout_ms, 1},
      {"idle_timeout_ms", config.idle_timeout_ms, 1},
      {"write_timeout_ms", config.write_timeout_ms, 1},
      {"num_prepare_threads", config.num_prepare_threads, 1},
      {"min_poll_interval_us", config.min_poll_interval_us, 1},
      {"max_poll_interval_us", config.max_poll_interval_us, config.min_poll_interval_us},
      {"max_polls_per_s", config.max_polls_per_s, 1},
      {"stall_timeout_ms", config.stall_timeout_ms, 1},
  };
  for (const Row& row : rows) {
    if (row.value < row.low) {
      throw std::invalid_argument(std::string(row.name) + " is " + std::to_string(row.value) +
                                  ", must be at least " + std::to_string(row.low));
    }
  }
  if (config.tls_certificate.empty() != config.tls_key.empty()) {
    throw std::invalid_argument("tls_certificate and tls_key need each other");
  }
}

FrontEnd::FrontEnd(FrontEndConfig config, std::unique_ptr<Transport> transport,
                   std::shared_ptr<const TextCodec> codec, TemplateRenderer render,
                   HttpEntrance entrance)
    : config_(checked(std::move(config))),
      pipeline_(config_, std::move(transport), std::move(codec), std::move(render),
                [this] { server_.wake(); }),  // called after start() only
      server_(config_, std::move(entrance)) {}

FrontEnd::~FrontEnd() { stop(std::chrono::milliseconds(0)); }

void FrontEnd::start() {
  pipeline_.start();
  server_.start(pipeline_);
  is_running_ = true;
}

void FrontEnd::stop(std::chrono::milliseconds patience) {
  if (!is_running_) return;
  is_running_ = false;
  server_.drain();
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
