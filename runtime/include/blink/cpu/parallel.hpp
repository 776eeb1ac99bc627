// The CPU target's threads: one team runs each step together, all threads through the same code
// (SPMD).
//
// Work of a phase is claimed in chunks from one counter, so a core that is busy with something else
// holds nobody up for more than a chunk. Which thread computes a chunk never changes its result.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace blink::cpu {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// CPUs this process may use: its affinity mask, cut by the cgroup's quota (v2, then v1).
inline uint32_t usable_cpus() {
  uint32_t cpus = std::max(1u, std::thread::hardware_concurrency());
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) == 0) {
    cpus = std::max(1, CPU_COUNT(&mask));
  }
  long long quota = 0;
  long long period = 0;
  if (FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "re")) {
    if (std::fscanf(file, "%lld %lld", &quota, &period) != 2) quota = 0;
    std::fclose(file);
  } else if (FILE* v1 = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "re")) {
    if (std::fscanf(v1, "%lld", &quota) != 1) quota = 0;
    std::fclose(v1);
    if (FILE* p = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "re")) {
      if (std::fscanf(p, "%lld", &period) != 1) period = 0;
      std::fclose(p);
    }
  }
  if (quota > 0 && period > 0) {
    const auto allowed = static_cast<uint32_t>(std::max(1LL, (quota + period - 1) / period));
    cpus = std::min(cpus, allowed);
  }
  return cpus;
}

class Team;

// One thread's view of the team inside a step.
class Worker {
 public:
  Worker(Team& team, uint32_t index) : team_(team), index_(index) {}

  uint32_t index() const { return index_; }
  uint32_t num_threads() const;

  // Runs body(chunk) for each chunk in [0, num_chunks), shared among the threads, and waits for
  // all.
  template <typename Body>
  void phase(uint32_t num_chunks, Body&& body);

 private:
  Team& team_;
  uint32_t index_;
  uint32_t phase_ = 0;
};

class Team {
 public:
  // num_threads 0: as many as the process may use.
  explicit Team(uint32_t num_threads) : num_threads_(num_threads ? num_threads : usable_cpus()) {
    for (uint32_t i = 1; i < num_threads_; ++i) {
      threads_.emplace_back([this, i] { serve(i); });
    }
  }

  ~Team() {
    stop_.store(true, std::memory_order_relaxed);
    // release: pairs with the acquire in serve(), which then reads stop_
    start_.fetch_add(1, std::memory_order_release);
    start_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  uint32_t num_threads() const { return num_threads_; }

  // Runs job(Worker&) on every thread, the caller's included, and returns when all are through. One
  // call at a time. No allocation, no lock.
  template <typename Job>
  void run(Job& job) {
    job_ = &job;
    invoke_ = [](void* job_pointer, Worker& worker) { (*static_cast<Job*>(job_pointer))(worker); };
    counters_[0].value.store(0, std::memory_order_relaxed);
    if (num_threads_ > 1) {
      // release: pairs with the acquire in serve(); publishes job_, invoke_ and the counter
      start_.fetch_add(1, std::memory_order_release);
      if (sleepers_.load(std::memory_order_seq_cst) > 0) start_.notify_all();
    }
    Worker worker(*this, 0);
    job(worker);
    barrier();
  }

 private:
  friend class Worker;

  struct alignas(64) Counter {
    std::atomic<uint32_t> value{0};
  };

  static constexpr uint32_t kSpins = 4000;  // about 50 us before a thread sleeps

  void serve(uint32_t index) {
    uint32_t seen = 0;
    for (;;) {
      wait_until_changed(start_, seen);
      seen += 1;
      if (stop_.load(std::memory_order_relaxed)) return;
      Worker worker(*this, index);
      invoke_(job_, worker);
      barrier();
    }
  }

  // acquire: pairs with the release of whoever changes `word`
  void wait_until_changed(std::atomic<uint32_t>& word, uint32_t old) {
    for (uint32_t spin = 0; spin < kSpins; ++spin) {
      if (word.load(std::memory_order_acquire) != old) return;
      pause_cpu();
    }
    // seq_cst with the notifier's read of sleepers_: either it sees the sleeper or the sleeper sees
    // the change
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word.load(std::memory_order_seq_cst) == old) word.wait(old, std::memory_order_acquire);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  // The last thread to arrive clears `next`, the counter of the phase after this one.
  void barrier(Counter* next = nullptr) {
    if (num_threads_ == 1) {
      if (next) next->value.store(0, std::memory_order_relaxed);
      return;
    }
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    // acq_rel: every thread's writes before the barrier reach the last one, which releases them to
    // all
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      if (next) next->value.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst) > 0) generation_.notify_all();
      return;
    }
    wait_until_changed(generation_, generation);
  }

  uint32_t num_threads_;
  std::vector<std::thread> threads_;
  void* job_ = nullptr;
  void (*invoke_)(void*, Worker&) = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> start_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  Counter counters_[2];  // phase p claims from counter p % 2; the barrier before it has cleared it
};

inline uint32_t Worker::num_threads() const { return team_.num_threads_; }

template <typename Body>
void Worker::phase(uint32_t num_chunks, Body&& body) {
  Team::Counter& counter = team_.counters_[phase_ % 2];
  Team::Counter& next = team_.counters_[(phase_ + 1) % 2];
  phase_ += 1;
  for (;;) {
    // relaxed: chunks are independent; the barrier orders their results
    const uint32_t chunk = counter.value.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= num_chunks) break;
    body(chunk);
  }
  team_.barrier(&next);
}

// Rows in chunks: enough chunks to share, few enough to claim cheaply.
struct RowChunks {
  uint32_t rows;
  uint32_t size;

  RowChunks(uint32_t num_rows, uint32_t num_threads)
      : rows(num_rows), size(std::max(1u, num_rows / (4 * num_threads))) {}

  uint32_t count() const { return (rows + size - 1) / size; }
  uint32_t begin(uint32_t chunk) const { return chunk * size; }
  uint32_t end(uint32_t chunk) const { return std::min(rows, (chunk + 1) * size); }
};

}  // namespace blink::cpu
