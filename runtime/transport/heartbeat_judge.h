// Tells from a ring's heartbeat whether its owner lives. Pure: signs and the time in, a verdict
// out.
#ifndef BLINK_TRANSPORT_HEARTBEAT_JUDGE_H
#define BLINK_TRANSPORT_HEARTBEAT_JUDGE_H

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace blink {

// What the owner last wrote into the ring's header.
struct OwnerSigns {
  uint64_t heartbeat = 0;
  uint64_t longest_step_ns = 0;
  bool has_stopped = false;
};

enum class OwnerVerdict {
  beating,  // since the last look
  quiet,    // not since then, but not for too long
  silent,   // for too long
  stopped,
};

class HeartbeatJudge {
 public:
  using Clock = std::chrono::steady_clock;

  // An owner is silent after `shortest_silence`, or four of its longest steps if that is longer.
  HeartbeatJudge(std::chrono::nanoseconds shortest_silence, Clock::time_point now)
      : shortest_silence_(shortest_silence), last_beat_at_(now) {}

  OwnerVerdict judge(const OwnerSigns& signs, Clock::time_point now) {
    const bool has_beaten = signs.heartbeat != last_heartbeat_;
    if (has_beaten) {
      last_heartbeat_ = signs.heartbeat;
      last_beat_at_ = now;
    }
    if (signs.has_stopped) return OwnerVerdict::stopped;
    if (has_beaten) return OwnerVerdict::beating;
    const auto limit =
        std::max(shortest_silence_, std::chrono::nanoseconds(4 * signs.longest_step_ns));
    return now - last_beat_at_ > limit ? OwnerVerdict::silent : OwnerVerdict::quiet;
  }

  std::chrono::nanoseconds silence(Clock::time_point now) const { return now - last_beat_at_; }

 private:
  std::chrono::nanoseconds shortest_silence_;
  uint64_t last_heartbeat_ = 0;
  Clock::time_point last_beat_at_;
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_HEARTBEAT_JUDGE_H
