// Receives what the front ends wrote: new epochs, then abort, release and submit commands.
//
// All threads scan command words in parallel and collect the new ones as events, which are then
// sorted, so that what follows does not depend on which thread found them first, and handled one by
// one by the team.
#ifndef BLINK_DEVICE_RECEIVE_CUH
#define BLINK_DEVICE_RECEIVE_CUH

#include "blink/device/claim.cuh"
#include "blink/device/lanes.cuh"
#include "blink/device/ring.cuh"
#include "blink/device/state.cuh"

namespace blink {

BLINK_FUNCTION bool comes_before(const Event& a, const Event& b) {
  if (a.is_submit != b.is_submit) return a.is_submit < b.is_submit;
  if (a.order != b.order) return a.order < b.order;
  return a.slot < b.slot;
}

// Sorts events[0, num_events): a bitonic network over the next power of two.
template <typename Team>
BLINK_RARE_FUNCTION void sort_events(Scheduler* s, Team& team) {
  const uint32_t num_events = s->num_events;
  const uint32_t size = power_of_two_at_least(num_events);
  for (uint32_t i = num_events + team.id(); i < size; i += team.count()) {
    s->events[i] = Event{~uint64_t{0}, 0, kNone, kNone};  // sorts last
  }
  team.sync();
  for (uint32_t run = 2; run <= size; run *= 2) {
    for (uint32_t distance = run / 2; distance > 0; distance /= 2) {
      for (uint32_t i = team.id(); i < size; i += team.count()) {
        const uint32_t j = i ^ distance;
        if (j < i) continue;
        const bool ascending = (i & run) == 0;
        Event& low = s->events[i];
        Event& high = s->events[j];
        if (comes_before(high, low) == ascending) {
          const Event moved = low;
          low = high;
          high = moved;
        }
      }
      team.sync();
    }
  }
}

template <typename Team>
BLINK_FUNCTION void forget_events(Scheduler* s, Team& team) {
  team.sync();
  if (team.is_leader()) s->num_events = 0;
  team.sync();
}

// Aborts all that a front end's earlier life left in its slots: nobody would release them.
template <typename Team>
BLINK_RARE_FUNCTION void clear_front_end(Scheduler* s, Team& team, uint32_t front_end) {
  forget_events(s, team);
  const uint32_t end_slot = s->front_ends[front_end].end_slot;
  for (uint32_t slot = s->front_ends[front_end].first_slot + team.id(); slot < end_slot;
       slot += team.count()) {
    if (s->slots[slot].state == BLINK_STATE_EMPTY) continue;
    s->events[team.append(&s->num_events)] = Event{0, 0, 0, slot};
  }
  team.sync();
  sort_events(s, team);
  const uint32_t num_events = s->num_events;
  for (uint32_t i = 0; i < num_events; ++i) {
    empty_slot(s, team, s->events[i].slot, BLINK_ERROR_EPOCH);
  }
}

// Collects the commands of a front end's slots that were not acted upon yet. Submits newer than
// `newest_submit_number` stay for the next scan.
template <typename Team>
BLINK_FUNCTION void scan_commands(Scheduler* s, Team& team, uint32_t front_end,
                                  uint64_t newest_submit_number) {
  forget_events(s, team);
  const uint32_t end_slot = s->front_ends[front_end].end_slot;
  for (uint32_t slot = s->front_ends[front_end].first_slot + team.id(); slot < end_slot;
       slot += team.count()) {
    // Acquire: pairs with the front end's release of the word; payload and submit number came
    // before.
    const uint64_t word = load_acquire(&s->ring_commands[slot].word);
    if (word == s->seen_commands[slot]) continue;
    const bool is_submit = unpack_command(word).command == BLINK_COMMAND_SUBMIT;
    const uint64_t order = is_submit ? load_relaxed(&s->ring_commands[slot].submit_number) : 0;
    if (is_submit && order > newest_submit_number) continue;
    s->events[team.append(&s->num_events)] = Event{order, word, is_submit ? 1u : 0u, slot};
  }
  team.sync();
  sort_events(s, team);
}

template <typename Team>
BLINK_RARE_FUNCTION void receive_commands(Scheduler* s, Team& team, uint32_t front_end) {
  scan_commands(s, team, front_end, ~uint64_t{0});
  uint32_t num_events = s->num_events;
  if (num_events > 0 && s->events[num_events - 1].is_submit != 0) {
    // The scan may have passed a slot before its submit came, and seen a later submit elsewhere.
    // The second one sees all that came before the newest submit of the first: first come, first
    // served.
    scan_commands(s, team, front_end, s->events[num_events - 1].order);
    num_events = s->num_events;
  }
  for (uint32_t i = 0; i < num_events; ++i) {
    const Event event = s->events[i];
    if (event.is_submit != 0) {
      claim_slot(s, team, front_end, event);
    } else {
      close_slot(s, team, event);
    }
  }
}

// What one thread read of a front end's line and of the stop word, relaxed.
struct ControlWords {
  uint64_t submit_count;
  uint32_t epoch;
  uint32_t stop;
};

BLINK_FUNCTION ControlWords read_control(const Scheduler* s, uint32_t front_end) {
  const blink_front_end& line = s->ring_front_ends[front_end];
  return ControlWords{load_relaxed(&line.submit_count), load_relaxed(&line.epoch),
                      load_relaxed(&s->header->stop)};
}

// Front ends are looked after from the last thread on; rows, from the first: over a link the words
// take a microsecond to come, while other threads commit the step.
template <typename Team>
BLINK_FUNCTION uint32_t first_front_end(const Team& team) {
  return team.count() - 1 - team.id();
}

// Asks for the control words of the thread's first front end.
template <typename Team>
BLINK_FUNCTION ControlWords poll_control(const Scheduler* s, const Team& team) {
  const uint32_t front_end = first_front_end(team);
  return front_end < s->limits.num_front_ends ? read_control(s, front_end) : ControlWords{};
}

// Marks the front ends that wrote something, or all of them from time to time, so that a lost count
// cannot lose a request. Sets action to stop where the owner says so.
template <typename Team>
BLINK_FUNCTION void note_control(Scheduler* s, Team& team, const ControlWords& polled,
                                 uint64_t now_ns) {
  const uint32_t first = first_front_end(team);
  const bool is_due = s->steps_since_scan >= kRescanSteps ||
                      (s->num_running == 0 && now_ns - s->last_scan_ns >= kIdleRescanNs);
  team.sync();
  for (uint32_t i = first; i < s->limits.num_front_ends; i += team.count()) {
    const ControlWords words = i == first ? polled : read_control(s, i);
    FrontEndRecord& front_end = s->front_ends[i];
    if (words.submit_count != front_end.submit_count || words.epoch != front_end.epoch || is_due) {
      front_end.must_scan = 1;
    }
    if (front_end.must_scan != 0) {
      // Acquire both: the front end stored them after the commands and before the requests they
      // speak of.
      front_end.submit_count = load_acquire(&s->ring_front_ends[i].submit_count);
      front_end.ring_epoch = load_acquire(&s->ring_front_ends[i].epoch);
    }
    // No acquire: nothing is read after a stop.
    if (i == 0) s->action = words.stop != 0 ? kActionStop : kActionIdle;
  }
  if (team.is_leader()) {
    ++s->steps_since_scan;
    if (is_due) {
      s->steps_since_scan = 0;
      s->last_scan_ns = now_ns;
      ++s->counters.rescans;
    }
  }
  team.sync();
}

// Acts on the epochs and commands of the front ends that note_control marked.
template <typename Team>
BLINK_FUNCTION void receive(Scheduler* s, Team& team) {
  const uint32_t num_front_ends = s->limits.num_front_ends;
  for (uint32_t i = 0; i < num_front_ends; ++i) {
    FrontEndRecord& front_end = s->front_ends[i];
    const bool is_new = front_end.ring_epoch != front_end.epoch;
    const bool must_scan = front_end.must_scan != 0;
    if (!must_scan) continue;
    if (is_new) clear_front_end(s, team, i);
    team.sync();
    if (team.is_leader()) {
      front_end.epoch = front_end.ring_epoch;
      front_end.must_scan = 0;
    }
    team.sync();
    receive_commands(s, team, i);
  }
  team.sync();
}

}  // namespace blink

#endif  // BLINK_DEVICE_RECEIVE_CUH
