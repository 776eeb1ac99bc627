// A team of real threads, so that the policy's cooperation is tested (and watched by TSAN) without
// a GPU.
#ifndef BLINK_TESTS_SCHEDULER_TEAM_THREADS_H
#define BLINK_TESTS_SCHEDULER_TEAM_THREADS_H

#include <atomic>
#include <barrier>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "blink/device/platform.cuh"

namespace blink::testing {

class ThreadTeam;

// One member; meets the interface of SingleThread and BlockThreads.
class TeamMember {
 public:
  TeamMember(ThreadTeam& team, uint32_t id) : team_(team), id_(id) {}
  uint32_t id() const { return id_; }
  uint32_t count() const;
  bool is_leader() const { return id_ == 0; }
  void sync() const;
  uint32_t append(uint32_t* counter) const {
    return std::atomic_ref<uint32_t>(*counter).fetch_add(1, std::memory_order_relaxed);
  }
  uint64_t exclusive_sum(uint64_t value, uint64_t* total) const;
  void raise(uint32_t* word, uint32_t value) const {
    std::atomic_ref<uint32_t> shared(*word);
    uint32_t seen = shared.load(std::memory_order_relaxed);
    while (seen < value && !shared.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
  }

 private:
  ThreadTeam& team_;
  uint32_t id_;
};

// Keeps its threads between runs; the caller is member 0.
class ThreadTeam {
 public:
  explicit ThreadTeam(uint32_t count)
      : scratch_(count), barrier_(static_cast<std::ptrdiff_t>(count)) {
    for (uint32_t id = 1; id < count; ++id) {
      threads_.emplace_back([this, id] {
        for (;;) {
          barrier_.arrive_and_wait();
          if (!task_) return;
          TeamMember member(*this, id);
          task_(member);
          barrier_.arrive_and_wait();
        }
      });
    }
  }

  ~ThreadTeam() {
    task_ = nullptr;
    barrier_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }

  void run(std::function<void(TeamMember&)> task) {
    task_ = std::move(task);
    barrier_.arrive_and_wait();
    TeamMember member(*this, 0);
    task_(member);
    barrier_.arrive_and_wait();
  }

 private:
  friend class TeamMember;
  std::vector<uint64_t> scratch_;
  std::barrier<> barrier_;
  std::function<void(TeamMember&)> task_;
  std::vector<std::thread> threads_;
};

inline uint32_t TeamMember::count() const { return static_cast<uint32_t>(team_.scratch_.size()); }
inline void TeamMember::sync() const { team_.barrier_.arrive_and_wait(); }

inline uint64_t TeamMember::exclusive_sum(uint64_t value, uint64_t* total) const {
  team_.barrier_.arrive_and_wait();
  team_.scratch_[id_] = value;
  team_.barrier_.arrive_and_wait();
  uint64_t before = 0;
  uint64_t sum = 0;
  for (uint32_t i = 0; i < team_.scratch_.size(); ++i) {
    if (i == id_) before = sum;
    sum += team_.scratch_[i];
  }
  *total = sum;
  return before;
}

}  // namespace blink::testing

#endif  // BLINK_TESTS_SCHEDULER_TEAM_THREADS_H
