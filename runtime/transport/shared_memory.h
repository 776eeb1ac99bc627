// A named POSIX shared memory region, zeroed when made: where a CPU target's ring lives.
#ifndef BLINK_TRANSPORT_SHARED_MEMORY_H
#define BLINK_TRANSPORT_SHARED_MEMORY_H

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "transport/fd.h"

namespace blink {

class SharedMemory {
 public:
  // Makes a new region; fails if the name is taken. The maker unlinks the name when it is
  // destroyed, and holds a file lock until then, so that others can tell whether it lives.
  static SharedMemory create(const std::string& name, uint64_t num_bytes);
  // Unlinks rings whose name begins with `prefix` and whose maker died without unlinking them: each
  // may hold hundreds of megabytes. Returns how many.
  static int remove_stale(const std::string& prefix);
  // Unlinks one that was opened under `name` if its maker died without it and the name is still its
  // own. True: it did.
  static bool remove_if_stale(const Fd& fd, const std::string& name);
  // Whether there is one of this name.
  static bool is_taken(const std::string& name);
  // Opens an existing one.
  static SharedMemory open(const std::string& name);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  // Maker's: moves the region to another name; throws RingError when that is taken.
  void rename(const std::string& name);
  // False: the maker has ended, whether it unlinked the name or not. One system call.
  bool has_living_maker() const;
  // Takes range `index` for this object's life; false: another process has it.
  bool hold_range(uint32_t index) const;

  std::span<std::byte> bytes() const { return {data_, num_bytes_}; }
  const std::string& name() const { return name_; }

 private:
  SharedMemory(std::string name, std::byte* data, uint64_t num_bytes, int fd, bool is_maker)
      : name_(std::move(name)), data_(data), num_bytes_(num_bytes), fd_(fd), is_maker_(is_maker) {}

  std::string name_;
  std::byte* data_;
  uint64_t num_bytes_;
  int fd_;  // carries the locks
  bool is_maker_;
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_SHARED_MEMORY_H
