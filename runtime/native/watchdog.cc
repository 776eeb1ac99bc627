#include "native/watchdog.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>

namespace blink {
namespace {

constexpr std::chrono::milliseconds kInterval(250);

template <typename T>
T load_acquire(const T& word) {
  // Pairs with the owner's release of heartbeat and stopped (device/statistics.cuh).
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}

}  // namespace

Watchdog::Watchdog(const blink_ring_header* header, const WatchdogConfig& config)
    : header_(header),
      config_(config),
      judge_(config.shortest_silence, HeartbeatJudge::Clock::now()),
      thread_([this] { run(); }) {}

Watchdog::~Watchdog() { disarm(); }

void Watchdog::disarm() {
  {
    const std::lock_guard lock(mutex_);
    is_disarmed_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

bool Watchdog::sleep(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  return !wake_.wait_for(lock, time, [this] { return is_disarmed_; });
}

OwnerVerdict Watchdog::look() {
  const auto now = HeartbeatJudge::Clock::now();
  const OwnerSigns signs{.heartbeat = load_acquire(header_->heartbeat),
                         .longest_step_ns = load_acquire(header_->longest_step_ns),
                         .has_stopped = load_acquire(header_->stopped) != 0};
  return judge_.judge(signs, now);
}

void Watchdog::run() {
  ::prctl(PR_SET_NAME, "blink-watchdog");
  while (sleep(kInterval)) {
    const OwnerVerdict verdict = look();
    if (verdict == OwnerVerdict::beating || verdict == OwnerVerdict::quiet) continue;
    say_last_words(verdict);
    // Disarmed in the grace time: somebody ends the process already, and says why.
    if (!sleep(config_.grace)) return;
    ::_exit(config_.exit_status);
  }
}

void Watchdog::say_last_words(OwnerVerdict verdict) const {
  char text[256];
  const double seconds = std::chrono::duration<double>(judge_.silence()).count();
  const int length = std::snprintf(
      text, sizeof(text),
      "blink-runtime: the scheduler %s after step %llu (%.1f s without a heartbeat, launch error "
      "%u of graph key %u); ending with status %d so that a supervisor can restart\n",
      verdict == OwnerVerdict::stopped ? "has stopped" : "shows no life",
      static_cast<unsigned long long>(load_acquire(header_->step)), seconds,
      load_acquire(header_->launch_error), load_acquire(header_->launch_error_key),
      config_.exit_status);
  if (length > 0 && ::write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) return;
}

}  // namespace blink
