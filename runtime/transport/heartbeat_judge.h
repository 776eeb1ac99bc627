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

  // Who looks counts no more than this from one look to the next. A longer pause is one of the
  // whole machine or of the looking thread, in which the owner may not have run either.
  static constexpr std::chrono::milliseconds kLongestLook{500};

  // An owner is silent after `shortest_silence`, or four of its longest steps if that is longer.
  HeartbeatJudge(std::chrono::nanoseconds shortest_silence, Clock::time_point now)
      : shortest_silence_(shortest_silence), last_look_at_(now) {}

  // `now` is no later than the moment at which `signs` were read.
  OwnerVerdict judge(const OwnerSigns& signs, Clock::time_point now) {
    silence_ += std::min<std::chrono::nanoseconds>(now - last_look_at_, kLongestLook);
    last_look_at_ = now;
    const bool has_beaten = signs.heartbeat != last_heartbeat_;
    if (has_beaten) {
      last_heartbeat_ = signs.heartbeat;
      silence_ = {};
    }
    if (signs.has_stopped) return OwnerVerdict::stopped;
    if (has_beaten) return OwnerVerdict::beating;
    const auto limit =
        std::max(shortest_silence_, std::chrono::nanoseconds(4 * signs.longest_step_ns));
    return silence_ > limit ? OwnerVerdict::silent : OwnerVerdict::quiet;
  }

  // Up to the last look.
  std::chrono::nanoseconds silence() const { return silence_; }

 private:
  std::chrono::nanoseconds shortest_silence_;
  uint64_t last_heartbeat_ = 0;
  Clock::time_point last_look_at_;
  std::chrono::nanoseconds silence_{};
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_HEARTBEAT_JUDGE_H
