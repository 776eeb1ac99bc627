#include "frontend/small_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "transport/fd.h"

namespace blink {
namespace {

constexpr size_t kMaxBytes = 1 << 20;

}  // namespace

std::string read_small_file(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) throw std::runtime_error(path + ": " + std::strerror(errno));
  std::string text;
  char piece[4096];
  while (true) {
    const ssize_t count = ::read(file.get(), piece, sizeof(piece));
    if (count == 0) return text;
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
    text.append(piece, static_cast<size_t>(count));
    if (text.size() > kMaxBytes) throw std::runtime_error(path + ": larger than 1 MiB");
  }
}

}  // namespace blink
