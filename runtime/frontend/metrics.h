// Counts and times of the front end, and their Prometheus text.
#ifndef BLINK_FRONTEND_METRICS_H
#define BLINK_FRONTEND_METRICS_H

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
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

// Upper bounds of histogram buckets: seconds, or a number of things.
inline constexpr std::array<double, 16> kRequestBounds = {
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120};
inline constexpr std::array<double, 20> kTokenBounds = {
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.0075, 0.01, 0.0125,
    0.015,  0.02,  0.025, 0.035, 0.05,  0.1,   0.25,  0.5,    1,    5};
inline constexpr std::array<double, 22> kStepBounds = {
    0.00002, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006,
    0.0075,  0.01,    0.015,  0.02,    0.03,   0.05,  0.1,   0.25,  0.5,   1,     5};
inline constexpr std::array<double, 13> kLaneBounds = {1,  2,  4,  8,  12,  16, 24,
                                                       32, 48, 64, 96, 128, 256};

// A Prometheus histogram. Observed values are whole numbers of `unit`; bounds have static lifetime.
class Histogram {
 public:
  static constexpr size_t kMaxBounds = 24;

  Histogram(std::span<const double> bounds, double unit) : bounds_(bounds), unit_(unit) {}

  void observe(uint64_t value, uint64_t count = 1);
  // Header and samples of a histogram without labels.
  void append_text(std::string_view name, std::string_view help, std::string& out) const;
  // The samples alone; `label` such as kind="decode", or empty.
  void append_samples(std::string_view name, std::string_view label, std::string& out) const;

 private:
  std::span<const double> bounds_;
  double unit_;
  std::array<Counter, kMaxBounds + 1> buckets_;
  Counter sum_;  // of observed values
};

class TimeHistogram : public Histogram {
 public:
  explicit TimeHistogram(std::span<const double> bounds) : Histogram(bounds, 1e-9) {}
  void observe_ns(uint64_t ns, uint64_t count = 1) { observe(ns, count); }
};

// What the step trace tells about one kind of step.
struct StepHistograms {
  TimeHistogram seconds{kStepBounds};
  Histogram lanes{kLaneBounds, 1};
};

struct Metrics {
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
  Counter ring_attachments;     // to a ring found again after a loss
  TimeHistogram ttft{kRequestBounds};
  TimeHistogram tpot{kTokenBounds};  // of a request: (last token - first token) / (tokens - 1)
  TimeHistogram itl{kTokenBounds};
  TimeHistogram e2e{kRequestBounds};
  std::array<StepHistograms, 2> steps;  // by BLINK_GRAPH_*
  Counter steps_missed;                 // trace records that were overwritten before they were read

  // `header` null: the ring could not be read.
  std::string prometheus_text(const blink_ring_header* header, bool is_healthy) const;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_METRICS_H
