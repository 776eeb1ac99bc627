#include "transport/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "transport/held_address.h"
#include "transport/ring_layout.h"

namespace blink {
namespace {

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

[[noreturn]] void fail(const std::string& peer, const std::string& what) {
  throw RingError("link to " + peer + ": " + what);
}

AddressList resolve(const std::string& host, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string service = std::to_string(port);
  const int code =
      ::getaddrinfo(host.empty() ? nullptr : host.c_str(), service.c_str(), &hints, &found);
  if (code != 0) fail(host + ":" + service, ::gai_strerror(code));
  return AddressList(found, ::freeaddrinfo);
}

// Waits for `events`; false: the deadline passed first.
bool wait_for(const Fd& socket, short events, SteadyTime deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd entry{socket.get(), events, 0};
    const int count =
        ::poll(&entry, 1, static_cast<int>(std::min<int64_t>(left.count() + 1, 60'000)));
    if (count > 0) return true;
    if (count < 0 && errno != EINTR) return false;
  }
}

std::string name_of(const sockaddr_storage& address, socklen_t length) {
  char host[NI_MAXHOST];
  char service[NI_MAXSERV];
  if (::getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host, sizeof(host),
                    service, sizeof(service), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown";
  }
  return std::string(host) + ":" + service;
}

Fd open_socket(const addrinfo& address) {
  return Fd(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

}  // namespace

Fd tcp_connect(const std::string& host, uint16_t port, SteadyTime deadline) {
  const std::string peer = host + ":" + std::to_string(port);
  std::string why = "no address";
  const AddressList addresses = resolve(host, port, 0);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Fd socket = open_socket(*address);
    if (!socket.is_open()) continue;
    int error = 0;
    if (::connect(socket.get(), address->ai_addr, address->ai_addrlen) != 0) {
      error = errno;
      if (error == EINPROGRESS) {
        if (!wait_for(socket, POLLOUT, deadline)) {
          throw RingAbsent("link to " + peer + ": no answer to connect in time");
        }
        socklen_t length = sizeof(error);
        ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
      }
    }
    if (error == 0) {
      const int one = 1;
      ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
      return socket;
    }
    why = std::strerror(error);
  }
  throw RingAbsent("link to " + peer + ": cannot connect: " + why);
}

void tcp_send(const Fd& socket, std::span<const std::byte> bytes, SteadyTime deadline,
              const std::string& peer) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count > 0) {
      bytes = bytes.subspan(static_cast<size_t>(count));
    } else if (count < 0 && errno != EAGAIN && errno != EINTR) {
      fail(peer, std::string("cannot send: ") + std::strerror(errno));
    } else if (!wait_for(socket, POLLOUT, deadline)) {
      fail(peer, "the peer takes no bytes: deadline passed");
    }
  }
}

void tcp_receive(const Fd& socket, std::span<std::byte> bytes, SteadyTime deadline,
                 const std::string& peer) {
  while (!bytes.empty()) {
    const ssize_t count = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (count > 0) {
      bytes = bytes.subspan(static_cast<size_t>(count));
    } else if (count == 0) {
      fail(peer, "the peer closed the connection (not a blink owner, or it refused)");
    } else if (errno != EAGAIN && errno != EINTR) {
      fail(peer, std::string("cannot receive: ") + std::strerror(errno));
    } else if (!wait_for(socket, POLLIN, deadline)) {
      fail(peer, "the peer says nothing: deadline passed");
    }
  }
}

Fd tcp_hold(const std::string& host, uint16_t port) {
  const AddressList addresses = resolve(host, port, AI_PASSIVE);
  std::string why = "no address";
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Fd socket = open_socket(*address);
    const int error = hold_address(socket, address->ai_addr, address->ai_addrlen);
    if (error == 0) return socket;
    why = std::strerror(error);
  }
  throw RingError("cannot listen on " + host + ":" + std::to_string(port) + ": " + why);
}

void tcp_listen(const Fd& held) {
  const int error = listen_on_held(held, 16);
  if (error == 0) return;
  throw RingError("cannot listen on " + tcp_local_name(held) + ": " + std::strerror(error));
}

uint16_t tcp_local_port(const Fd& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string tcp_local_name(const Fd& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return name_of(address, length);
}

std::string tcp_peer_name(const Fd& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return name_of(address, length);
}

uint32_t tcp_local_ipv4(const Fd& socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  if (address.ss_family != AF_INET) return 0;
  return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr);
}

// About six seconds: two of silence, then four probes one second apart.
void tcp_watch_peer(const Fd& socket) {
  const auto set = [&](int level, int option, int value) {
    ::setsockopt(socket.get(), level, option, &value, sizeof(value));
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 2);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
}

bool tcp_is_closed(const Fd& socket) {
  for (int i = 0; i < 4; ++i) {
    char bytes[256];
    const ssize_t count = ::recv(socket.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (count > 0) continue;
    return count == 0 || (errno != EAGAIN && errno != EINTR);
  }
  return true;  // a peer that keeps talking has lost the protocol
}

}  // namespace blink
