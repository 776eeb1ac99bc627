// A thread that turns the scheduler's trace into histograms: step time and lanes by kind.
#ifndef BLINK_FRONTEND_STEP_METRICS_H
#define BLINK_FRONTEND_STEP_METRICS_H

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "frontend/metrics.h"
#include "transport/step_trace.h"

namespace blink {

// Looks once a second, more often where steps are so short that a quarter of the trace would pass
// in that time. Off the token path: it reads the ring on its own and writes counters only.
class StepMetrics {
 public:
  // Counts from this moment on. `transport` and `metrics` must outlive it.
  StepMetrics(Transport& transport, const RingSizes& sizes, Metrics& metrics);
  ~StepMetrics();

  void start();
  void stop();
  // Any thread: brings the histograms up to date.
  void refresh();

 private:
  void run();

  uint64_t trace_capacity_;
  Metrics& metrics_;
  std::mutex mutex_;  // guards the reader; held for one pass over the new records
  StepTraceReader reader_;
  bool is_stopping_ = false;  // under mutex_
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_STEP_METRICS_H
