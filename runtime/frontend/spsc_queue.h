// A bounded queue between exactly one producer thread and one consumer thread.
#ifndef BLINK_FRONTEND_SPSC_QUEUE_H
#define BLINK_FRONTEND_SPSC_QUEUE_H

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace blink {

// Hot path: no allocation, no lock. Each side keeps a copy of the other's index, so that the shared
// cache lines move once per lap and not once per item.
template <typename T>
class SpscQueue {
 public:
  explicit SpscQueue(size_t min_capacity)
      : capacity_(std::bit_ceil(min_capacity)), items_(std::make_unique<T[]>(capacity_)) {}

  // Producer. False: full.
  [[nodiscard]] bool push(T item) {
    const size_t tail = tail_.load(std::memory_order_relaxed);
    if (tail - head_seen_ == capacity_) {
      head_seen_ =
          head_.load(std::memory_order_acquire);  // pairs with pop's release: the item is free
      if (tail - head_seen_ == capacity_) return false;
    }
    items_[tail & (capacity_ - 1)] = std::move(item);
    tail_.store(tail + 1, std::memory_order_release);  // pairs with pop's acquire
    return true;
  }

  // Consumer. False: empty.
  [[nodiscard]] bool pop(T& item) {
    const size_t head = head_.load(std::memory_order_relaxed);
    if (head == tail_seen_) {
      tail_seen_ = tail_.load(std::memory_order_acquire);  // pairs with push's release
      if (head == tail_seen_) return false;
    }
    item = std::move(items_[head & (capacity_ - 1)]);
    head_.store(head + 1, std::memory_order_release);  // pairs with push's acquire
    return true;
  }

 private:
  const size_t capacity_;
  std::unique_ptr<T[]> items_;
  alignas(64) std::atomic<size_t> tail_{0};
  size_t head_seen_ = 0;  // producer's
  alignas(64) std::atomic<size_t> head_{0};
  size_t tail_seen_ = 0;  // consumer's
};

// Lets one thread sleep until another has work for it. Waking costs two atomic operations when
// nobody sleeps. (std::atomic's wait yields some times first: where threads share a core that is a
// switch to the others and back each time.)
class Doorbell {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void ring() {
    // Sequentially consistent with wait's: either the sleeper sees the new value, or we see it.
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (has_sleeper_.load(std::memory_order_seq_cst)) {
      ::syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }
  }
  // Returns at once if it rang since `seen` was taken.
  void wait(uint32_t seen) {
    has_sleeper_.store(true, std::memory_order_seq_cst);  // pairs with ring's load
    while (value_.load(std::memory_order_seq_cst) == seen) {
      ::syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    has_sleeper_.store(false, std::memory_order_relaxed);
  }

 private:
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));  // the kernel looks at it
  std::atomic<uint32_t> value_{0};
  std::atomic<bool> has_sleeper_{false};
};

}  // namespace blink

#endif  // BLINK_FRONTEND_SPSC_QUEUE_H
