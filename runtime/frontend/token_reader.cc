#include "frontend/token_reader.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

#include "frontend/urgent_thread.h"

namespace blink {
namespace {

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
      records_(size_t{RingClient::kMaxSlotsARead} * RingClient::kMaxRecords *
               ring.sizes().output_record_bytes),
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
  become_urgent_thread("blink-reader");
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

// One bulk read of the part of the table that holds the lists' slots. False: there are none, or
// the ring is lost.
bool TokenReader::refresh_statuses(std::initializer_list<const std::vector<Watch>*> lists) {
  uint32_t low = ring_.num_slots();
  uint32_t high = 0;
  for (const auto* list : lists) {
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
  if (!refresh_statuses({&urgent_, &flowing_})) return;
  has_emitted_ = false;
  poll_list(urgent_, true);
  if (has_emitted_) events_bell_.ring();  // first tokens need not wait for the others
  has_emitted_ = false;
  poll_list(flowing_, false);
  if (has_emitted_) events_bell_.ring();
  has_emitted_ = false;
}

void TokenReader::poll_list(std::vector<Watch>& list, bool moves_to_flowing) {
  size_t next = 0;
  while (next < list.size() && records_left_ > 0) {
    next = gather(list, next);
    read_gathered(list);
  }
  // The next pass begins with those that this one did not reach.
  std::rotate(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(next), list.end());
  std::erase_if(list, [&](const Watch& watch) {
    const bool moves = moves_to_flowing && watch.num_seen > 0 && !watch.is_over;
    if (moves) flowing_.push_back(watch);
    return moves || watch.is_over;
  });
}

// Looks at the watches from `next` on until a transport read is full; returns the one after them.
size_t TokenReader::gather(std::vector<Watch>& list, size_t next) {
  num_readings_ = 0;
  while (next < list.size() && num_readings_ < readings_.size() && records_left_ > 0) {
    look_at(list[next], next);
    ++next;
  }
  return next;
}

void TokenReader::look_at(Watch& watch, size_t index) {
  if (ring_.submitted_epoch(watch.slot) != ring_.epoch()) {
    end_without_owner(watch, Ending::lost);  // it went with a link that is gone
    return;
  }
  const StatusWord status = unpack_status(statuses_[watch.slot].word);
  if (status.sequence != watch.sequence) {
    if (!watch.is_claimed) return;  // the owner has not seen the command yet
    metrics_.sequence_mismatches.add();
    end_without_owner(watch, Ending::mismatch);
    return;
  }
  watch.is_claimed = true;
  const uint32_t num_there = std::min(status.num_generated, ring_.sizes().max_output_tokens);
  // At most kMaxRecords a pass, so that one long answer does not hold up the others.
  const uint32_t num_new =
      std::min(num_there - std::min(num_there, watch.num_seen), RingClient::kMaxRecords);
  const bool is_last = is_final_state(status.state) && watch.num_seen + num_new >= num_there;
  if (num_new > 0 || is_last) {
    readings_[num_readings_++] = {index, status, num_new, is_last};
    records_left_ -= std::min(records_left_, num_new);
  } else if (status.state == BLINK_STATE_EMPTY) {
    end_emptied(watch, statuses_[watch.slot].error);
  } else {
    send_abort_if_asked(watch, status);
  }
}

std::span<std::byte> TokenReader::records_at(size_t place) {
  const size_t num_bytes = records_.size() / RingClient::kMaxSlotsARead;
  return std::span(records_).subspan(place * num_bytes, num_bytes);
}

void TokenReader::read_gathered(std::vector<Watch>& list) {
  if (num_readings_ == 0) return;
  std::array<RingClient::OutputRead, RingClient::kMaxSlotsARead> outputs;
  for (size_t place = 0; place < num_readings_; ++place) {
    const Reading& reading = readings_[place];
    const Watch& watch = list[reading.index];
    const size_t num_bytes = size_t{reading.num_new} * ring_.sizes().output_record_bytes;
    outputs[place] = {watch.slot, watch.num_seen, records_at(place).first(num_bytes),
                      &statuses_after_[place]};
  }
  const Status status = ring_.read_outputs(std::span(outputs).first(num_readings_));
  if (status != Status::ok) health_.store(Health::lost, std::memory_order_relaxed);
  num_finished_ = 0;
  for (size_t place = 0; place < num_readings_; ++place) {
    Watch& watch = list[readings_[place].index];
    if (status == Status::ok) {
      take(watch, readings_[place], place);
    } else {
      end_without_owner(watch, Ending::lost);
    }
  }
  release_finished();
}

// What was read for one slot.
void TokenReader::take(Watch& watch, const Reading& reading, size_t place) {
  const blink_slot_status& after = statuses_after_[place];
  if (unpack_status(after.word).sequence != watch.sequence) {
    metrics_.sequence_mismatches.add();
    end_without_owner(watch, Ending::mismatch);
    return;
  }
  announce(watch, place, reading.num_new);
  if (reading.is_last) {
    finish(watch, after);
  } else if (reading.status.state == BLINK_STATE_EMPTY) {
    end_emptied(watch, after.error);
  } else {
    send_abort_if_asked(watch, reading.status);
  }
}

void TokenReader::announce(Watch& watch, size_t place, uint32_t num_new) {
  const std::byte* records = records_at(place).data();
  const size_t record_bytes = ring_.sizes().output_record_bytes;
  // Whole records are handed over before the event that announces them.
  if (watch.choice->logprobs != nullptr && num_new > 0) {
    watch.choice->logprobs->put(reinterpret_cast<const blink_output_record*>(records), num_new);
  }
  watch.num_seen += num_new;
  for (uint32_t i = 0; i < num_new; i += TokenEvent::kMaxTokens) {
    TokenEvent event{.choice = watch.choice};
    event.num_tokens = static_cast<uint8_t>(std::min(num_new - i, TokenEvent::kMaxTokens));
    for (uint32_t k = 0; k < event.num_tokens; ++k) {
      std::memcpy(&event.token_ids[k], records + (i + k) * record_bytes, sizeof(uint32_t));
    }
    emit(event);
  }
}

// The final state and all records were seen. finish_reason is of the second reading, which began
// after that state was seen. The choice ends with release_finished().
void TokenReader::finish(Watch& watch, const blink_slot_status& after) {
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
  releases_[num_finished_] = {watch.slot, watch.sequence};
  endings_[num_finished_++] = event;
  watch.is_over = true;
}

// The records were copied before this; the owner may reuse the slots from here on. A client that is
// told of its end finds a free slot.
void TokenReader::release_finished() {
  if (num_finished_ == 0) return;
  const auto releases = std::span(releases_).first(num_finished_);
  if (ring_.release(releases) != Status::ok) {
    health_.store(Health::lost, std::memory_order_relaxed);
  }
  for (const RingClient::Release& release : releases) slots_.mark_released(release.slot);
  for (const TokenEvent& event : std::span(endings_).first(num_finished_)) emit(event);
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
void TokenReader::end_without_owner(Watch& watch, Ending ending, uint32_t error) {
  emit(TokenEvent{.choice = watch.choice, .error = error, .ending = ending});
  Watch rest = watch;
  rest.choice = nullptr;
  if (!watch.is_claimed) (void)ring_.withdraw(watch.slot, watch.sequence);
  leave_to_clean_up(rest);
  watch.is_over = true;
}

// The slot was emptied without our release: the owner cleared this range, as it does when another
// front end takes it over.
void TokenReader::end_emptied(Watch& watch, uint32_t error) {
  const bool is_replaced = error == BLINK_ERROR_EPOCH;
  end_without_owner(watch, is_replaced ? Ending::failed : Ending::mismatch, error);
}

void TokenReader::emit(const TokenEvent& event) {
  // Full: the detokenizer is behind. It never waits for this thread, so this ends.
  while (!events_.push(event)) {
    events_bell_.ring();
    std::this_thread::yield();
  }
  has_emitted_ = true;
}

}  // namespace blink
