#include "frontend/step_metrics.h"

#include <sys/prctl.h>

#include <algorithm>
#include <utility>

namespace blink {
namespace {

constexpr auto kLongestPause = std::chrono::milliseconds(1000);
constexpr auto kShortestPause = std::chrono::milliseconds(10);

}  // namespace

StepMetrics::StepMetrics(Transport& transport, const RingSizes& sizes, Metrics& metrics)
    : trace_capacity_(sizes.trace_capacity), metrics_(metrics), reader_(transport, sizes) {
  // A ring that cannot be read says so to the token reader, which judges health.
  (void)reader_.skip_to_newest();
}

StepMetrics::~StepMetrics() { stop(); }

void StepMetrics::start() {
  thread_ = std::thread([this] { run(); });
}

void StepMetrics::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void StepMetrics::refresh() {
  const std::lock_guard lock(mutex_);
  const uint64_t missed_before = reader_.num_missed();
  if (reader_.poll() != Status::ok) return;
  metrics_.steps_missed.add(reader_.num_missed() - missed_before);
  for (const blink_trace_record& record : reader_.records()) {
    if (record.kind >= metrics_.steps.size()) continue;  // from a later version
    StepHistograms& histograms = metrics_.steps[record.kind];
    histograms.seconds.observe_ns(record.end_ns - record.start_ns);
    histograms.lanes.observe(record.num_lanes);
  }
}

void StepMetrics::run() {
  ::prctl(PR_SET_NAME, "blink-steps");
  auto pause = kLongestPause;
  uint64_t seen = reader_.next_index();
  while (true) {
    refresh();
    std::unique_lock lock(mutex_);
    const uint64_t num_new = reader_.next_index() - std::exchange(seen, reader_.next_index());
    if (num_new > trace_capacity_ / 4) {
      pause = std::max(pause / 2, kShortestPause);
    } else if (num_new < trace_capacity_ / 16) {
      pause = std::min(pause * 2, kLongestPause);
    }
    if (wake_.wait_for(lock, pause, [this] { return is_stopping_; })) return;
  }
}

}  // namespace blink
