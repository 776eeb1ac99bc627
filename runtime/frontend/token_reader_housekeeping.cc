// What the token reader does ten times a second, tokens or not: heartbeats both ways, slots without
// a choice, a lost link.
#include <algorithm>

#include "frontend/token_reader.h"

namespace blink {
namespace {

constexpr auto kReconnectInterval = std::chrono::milliseconds(500);
constexpr uint32_t kLongestIntervalUs = 1000;  // between two polls while requests run
constexpr uint32_t kSettledSightings =
    3;  // housekeeping passes before an empty slot is believed free

// How requests end while the owner is in this state.
Ending ending_of(Health health) {
  if (health == Health::stopped) return Ending::stopped;
  return health == Health::lost ? Ending::lost : Ending::stalled;
}

}  // namespace

void TokenReader::housekeep(Clock::time_point now) {
  last_housekeeping_ = now;
  if (ring_.write_heartbeat(++own_heartbeat_) == Status::lost) {
    health_.store(Health::lost, std::memory_order_relaxed);
  } else {
    judge_health(now);
  }
  const Health current = health();
  if (current == Health::stalled || current == Health::stopped || current == Health::lost) {
    has_emitted_ = false;
    const Ending ending = ending_of(current);
    for (Watch& watch : urgent_) end_without_owner(watch, ending);
    for (Watch& watch : flowing_) end_without_owner(watch, ending);
    urgent_.clear();
    flowing_.clear();
    if (has_emitted_) events_bell_.ring();
    if (current == Health::lost && !is_stopping_.load(std::memory_order_relaxed)) {
      try_reconnect(now);
    }
    return;
  }
  if (!refresh_statuses({&unsettled_})) return;
  for (size_t i = 0; i < unsettled_.size();) {
    if (clean_up(unsettled_[i], statuses_[unsettled_[i].slot])) {
      unsettled_[i] = unsettled_.back();
      unsettled_.pop_back();
    } else {
      ++i;
    }
  }
}

// A new link, maybe to a new ring: every slot that is not surely free is looked at before it is
// used again.
void TokenReader::try_reconnect(Clock::time_point now) {
  if (now < next_reconnect_) return;
  std::vector<uint32_t> doubtful;
  slots_.take_back_released(doubtful);
  const bool is_connected = ring_.reconnect();
  if (is_connected) {
    metrics_.ring_attachments.add();
    doubtful.insert(doubtful.end(), ring_.unsettled_slots().begin(), ring_.unsettled_slots().end());
    health_.store(Health::starting, std::memory_order_relaxed);
  }
  for (const uint32_t slot : doubtful) {
    leave_to_clean_up(Watch{.slot = slot, .is_abort_sent = true});
  }
  for (Watch& watch : unsettled_) watch.num_empty_sightings = 0;
  next_reconnect_ = Clock::now() + kReconnectInterval;
}

void TokenReader::judge_health(Clock::time_point now) {
  blink_ring_header header;
  if (ring_.read_header(header) != Status::ok) {
    health_.store(Health::lost, std::memory_order_relaxed);
    return;
  }
  longest_step_ns_ = header.longest_step_ns;
  // Looking more often than 16 times a step gains a client nothing and costs a CPU target its
  // cores.
  pacer_.set_max_interval_us(
      std::clamp(static_cast<uint32_t>(longest_step_ns_ / 16'000), config_.max_poll_interval_us,
                 std::max(config_.max_poll_interval_us, kLongestIntervalUs)));
  const OwnerSigns signs{.heartbeat = header.heartbeat,
                         .longest_step_ns = longest_step_ns_,
                         .has_stopped = header.stopped != 0};
  switch (judge_.judge(signs, now)) {
    case OwnerVerdict::beating:
      health_.store(Health::serving, std::memory_order_relaxed);
      break;
    case OwnerVerdict::quiet:
      break;
    case OwnerVerdict::silent:
      if (health() == Health::serving) health_.store(Health::stalled, std::memory_order_relaxed);
      break;
    case OwnerVerdict::stopped:
      health_.store(Health::stopped, std::memory_order_relaxed);
      break;
  }
}

// One watch a slot: the slot is handed out again when the first is done.
void TokenReader::leave_to_clean_up(const Watch& watch) {
  for (Watch& other : unsettled_) {
    if (other.slot != watch.slot) continue;
    other = watch;
    return;
  }
  unsettled_.push_back(watch);
}

// A slot without a choice: abort and release what still runs in it, then wait for it to be
// empty. True: it is free.
bool TokenReader::clean_up(Watch& watch, const blink_slot_status& raw) {
  const StatusWord status = unpack_status(raw.word);
  if (status.state == BLINK_STATE_EMPTY) {
    if (health() != Health::serving) return false;  // a silent owner proves nothing
    if (++watch.num_empty_sightings < kSettledSightings) return false;
    slots_.mark_released(watch.slot);
    return true;
  }
  watch.num_empty_sightings = 0;
  const bool is_ours = watch.sequence == status.sequence;
  if (is_final_state(status.state)) {
    (void)ring_.release(watch.slot, status.sequence);  // looked at again in the next pass
  } else if (is_ours && !watch.is_abort_sent) {
    watch.is_abort_sent = ring_.abort(watch.slot, watch.sequence) == Status::ok;
  }
  return false;
}

}  // namespace blink
