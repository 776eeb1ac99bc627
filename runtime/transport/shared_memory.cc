#include "transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/ring_layout.h"

namespace blink {
namespace {

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

[[noreturn]] void fail(const std::string& what, const std::string& name) {
  throw RingError("shared memory " + name + ": " + what + ": " + std::strerror(errno));
}

std::byte* map(const Fd& fd, uint64_t num_bytes, const std::string& name) {
  void* data = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) fail("cannot map " + std::to_string(num_bytes) + " bytes", name);
  return static_cast<std::byte*>(data);
}

}  // namespace

SharedMemory SharedMemory::create(const std::string& name, uint64_t num_bytes) {
  const Fd fd(::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (fd.get() < 0) fail("cannot create", name);
  try {
    // posix_fallocate, not ftruncate: a full /dev/shm is an error here, not a SIGBUS in traffic.
    if (const int code = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(num_bytes)); code != 0) {
      errno = code;
      fail("cannot reserve " + std::to_string(num_bytes) + " bytes", name);
    }
    return SharedMemory(name, map(fd, num_bytes, name), num_bytes, true);
  } catch (...) {
    ::shm_unlink(name.c_str());
    throw;
  }
}

SharedMemory SharedMemory::open(const std::string& name) {
  const Fd fd(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (fd.get() < 0) fail("cannot open", name);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) fail("cannot stat", name);
  const auto num_bytes = static_cast<uint64_t>(info.st_size);
  if (num_bytes < sizeof(blink_ring_header)) {
    throw RingError("shared memory " + name + ": " + std::to_string(num_bytes) +
                    " bytes are too few for a ring");
  }
  return SharedMemory(name, map(fd, num_bytes, name), num_bytes, false);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : name_(std::move(other.name_)),
      data_(std::exchange(other.data_, nullptr)),
      num_bytes_(std::exchange(other.num_bytes_, 0)),
      owns_name_(std::exchange(other.owns_name_, false)) {}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, num_bytes_);
  if (owns_name_) ::shm_unlink(name_.c_str());
}

}  // namespace blink
