// TCP as the bootstrap of a link needs it: few bytes, at start only, never without a deadline.
#ifndef BLINK_TRANSPORT_TCP_SOCKET_H
#define BLINK_TRANSPORT_TCP_SOCKET_H

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "transport/fd.h"

namespace blink {

using SteadyTime = std::chrono::steady_clock::time_point;

// Each throws RingError naming the peer, what it waited for and why it ended.
Fd tcp_connect(const std::string& host, uint16_t port, SteadyTime deadline);
void tcp_send(const Fd& socket, std::span<const std::byte> bytes, SteadyTime deadline,
              const std::string& peer);
void tcp_receive(const Fd& socket, std::span<std::byte> bytes, SteadyTime deadline,
                 const std::string& peer);

// A non-blocking socket that holds the address and does not listen yet (held_address.h); port 0
// takes any free one.
Fd tcp_hold(const std::string& host, uint16_t port);
void tcp_listen(const Fd& held);
uint16_t tcp_local_port(const Fd& socket);

// "10.0.0.1:7471" of the socket's own end, or of the peer's.
std::string tcp_local_name(const Fd& socket);
std::string tcp_peer_name(const Fd& socket);
// The own end's address when it is IPv4, in host order; else 0.
uint32_t tcp_local_ipv4(const Fd& socket);

// Lets the kernel find out within some seconds that a peer's machine or link is gone.
void tcp_watch_peer(const Fd& socket);
// True: the peer closed or the kernel gave it up. Reads and drops what came in. Never blocks.
bool tcp_is_closed(const Fd& socket);

}  // namespace blink

#endif  // BLINK_TRANSPORT_TCP_SOCKET_H
