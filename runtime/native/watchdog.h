// Ends the process once the ring's owner shows no life, so that a supervisor restarts it.
//
// After a sticky CUDA error nothing runs on the GPU any more, and calls into the driver may not
// return: whoever would stop cleanly could wait for ever. So this thread needs neither Python nor
// CUDA: it reads the ring's header four times a second, says what it saw, gives the front end time
// to tell its clients, and calls _exit.
#ifndef BLINK_NATIVE_WATCHDOG_H
#define BLINK_NATIVE_WATCHDOG_H

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "blink/abi.hpp"
#include "transport/heartbeat_judge.h"

namespace blink {

struct WatchdogConfig {
  std::chrono::milliseconds shortest_silence{2000};
  std::chrono::milliseconds grace{2000};  // from the verdict to the end: health says 503 meanwhile
  int exit_status = 70;                   // EX_SOFTWARE
};

class Watchdog {
 public:
  // `header` is in this process's memory and outlives the watchdog.
  Watchdog(const blink_ring_header* header, const WatchdogConfig& config);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Looks no more; call before the owner is told to stop. Safe to call twice.
  void disarm();

 private:
  void run();
  bool sleep(std::chrono::milliseconds time);  // false: disarmed meanwhile
  OwnerVerdict look();
  void say_last_words(OwnerVerdict verdict) const;

  const blink_ring_header* header_;
  WatchdogConfig config_;
  HeartbeatJudge judge_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool is_disarmed_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace blink

#endif  // BLINK_NATIVE_WATCHDOG_H
