// The CPU placement: the policy in a host loop, with a function call for a graph launch.
#ifndef BLINK_CPU_SCHEDULER_LOOP_HPP
#define BLINK_CPU_SCHEDULER_LOOP_HPP

#include <sched.h>
#include <time.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "blink/cpu/scheduler.h"
#include "blink/device/initialize.cuh"
#include "blink/device/policy.cuh"

struct blink_cpu_scheduler {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory;  // a blink::Scheduler and its arrays
  blink_cpu_launch launch;
  void* launch_arg;

  blink::Scheduler* state() { return static_cast<blink::Scheduler*>(memory.get()); }
};

namespace blink {

inline uint64_t monotonic_time_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

// Waits a little between idle polls: the first ones only yield, later ones sleep ever longer.
class IdleBackoff {
 public:
  void reset() { num_polls_ = 0; }

  void wait() {
    ++num_polls_;
    if (num_polls_ <= kYieldPolls) {
      sched_yield();
      return;
    }
    const uint32_t doublings = smaller((num_polls_ - kYieldPolls) / 64, 4u);
    const timespec pause{0, smaller(kShortestSleepNs << doublings, kLongestSleepNs)};
    nanosleep(&pause, nullptr);
  }

 private:
  static constexpr uint32_t kYieldPolls = 32;
  static constexpr long kShortestSleepNs = 50000;
  static constexpr long kLongestSleepNs = 500000;

  uint32_t num_polls_ = 0;
};

inline int create_cpu_scheduler(void* ring, uint64_t ring_bytes, const blink_step_buffers* buffers,
                                const GraphTable& graphs, uint32_t max_prefill_tokens,
                                blink_cpu_launch launch, void* launch_arg,
                                blink_cpu_scheduler** out, char* error, uint32_t error_bytes) {
  const auto* header = static_cast<const blink_ring_header*>(ring);
  uint64_t state_bytes = 0;
  if (ring_bytes >= sizeof(blink_ring_header)) {
    state_bytes = scheduler_state_bytes(header->num_slots, header->max_batch, header->num_kv_pages);
  }
  auto scheduler = std::make_unique<blink_cpu_scheduler>();
  scheduler->memory.reset(std::aligned_alloc(64, (state_bytes + 63) / 64 * 64));
  scheduler->launch = launch;
  scheduler->launch_arg = launch_arg;
  SingleThread team;
  uint32_t code = kInitializeRingTooSmall;
  if (ring_bytes >= sizeof(blink_ring_header) && scheduler->memory != nullptr) {
    code = initialize_scheduler(scheduler->memory.get(), state_bytes, team, ring, ring_bytes,
                                *buffers, graphs, max_prefill_tokens);
  }
  if (code != kInitializeOk) {
    std::snprintf(error, error_bytes, "%s", initialize_error_text(code));
    return 1;
  }
  *out = scheduler.release();
  return 0;
}

// commit, receive, choose, report, launch: until the ring says stop.
inline int run_cpu_scheduler(blink_cpu_scheduler* scheduler) {
  Scheduler* state = scheduler->state();
  SingleThread team;
  IdleBackoff backoff;
  for (;;) {
    schedule(state, team, monotonic_time_ns());
    report(state, team.id(), team.count());
    if (state->action == kActionStop) return 0;
    if (state->action == kActionIdle) {
      backoff.wait();
      continue;
    }
    backoff.reset();
    const int error = scheduler->launch(scheduler->launch_arg, state->action_key);
    if (error != 0) fail_step(state, team, static_cast<uint32_t>(error));
  }
}

}  // namespace blink

#endif  // BLINK_CPU_SCHEDULER_LOOP_HPP
