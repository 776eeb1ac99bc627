// Counts and times of the front end, and their Prometheus text.
#ifndef BLINK_FRONTEND_METRICS_H
#define BLINK_FRONTEND_METRICS_H

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "blink/abi.h"

namespace blink {

// Every counter may be added to by any thread; relaxed, as nothing is ordered by them.
class Counter {
 public:
  void add(uint64_t amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// Times in buckets of a Prometheus histogram.
class Histogram {
 public:
  static constexpr std::array<double, 16> kBoundsSeconds = {
      0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120};

  void observe_ns(uint64_t ns, uint64_t count = 1);
  void append_text(std::string_view name, std::string_view help, std::string& out) const;

 private:
  std::array<Counter, kBoundsSeconds.size() + 1> buckets_;
  Counter sum_ns_;
};

struct Metrics {
  static constexpr std::array<int, 14> kStatuses = {200, 400, 401, 404, 405, 408, 411,
                                                    413, 415, 429, 431, 500, 501, 503};
  std::array<Counter, kStatuses.size()> responses;  // by HTTP status
  Counter other_responses;
  Counter connections_accepted;
  Counter connections_refused;  // over max_connections
  std::atomic<int64_t> connections_open{0};
  std::atomic<int64_t> requests_running{0};  // submitted and not yet answered
  Counter requests_stopped;                  // by finish_reason
  Counter requests_at_length;
  Counter requests_aborted;  // client left, or its reader was too slow
  Counter requests_failed;
  Counter prompt_tokens;
  Counter output_tokens;
  Counter sequence_mismatches;  // output that was not the request's own
  Histogram ttft;
  Histogram itl;
  Histogram e2e;

  void count_response(int http_status);
  // `header` null: the ring could not be read.
  std::string prometheus_text(const blink_ring_header* header, bool is_healthy) const;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_METRICS_H
