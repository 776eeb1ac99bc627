#include "transport/shared_memory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "transport/fd.h"
#include "transport/ring_layout.h"

namespace blink {
namespace {

const std::string kFolder = "/dev/shm";

[[noreturn]] void fail(const std::string& what, const std::string& name) {
  throw RingError("shared memory " + name + ": " + what + ": " + std::strerror(errno));
}

std::byte* map(const Fd& fd, uint64_t num_bytes, const std::string& name) {
  void* data = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) fail("cannot map " + std::to_string(num_bytes) + " bytes", name);
  return static_cast<std::byte*>(data);
}

// Locks far beyond the region's bytes: one for the maker, one for each range. They belong to the
// open file, so they go when the last descriptor does, however the process ends.
constexpr off_t kMakerLock = off_t{1} << 40;
constexpr off_t kFirstRangeLock = kMakerLock + 1;

struct flock lock_of(off_t position) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = position;
  lock.l_len = 1;
  return lock;
}

}  // namespace

SharedMemory SharedMemory::create(const std::string& name, uint64_t num_bytes) {
  Fd fd(::shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  if (fd.get() < 0) fail("cannot create", name);
  try {
    // posix_fallocate, not ftruncate: a full /dev/shm is an error here, not a SIGBUS in traffic.
    if (const int code = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(num_bytes)); code != 0) {
      errno = code;
      fail("cannot reserve " + std::to_string(num_bytes) + " bytes", name);
    }
    struct flock maker = lock_of(kMakerLock);
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 || ::fcntl(fd.get(), F_OFD_SETLK, &maker) != 0) {
      fail("cannot lock", name);
    }
    std::byte* data = map(fd, num_bytes, name);
    return SharedMemory(name, data, num_bytes, fd.release(), true);
  } catch (...) {
    ::shm_unlink(name.c_str());
    throw;
  }
}

SharedMemory SharedMemory::open(const std::string& name) {
  Fd fd(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (fd.get() < 0) {
    throw RingAbsent("shared memory " + name + ": cannot open: " + std::strerror(errno));
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) fail("cannot stat", name);
  const auto num_bytes = static_cast<uint64_t>(info.st_size);
  if (num_bytes < sizeof(blink_ring_header)) {
    throw RingError("shared memory " + name + ": " + std::to_string(num_bytes) +
                    " bytes are too few for a ring");
  }
  std::byte* data = map(fd, num_bytes, name);
  return SharedMemory(name, data, num_bytes, fd.release(), false);
}

int SharedMemory::remove_stale(const std::string& prefix) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(kFolder.c_str()), ::closedir);
  int count = 0;
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr) {
    const std::string name = "/" + std::string(entry->d_name);
    if (!name.starts_with(prefix)) continue;
    const Fd fd(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
    if (fd.is_open() && remove_if_stale(fd, name)) ++count;
  }
  return count;
}

bool SharedMemory::remove_if_stale(const Fd& fd, const std::string& name) {
  // A ring that is being made has no magic yet; one that lives is locked.
  uint64_t magic = 0;
  const bool is_ring =
      ::pread(fd.get(), &magic, sizeof(magic), 0) == sizeof(magic) && magic == BLINK_MAGIC;
  if (!is_ring || ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) return false;
  // Only whoever has the lock of its region removes a name. So what the name means now it means
  // until it is removed here; it may be the ring of someone who removed this one before.
  struct stat ours {};
  struct stat named {};
  if (::fstat(fd.get(), &ours) != 0 || ::stat((kFolder + name).c_str(), &named) != 0) return false;
  if (ours.st_dev != named.st_dev || ours.st_ino != named.st_ino) return false;
  return ::shm_unlink(name.c_str()) == 0;
}

bool SharedMemory::is_taken(const std::string& name) {
  const Fd fd(::shm_open(name.c_str(), O_RDONLY | O_CLOEXEC, 0));
  return fd.is_open() || errno != ENOENT;
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : name_(std::move(other.name_)),
      data_(std::exchange(other.data_, nullptr)),
      num_bytes_(std::exchange(other.num_bytes_, 0)),
      fd_(std::exchange(other.fd_, -1)),
      is_maker_(other.is_maker_) {}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, num_bytes_);
  if (fd_ < 0) return;
  if (is_maker_) ::shm_unlink(name_.c_str());
  ::close(fd_);
}

void SharedMemory::rename(const std::string& name) {
  if (name.size() < 2 || name[0] != '/' || name.find('/', 1) != std::string::npos) {
    throw RingError("shared memory " + name + ": a name begins with its only '/'");
  }
  if (::renameat2(AT_FDCWD, (kFolder + name_).c_str(), AT_FDCWD, (kFolder + name).c_str(),
                  RENAME_NOREPLACE) != 0) {
    fail("cannot be named so", name);
  }
  name_ = name;
}

bool SharedMemory::has_living_maker() const {
  struct flock lock = lock_of(kMakerLock);
  return ::fcntl(fd_, F_OFD_GETLK, &lock) == 0 && (is_maker_ || lock.l_type != F_UNLCK);
}

bool SharedMemory::hold_range(uint32_t index) const {
  struct flock lock = lock_of(kFirstRangeLock + index);
  return ::fcntl(fd_, F_OFD_SETLK, &lock) == 0;
}

}  // namespace blink
