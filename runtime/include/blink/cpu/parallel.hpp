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
#include <exception>
#include <memory>
#include <stdexcept>
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

// One thread's view of the team inside a job. All threads call the same phases in the same order,
// with the same numbers of chunks.
class Worker {
 public:
  Worker(Team& team, uint32_t index, uint64_t first_tag)
      : team_(team), index_(index), tag_(first_tag) {}

  uint32_t index() const { return index_; }
  uint32_t num_threads() const;

  // Runs body(chunk) for each chunk in [0, num_chunks), shared among the threads, and returns once
  // all chunks are done, whoever did them.
  template <typename Body>
  void phase(uint32_t num_chunks, Body&& body);

 private:
  friend class Team;
  Team& team_;
  uint32_t index_;
  uint64_t tag_;  // of the next phase, unique over all jobs
};

// What the threads run: a function and a few words, copied, so that a thread which comes late
// touches nothing that is gone.
struct Job {
  static constexpr uint32_t kWords = 4;
  void (*run)(Worker&, const uint64_t* words) = nullptr;
  uint64_t words[kWords] = {};
};

// Phases end when their chunks are done, not when all threads have arrived: a thread without a core
// holds up at most the chunk it has claimed. Coming late, it finds every chunk of the phases it
// missed taken and runs through them. Tags keep it out of phases that use the same slot later.
class Team {
 public:
  // num_threads 0: as many as the process may use. Throws std::runtime_error when the system gives
  // fewer.
  explicit Team(uint32_t num_threads)
      : num_threads_(num_threads ? num_threads : usable_cpus()),
        finished_(std::make_unique<std::atomic<uint32_t>[]>(num_threads_)) {
    try {
      for (uint32_t i = 1; i < num_threads_; ++i) {
        threads_.emplace_back([this, i] { serve(i); });
      }
    } catch (const std::exception& error) {
      const size_t started = threads_.size();
      end_threads();
      throw std::runtime_error(std::to_string(started + 1) + " of " + std::to_string(num_threads_) +
                               " threads started: " + error.what());
    }
  }

  ~Team() { end_threads(); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  uint32_t num_threads() const { return num_threads_; }

  // Runs the job on all threads, the caller's included, and returns when all its phases are done.
  // Other threads may still be on their way through it. One call at a time. No allocation, no lock.
  void start(const Job& job) {
    const uint32_t number = start_.load(std::memory_order_relaxed) + 1;
    Posted& posted = posted_[number % kPosted];
    posted.run.store(job.run, std::memory_order_relaxed);
    posted.first_tag.store(next_tag_, std::memory_order_relaxed);
    for (uint32_t i = 0; i < Job::kWords; ++i) {
      posted.words[i].store(job.words[i], std::memory_order_relaxed);
    }
    if (num_threads_ > 1) {
      // release: publishes the posted job. pairs: acquire in serve()
      start_.store(number, std::memory_order_release);
      wake();
    }
    Worker worker(*this, 0, next_tag_);
    job.run(worker, job.words);
    next_tag_ = worker.tag_;
  }

  // The same for a callable of the caller's, job(Worker&), which no thread touches any more on
  // return.
  template <typename Callable>
  void run(Callable& callable) {
    Job job;
    job.run = [](Worker& worker, const uint64_t* words) {
      (*reinterpret_cast<Callable*>(words[0]))(worker);
    };
    job.words[0] = reinterpret_cast<uint64_t>(&callable);
    start(job);
    const uint32_t number = start_.load(std::memory_order_relaxed);
    for (uint32_t i = 1; i < num_threads_; ++i) {
      // acquire: pairs with the release of finished_ in serve()
      wait_until([&] { return finished_[i].load(std::memory_order_acquire) == number; });
    }
  }

 private:
  friend class Worker;

  static constexpr uint32_t kPosted = 8;  // jobs that a slow reader may still be copying
  static constexpr uint32_t kSlots = 64;  // phases whose words are kept
  static constexpr uint32_t kCountBits = 24;
  static constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;
  static constexpr uint32_t kSpins = 500;  // about 10 us
  static constexpr uint32_t kYields = 20;  // then let others have the core

  struct Posted {
    std::atomic<void (*)(Worker&, const uint64_t*)> run{nullptr};
    std::atomic<uint64_t> first_tag{0};
    std::atomic<uint64_t> words[Job::kWords] = {};
  };

  // Both words: tag << 24 | chunks. An older tag counts as no chunk of this phase.
  struct alignas(64) Slot {
    std::atomic<uint64_t> claimed{0};
    std::atomic<uint64_t> done{0};
  };

  void serve(uint32_t index) {
    uint32_t seen = 0;
    for (;;) {
      // acquire: pairs with the release of start_ in start()
      wait_until([&] { return start_.load(std::memory_order_acquire) != seen; });
      if (stop_.load(std::memory_order_relaxed)) return;
      seen = start_.load(std::memory_order_acquire);
      const Posted& posted = posted_[seen % kPosted];
      Job job;
      job.run = posted.run.load(std::memory_order_relaxed);
      const uint64_t first_tag = posted.first_tag.load(std::memory_order_relaxed);
      for (uint32_t i = 0; i < Job::kWords; ++i) {
        job.words[i] = posted.words[i].load(std::memory_order_relaxed);
      }
      std::atomic_thread_fence(std::memory_order_acquire);
      // kPosted jobs later the words may have been overwritten while they were copied: take a newer
      // job
      if (start_.load(std::memory_order_relaxed) - seen >= kPosted - 1) continue;
      Worker worker(*this, index, first_tag);
      job.run(worker, job.words);
      finished_[index].store(seen, std::memory_order_release);
      wake();
    }
  }

  // Next chunk of the phase, or num_chunks when there is none left for this thread. relaxed: what a
  // chunk reads was ordered by the wait for the phase before.
  static uint32_t claim(Slot& slot, uint64_t tag, uint32_t num_chunks) {
    uint64_t old = slot.claimed.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t old_tag = old >> kCountBits;
      if (old_tag > tag) return num_chunks;  // others are far ahead
      const auto chunk = static_cast<uint32_t>(old_tag == tag ? old & kCountMask : 0);
      if (chunk >= num_chunks) return num_chunks;
      const uint64_t next = tag << kCountBits | (chunk + 1);
      if (slot.claimed.compare_exchange_weak(old, next, std::memory_order_relaxed)) return chunk;
    }
  }

  void finish(Slot& slot, uint64_t tag, uint32_t num_chunks) {
    uint64_t old = slot.done.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t count = (old >> kCountBits == tag ? old & kCountMask : 0) + 1;
      const uint64_t next = tag << kCountBits | count;
      // acq_rel: gathers the writes of all chunks. pairs: acquire in is_done()
      if (slot.done.compare_exchange_weak(old, next, std::memory_order_acq_rel,
                                          std::memory_order_relaxed)) {
        if (count == num_chunks) wake();
        return;
      }
    }
  }

  static bool is_done(const Slot& slot, uint64_t tag, uint32_t num_chunks) {
    const uint64_t word = slot.done.load(std::memory_order_acquire);
    const uint64_t found = word >> kCountBits;
    return found > tag || (found == tag && (word & kCountMask) == num_chunks);
  }

  void end_threads() {
    stop_.store(true, std::memory_order_relaxed);
    // release: pairs with the acquire in serve(), which then reads stop_
    start_.fetch_add(1, std::memory_order_release);
    wake();
    for (std::thread& thread : threads_) thread.join();
  }

  // Whoever changed what a thread may wait for calls this. seq_cst against the sleeper's count and
  // reading of event_: either the sleeper is seen here, or it sees the change.
  void wake() {
    event_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) event_.notify_all();
  }

  // Spins, yields, then sleeps until `condition` holds; the phases' chunks, or the team's end, make
  // it hold.
  template <typename Condition>
  void wait_until(Condition&& condition) {
    for (uint32_t spin = 0; spin < kSpins; ++spin) {
      if (condition()) return;
      pause_cpu();
    }
    for (uint32_t yield = 0; yield < kYields; ++yield) {
      if (condition()) return;
      sched_yield();
    }
    for (;;) {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t event = event_.load(std::memory_order_seq_cst);
      const bool holds = condition();
      if (!holds) event_.wait(event, std::memory_order_seq_cst);
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
      if (holds || condition()) return;
    }
  }

  uint32_t num_threads_;
  uint64_t next_tag_ = 1;
  std::unique_ptr<std::atomic<uint32_t>[]> finished_;  // by thread: the last job it has left
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
  Posted posted_[kPosted];
  alignas(64) std::atomic<uint32_t> start_{0};  // number of the last job
  alignas(64) std::atomic<uint32_t> event_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  Slot slots_[kSlots];
};

inline uint32_t Worker::num_threads() const { return team_.num_threads_; }

template <typename Body>
void Worker::phase(uint32_t num_chunks, Body&& body) {
  if (team_.num_threads_ == 1) {
    for (uint32_t chunk = 0; chunk < num_chunks; ++chunk) body(chunk);
    return;
  }
  const uint64_t tag = tag_++;
  if (num_chunks == 0) return;
  Team::Slot& slot = team_.slots_[tag % Team::kSlots];
  for (;;) {
    const uint32_t chunk = Team::claim(slot, tag, num_chunks);
    if (chunk >= num_chunks) break;
    body(chunk);
    team_.finish(slot, tag, num_chunks);
  }
  team_.wait_until([&] { return Team::is_done(slot, tag, num_chunks); });
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
