#include "transport/held_address.h"

#include <cerrno>

namespace blink {
namespace {

int set_reuse(const Fd& socket) {
  const int one = 1;
  return ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) == 0 ? 0 : errno;
}

}  // namespace

int hold_address(const Fd& socket, const sockaddr* address, socklen_t length) {
  // With SO_REUSEADDR two sockets may be bound to one address while neither listens. Without it,
  // connections of an earlier server that are not quite over hold the address: only then it is set.
  if (::bind(socket.get(), address, length) == 0) return 0;
  if (errno != EADDRINUSE) return errno;
  if (const int error = set_reuse(socket); error != 0) return error;
  return ::bind(socket.get(), address, length) == 0 ? 0 : errno;
}

int listen_on_held(const Fd& socket, int backlog) {
  // Accepted sockets inherit it, and let the next server bind while they are ending.
  if (const int error = set_reuse(socket); error != 0) return error;
  return ::listen(socket.get(), backlog) == 0 ? 0 : errno;
}

}  // namespace blink
