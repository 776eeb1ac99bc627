// An address that is taken before anybody may connect: bound, but not listened on.
#ifndef BLINK_TRANSPORT_HELD_ADDRESS_H
#define BLINK_TRANSPORT_HELD_ADDRESS_H

#include <sys/socket.h>

#include "transport/fd.h"

namespace blink {

// Binds so that no other process gets the address, though nobody listens yet: clients are refused
// until listen_on_held(). Returns 0, or an errno.
[[nodiscard]] int hold_address(const Fd& socket, const sockaddr* address, socklen_t length);

// Returns 0, or an errno.
[[nodiscard]] int listen_on_held(const Fd& socket, int backlog);

}  // namespace blink

#endif  // BLINK_TRANSPORT_HELD_ADDRESS_H
