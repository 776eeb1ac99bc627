#include "frontend/token_reader.h"

#include <sys/prctl.h>

#include <algorithm>

namespace blink {
namespace {

constexpr auto kHousekeepingInterval = std::chrono::milliseconds(100);
constexpr auto kReconnectInterval = std::chrono::milliseconds(500);
constexpr uint32_t kLongestIntervalUs = 1000;  // between two polls while requests run
constexpr uint32_t kSettledSightings =
    3;  // housekeeping passes before an empty slot is believed free

uint64_t microseconds(Clock::time_point time) {
  const auto since = std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch());
  return static_cast<uint64_t>(since.count());
}

}  // namespace

const char* health_name(Health health) {
  switch (health) {
    case Health::starting:
      return "starting";
    case Health::serving:
      return "serving";
    case Health::stalled:
      return "stalled";
    case Health::stopped:
      return "stopped";
    case Health::lost:
      return "lost";
  }
  return "unknown";
}

TokenReader::TokenReader(const FrontEndConfig& config, RingClient& ring, SlotTracker& slots,
                         Metrics& metrics, SpscQueue<TokenEvent>& events, Doorbell& events_bell)
    : config_(config),
      ring_(ring),
      slots_(slots),
      metrics_(metrics),
      events_(events),
      events_bell_(events_bell),
      new_(ring.num_slots() * 2),
      statuses_(ring.num_slots()),
      pacer_(config.min_poll_interval_us, config.max_poll_interval_us, config.max_polls_per_s),
      judge_(std::chrono::milliseconds(config.stall_timeout_ms), Clock::now()) {
  urgent_.reserve(ring.num_slots());
  flowing_.reserve(ring.num_slots());
  unsettled_.reserve(ring.num_slots());
  std::vector<bool> is_unsettled(ring.num_slots(), false);
  for (const uint32_t slot : ring.unsettled_slots()) {
    is_unsettled[slot] = true;
    unsettled_.push_back(Watch{.slot = slot, .is_abort_sent = true});
  }
  for (uint32_t slot = ring.num_slots(); slot-- > 0;) {
    if (!is_unsettled[slot]) slots_.mark_released(slot);
  }
}

TokenReader::~TokenReader() { stop(std::chrono::milliseconds(0)); }

void TokenReader::start() {
  last_housekeeping_ = Clock::now();
  housekeep(last_housekeeping_);
  thread_ = std::thread([this] { run(); });
}

void TokenReader::stop(std::chrono::milliseconds patience) {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(sleep_mutex_);
    stop_deadline_ = Clock::now() + patience;
    is_stopping_.store(true, std::memory_order_release);  // pairs with run's acquire: the deadline
  }
  wake_.notify_one();
  thread_.join();
}

void TokenReader::watch(Choice* choice) {
  // The queue holds twice the slots; a choice holds a slot. So it cannot be full for long.
  while (!new_.push(choice)) std::this_thread::yield();
  {
    const std::lock_guard lock(sleep_mutex_);
    has_new_ = true;
  }
  wake_.notify_one();
}

void TokenReader::run() {
  ::prctl(PR_SET_NAME, "blink-reader");
  ::prctl(PR_SET_TIMERSLACK, 1000);  // ns; the default of 50 us would double a short sleep
  while (true) {
    const size_t num_known = urgent_.size();
    take_new();
    const auto num_new = static_cast<uint32_t>(urgent_.size() - num_known);
    const bool is_stopping = is_stopping_.load(std::memory_order_acquire);
    const Clock::time_point now = Clock::now();
    if (now - last_housekeeping_ >= kHousekeepingInterval || is_stopping) housekeep(now);
    poll();
    if (is_stopping) {
      const bool is_idle = urgent_.empty() && flowing_.empty();
      if (is_idle || now >= stop_deadline_ || health() != Health::serving) break;
    }
    const uint32_t interval_us = pacer_.next_interval_us(num_new, microseconds(now));
    if (records_left_ > 0) sleep_for_work(interval_us);
  }
  take_new();
  for (Watch& watch : urgent_) end_without_owner(watch, Ending::aborted);
  for (Watch& watch : flowing_) end_without_owner(watch, Ending::aborted);
  if (has_emitted_) events_bell_.ring();
}

void TokenReader::take_new() {
  Choice* choice = nullptr;
  while (new_.pop(choice)) {
    urgent_.push_back(Watch{.choice = choice, .slot = choice->slot, .sequence = choice->sequence});
  }
}

// With requests: a plain short sleep, ended early by nothing (it is bounded by
// max_poll_interval_us). Without: until a request comes or housekeeping is due.
void TokenReader::sleep_for_work(uint32_t interval_us) {
  const bool has_requests = !urgent_.empty() || !flowing_.empty();
  if (has_requests) {
    std::this_thread::sleep_for(std::chrono::microseconds(interval_us));
    return;
  }
  std::unique_lock lock(sleep_mutex_);
  wake_.wait_for(lock, kHousekeepingInterval,
                 [this] { return has_new_ || is_stopping_.load(std::memory_order_relaxed); });
  has_new_ = false;
}

// One bulk read of the part of the table that holds watched slots.
bool TokenReader::refresh_statuses() {
  uint32_t low = ring_.num_slots();
  uint32_t high = 0;
  for (const auto* list : {&urgent_, &flowing_}) {
    for (const Watch& watch : *list) {
      low = std::min(low, watch.slot);
      high = std::max(high, watch.slot + 1);
    }
  }
  if (low >= high) return false;
  const auto part = std::span(statuses_).subspan(low, high - low);
  if (ring_.read_statuses(low, part) != Status::ok) {
    health_.store(Health::lost, std::memory_order_relaxed);
    return false;
  }
  return true;
}

// Hot path: no allocation, no log.
void TokenReader::poll() {
  records_left_ = kMaxRecordsPerPass;
  if (!refresh_statuses()) return;
  has_emitted_ = false;
  poll_list(urgent_, true);
  if (has_emitted_) events_bell_.ring();  // first tokens need not wait for the others
  has_emitted_ = false;
  poll_list(flowing_, false);
  if (has_emitted_) events_bell_.ring();
  has_emitted_ = false;
}

void TokenReader::poll_list(std::vector<Watch>& list, bool moves_to_flowing) {
  for (size_t i = 0; i < list.size();) {
    if (records_left_ == 0) {  // the next pass begins with those that this one did not reach
      std::rotate(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(i), list.end());
      return;
    }
    const Progress progress = look_at(list[i]);
    const bool moves = moves_to_flowing && progress == Progress::some && list[i].num_seen > 0;
    if (moves) flowing_.push_back(list[i]);
    if (progress == Progress::done || moves) {
      list[i] = list.back();
      list.pop_back();
    } else {
      ++i;
    }
  }
}

TokenReader::Progress TokenReader::look_at(Watch& watch) {
  if (ring_.submitted_epoch(watch.slot) != ring_.epoch()) {
    end_without_owner(watch, Ending::stalled);  // it went with a link that is lost
    return Progress::done;
  }
  const StatusWord status = unpack_status(statuses_[watch.slot].word);
  if (status.sequence != watch.sequence) {
    if (!watch.is_claimed) return Progress::none;  // the owner has not seen the command yet
    metrics_.sequence_mismatches.add();
    end_without_owner(watch, Ending::mismatch);
    return Progress::done;
  }
  const bool was_claimed = std::exchange(watch.is_claimed, true);
  Progress progress = was_claimed ? Progress::none : Progress::some;
  if (status.num_generated > watch.num_seen) {
    progress = read_tokens(watch, status);
    if (progress == Progress::done) return progress;
  }
  if (is_final_state(status.state) && watch.num_seen >= status.num_generated) return finish(watch);
  if (status.state == BLINK_STATE_EMPTY) {
    // Emptied without our release: the owner cleared this range.
    end_without_owner(watch, Ending::mismatch);
    return Progress::done;
  }
  send_abort_if_asked(watch, status);
  return progress;
}

// At most kMaxRecords a poll, so that one long answer does not hold up the others.
TokenReader::Progress TokenReader::read_tokens(Watch& watch, const StatusWord& status) {
  const uint32_t num_new =
      std::min(std::min(status.num_generated, ring_.sizes().max_output_tokens) - watch.num_seen,
               RingClient::kMaxRecords);
  std::array<uint32_t, RingClient::kMaxRecords> token_ids;
  blink_slot_status after;
  const auto part = std::span(token_ids).first(num_new);
  const Status read = watch.choice->logprobs == nullptr
                          ? ring_.read_output(watch.slot, watch.num_seen, part, after)
                          : read_records(watch, part, after);
  if (read != Status::ok) {
    health_.store(Health::lost, std::memory_order_relaxed);
    end_without_owner(watch, Ending::stalled);
    return Progress::done;
  }
  if (unpack_status(after.word).sequence != watch.sequence) {
    metrics_.sequence_mismatches.add();
    end_without_owner(watch, Ending::mismatch);
    return Progress::done;
  }
  watch.num_seen += num_new;
  records_left_ -= std::min(records_left_, num_new);
  for (uint32_t i = 0; i < num_new; i += TokenEvent::kMaxTokens) {
    TokenEvent event{.choice = watch.choice};
    event.num_tokens = static_cast<uint8_t>(std::min(num_new - i, TokenEvent::kMaxTokens));
    std::copy_n(token_ids.data() + i, event.num_tokens, event.token_ids.data());
    emit(event);
  }
  return Progress::some;
}

// For a choice with logprobs: whole records, which are handed over before the event that announces
// them. What a mismatch would make of them nobody looks at.
Status TokenReader::read_records(Watch& watch, std::span<uint32_t> token_ids,
                                 blink_slot_status& after) {
  std::array<blink_output_record, RingClient::kMaxRecords> records;
  const auto part = std::span(records).first(token_ids.size());
  const Status read = ring_.read_records(watch.slot, watch.num_seen, part, after);
  for (size_t i = 0; i < part.size(); ++i) token_ids[i] = part[i].token_id;
  if (read == Status::ok) {
    watch.choice->logprobs->put(part.data(), static_cast<uint32_t>(part.size()));
  }
  return read;
}

// The final state and all records were seen: take finish_reason from a second reading, then
// release.
TokenReader::Progress TokenReader::finish(Watch& watch) {
  blink_slot_status after;
  if (ring_.read_statuses(watch.slot, std::span(&after, 1)) != Status::ok) {
    health_.store(Health::lost, std::memory_order_relaxed);
    end_without_owner(watch, Ending::stalled);
    return Progress::done;
  }
  if (unpack_status(after.word).sequence != watch.sequence) {
    end_without_owner(watch, Ending::mismatch);
    return Progress::done;
  }
  TokenEvent event{.choice = watch.choice};
  event.error = after.error;
  if (unpack_status(after.word).state == BLINK_STATE_FAILED) {
    event.ending = Ending::failed;
  } else if (after.finish_reason == BLINK_FINISH_STOP) {
    event.ending = Ending::stop;
  } else if (after.finish_reason == BLINK_FINISH_LENGTH) {
    event.ending = Ending::length;
  } else {
    event.ending = after.finish_reason == BLINK_FINISH_ABORT ? Ending::aborted : Ending::failed;
  }
  // The records were copied before this release; the owner may reuse the slot from here on.
  if (ring_.release(watch.slot, watch.sequence) != Status::ok) {
    health_.store(Health::lost, std::memory_order_relaxed);
  }
  slots_.mark_released(watch.slot);
  emit(event);
  return Progress::done;
}

// An abort may only follow a claimed submit: it overwrites the command word.
void TokenReader::send_abort_if_asked(Watch& watch, const StatusWord& status) {
  if (watch.is_abort_sent || is_final_state(status.state)) return;
  const Choice& choice = *watch.choice;
  const bool is_asked = choice.is_abort_requested.load(std::memory_order_relaxed) ||
                        choice.generation->is_abort_requested.load(std::memory_order_relaxed) ||
                        is_stopping_.load(std::memory_order_relaxed);
  if (!is_asked) return;
  watch.is_abort_sent = ring_.abort(watch.slot, watch.sequence) == Status::ok;
}

// Ends the choice towards the client, and keeps its slot under observation until it is free. A
// submit that the owner has not taken is withdrawn.
void TokenReader::end_without_owner(Watch& watch, Ending ending) {
  emit(TokenEvent{.choice = watch.choice, .ending = ending});
  Watch rest = watch;
  rest.choice = nullptr;
  if (!watch.is_claimed) (void)ring_.withdraw(watch.slot, watch.sequence);
  leave_to_clean_up(rest);
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
// empty.
TokenReader::Progress TokenReader::clean_up(Watch& watch, const blink_slot_status& raw) {
  const StatusWord status = unpack_status(raw.word);
  if (status.state == BLINK_STATE_EMPTY) {
    if (health() != Health::serving) return Progress::none;  // a silent owner proves nothing
    if (++watch.num_empty_sightings < kSettledSightings) return Progress::none;
    slots_.mark_released(watch.slot);
    return Progress::done;
  }
  watch.num_empty_sightings = 0;
  const bool is_ours = watch.sequence == status.sequence;
  if (is_final_state(status.state)) {
    (void)ring_.release(watch.slot, status.sequence);  // looked at again in the next pass
  } else if (is_ours && !watch.is_abort_sent) {
    watch.is_abort_sent = ring_.abort(watch.slot, watch.sequence) == Status::ok;
  }
  return Progress::none;
}

void TokenReader::emit(const TokenEvent& event) {
  // Full: the detokenizer is behind. It never waits for this thread, so this ends.
  while (!events_.push(event)) {
    events_bell_.ring();
    std::this_thread::yield();
  }
  has_emitted_ = true;
}

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
    for (Watch& watch : urgent_) end_without_owner(watch, Ending::stalled);
    for (Watch& watch : flowing_) end_without_owner(watch, Ending::stalled);
    urgent_.clear();
    flowing_.clear();
    if (has_emitted_) events_bell_.ring();
    if (current == Health::lost && !is_stopping_.load(std::memory_order_relaxed)) {
      try_reconnect(now);
    }
    return;
  }
  for (size_t i = 0; i < unsettled_.size();) {
    blink_slot_status status;
    const bool is_read =
        ring_.read_statuses(unsettled_[i].slot, std::span(&status, 1)) == Status::ok;
    if (is_read && clean_up(unsettled_[i], status) == Progress::done) {
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

}  // namespace blink
