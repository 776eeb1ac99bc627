// The thread that watches the ring: new tokens to the detokenizer, aborts and releases to the ring,
// health.
#ifndef BLINK_FRONTEND_TOKEN_READER_H
#define BLINK_FRONTEND_TOKEN_READER_H

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "frontend/front_end_config.h"
#include "frontend/generation.h"
#include "frontend/metrics.h"
#include "frontend/poll_pacer.h"
#include "frontend/ring_client.h"
#include "frontend/slot_tracker.h"
#include "frontend/spsc_queue.h"
#include "frontend/token_event.h"
#include "transport/heartbeat_judge.h"

namespace blink {

enum class Health {
  starting,  // no heartbeat seen yet
  serving,
  stalled,  // the heartbeat has been silent for too long
  stopped,  // the scheduler has returned
  lost,     // the transport cannot reach the ring
};

const char* health_name(Health health);

// Polling is adaptive (PollPacer): a token is seen at most max_poll_interval, or a sixteenth of the
// longest step (at most 1 ms), after it is visible; polls per second are bounded too. Requests that
// have no token yet are looked at first. Slots are read together, up to 64 with one transport read.
// A pass takes at most kMaxRecordsPerPass records; what is left comes in the next, which follows at
// once. Without requests the thread sleeps and wakes ten times a second to look at the heartbeat.
class TokenReader {
 public:
  TokenReader(const FrontEndConfig& config, RingClient& ring, SlotTracker& slots, Metrics& metrics,
              SpscQueue<TokenEvent>& events, Doorbell& events_bell);
  ~TokenReader();

  void start();
  // Asks for all requests to be aborted, waits up to `patience` for the ring's owner to do so, and
  // ends.
  void stop(std::chrono::milliseconds patience);

  // Network thread: the choice was submitted. The reader keeps it until its last event.
  void watch(Choice* choice);

  Health health() const { return health_.load(std::memory_order_relaxed); }

  static constexpr uint32_t kMaxRecordsPerPass = 4096;
  static constexpr std::chrono::milliseconds kHousekeepingInterval{100};

 private:
  // A slot under observation. Without a choice it is only cleaned up.
  struct Watch {
    Choice* choice = nullptr;
    uint32_t slot = 0;
    uint32_t sequence = 0;
    uint32_t num_seen = 0;    // records read
    bool is_claimed = false;  // the owner has taken the request
    bool is_abort_sent = false;
    bool is_over = false;             // drop the watch
    uint8_t num_empty_sightings = 0;  // unsettled slots: housekeeping passes that found it empty
  };
  // A slot that the next transport read brings news of.
  struct Reading {
    size_t index;  // of its watch in the list
    StatusWord status;
    uint32_t num_new;  // records; 0: only the status is read again
    bool is_last;      // nothing follows these records
  };

  void run();
  void take_new();
  void poll();
  void poll_list(std::vector<Watch>& list, bool moves_to_flowing);
  size_t gather(std::vector<Watch>& list, size_t next);
  void look_at(Watch& watch, size_t index);
  void read_gathered(std::vector<Watch>& list);
  void take(Watch& watch, const Reading& reading, size_t place);
  void announce(Watch& watch, size_t place, uint32_t num_new);
  void finish(Watch& watch, const blink_slot_status& after);
  void release_finished();
  std::span<std::byte> records_at(size_t place);
  bool clean_up(Watch& watch, const blink_slot_status& status);
  void send_abort_if_asked(Watch& watch, const StatusWord& status);
  void emit(const TokenEvent& event);
  void end_without_owner(Watch& watch, Ending ending, uint32_t error = BLINK_ERROR_NONE);
  void end_emptied(Watch& watch, uint32_t error);
  void sleep_for_work(uint32_t interval_us);
  void housekeep(Clock::time_point now);
  void judge_health(Clock::time_point now);
  void try_reconnect(Clock::time_point now);
  void leave_to_clean_up(const Watch& watch);
  bool refresh_statuses(std::initializer_list<const std::vector<Watch>*> lists);

  const FrontEndConfig& config_;
  RingClient& ring_;
  SlotTracker& slots_;
  Metrics& metrics_;
  SpscQueue<TokenEvent>& events_;
  Doorbell& events_bell_;

  SpscQueue<Choice*> new_;     // the urgent list's inbox
  std::vector<Watch> urgent_;  // no token yet
  std::vector<Watch> flowing_;
  std::vector<Watch> unsettled_;             // no choice
  std::vector<blink_slot_status> statuses_;  // the front end's mirror of its range
  bool has_emitted_ = false;
  uint32_t records_left_ = 0;  // of this pass

  // The transport read under way, and what it ends.
  size_t num_readings_ = 0;
  std::array<Reading, RingClient::kMaxSlotsARead> readings_;
  std::array<blink_slot_status, RingClient::kMaxSlotsARead> statuses_after_;
  std::vector<std::byte> records_;  // kMaxRecords for each reading
  size_t num_finished_ = 0;
  std::array<RingClient::Release, RingClient::kMaxSlotsARead> releases_;
  std::array<TokenEvent, RingClient::kMaxSlotsARead> endings_;

  PollPacer pacer_;

  HeartbeatJudge judge_;
  Clock::time_point last_housekeeping_;
  Clock::time_point next_reconnect_;
  uint64_t own_heartbeat_ = 0;
  uint64_t longest_step_ns_ = 0;
  std::atomic<Health> health_{Health::starting};  // relaxed: a gauge

  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  bool has_new_ = false;                  // under sleep_mutex_
  std::atomic<bool> is_stopping_{false};  // release and acquire: with it comes the deadline
  Clock::time_point stop_deadline_;       // set before is_stopping_, under sleep_mutex_
  std::thread thread_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_TOKEN_READER_H
