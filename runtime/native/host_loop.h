// The `host` placement: a thread that alternates the scheduler's kernel and the graph it chose.
//
// It calls the CUDA driver through dlsym, so that this module is built and loads without CUDA.
#ifndef BLINK_NATIVE_HOST_LOOP_H
#define BLINK_NATIVE_HOST_LOOP_H

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace blink {

// Handles of the CUDA driver as integers, and what the scheduler's kernel takes.
struct HostLoopConfig {
  std::string library = "libcuda.so.1";
  uint64_t context = 0;          // CUcontext
  uint64_t stream = 0;           // CUstream
  uint64_t step_function = 0;    // CUfunction of blink_scheduler_host_step
  uint64_t state_address = 0;    // its first argument, on the device
  uint64_t mailbox_address = 0;  // HostMailbox of launch.cuh, where this process reads it
  uint32_t num_threads = 0;      // of the one block of step_function
  std::vector<uint64_t> execs;   // CUgraphExec by key index
};

class HostLoop {
 public:
  // Throws RingError when the driver's library or a function of it is not there.
  explicit HostLoop(HostLoopConfig config);
  ~HostLoop();
  HostLoop(const HostLoop&) = delete;
  HostLoop& operator=(const HostLoop&) = delete;

  void start();
  // Waits for the loop's end; true if it came within `timeout_s`.
  bool join(double timeout_s);
  // The driver's error that ended the loop, 0: none. Sticky: nothing runs on that GPU any more.
  int error() const { return error_.load(std::memory_order_acquire); }
  uint64_t num_steps() const { return num_steps_.load(std::memory_order_relaxed); }

 private:
  struct Calls;

  void run();
  int run_until_stop();
  int run_scheduler_step(uint32_t launch_error) const;

  HostLoopConfig config_;
  std::unique_ptr<const Calls> calls_;
  std::atomic<int> error_{0};
  std::atomic<uint64_t> num_steps_{0};
  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace blink

#endif  // BLINK_NATIVE_HOST_LOOP_H
