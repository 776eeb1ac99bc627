// A named POSIX shared memory region, zeroed when made: where a CPU target's ring lives.
#ifndef BLINK_TRANSPORT_SHARED_MEMORY_H
#define BLINK_TRANSPORT_SHARED_MEMORY_H

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace blink {

class SharedMemory {
 public:
  // Makes a new region; fails if the name is taken. The maker unlinks the name when it is
  // destroyed.
  static SharedMemory create(const std::string& name, uint64_t num_bytes);
  // Opens an existing one.
  static SharedMemory open(const std::string& name);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  std::span<std::byte> bytes() const { return {data_, num_bytes_}; }
  const std::string& name() const { return name_; }

 private:
  SharedMemory(std::string name, std::byte* data, uint64_t num_bytes, bool owns_name)
      : name_(std::move(name)), data_(data), num_bytes_(num_bytes), owns_name_(owns_name) {}

  std::string name_;
  std::byte* data_;
  uint64_t num_bytes_;
  bool owns_name_;
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_SHARED_MEMORY_H
