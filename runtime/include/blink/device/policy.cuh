// The scheduler's one policy: what happens between two steps. Every placement calls schedule() in
// turn with whatever runs the chosen graph; all state is in Scheduler.
#ifndef BLINK_DEVICE_POLICY_CUH
#define BLINK_DEVICE_POLICY_CUH

#include "blink/device/choose.cuh"
#include "blink/device/commit.cuh"
#include "blink/device/fill.cuh"
#include "blink/device/receive.cuh"
#include "blink/device/state.cuh"
#include "blink/device/statistics.cuh"

namespace blink {

// Leader: tells the ring's owner that no further step will come.
BLINK_FUNCTION void announce_stop(Scheduler* s) {
  // Release: pairs with the owner's acquire before it frees the ring.
  store_release(&s->header->stopped, 1u);
}

// Commits the finished step, if one was in flight, and sets `action` (and `action_key`): launch the
// graph of that key, whose inputs are filled; poll again later; or stop. report() must follow,
// before schedule() is called again. `now_ns` never goes back.
template <typename Team>
BLINK_RARE_FUNCTION void schedule(Scheduler* s, Team& team, uint64_t now_ns) {
  note_completion(s, team);
  const ControlWords control = poll_control(s, team);
  commit_step(s, team, now_ns);
  note_control(s, team, control, now_ns);
  const bool must_stop = s->action == kActionStop;
  team.sync();
  if (must_stop) {
    if (team.is_leader()) note_gauges(s, BLINK_SCHEDULER_STOPPED);
    team.sync();
    report(s, team.id(), team.count());
    team.sync();
    if (team.is_leader()) announce_stop(s);
    team.sync();
    return;
  }
  receive(s, team);
  choose_step(s, team);
  const bool has_step = s->action == kActionLaunch;
  if (has_step) fill_step(s, team, now_ns);
  if (team.is_leader()) {
    if (!has_step) ++s->counters.idle_polls;
    note_gauges(s, has_step ? BLINK_SCHEDULER_RUNNING : BLINK_SCHEDULER_IDLE);
  }
  team.sync();
}

}  // namespace blink

#endif  // BLINK_DEVICE_POLICY_CUH
