// A ring in another process or machine, as Python holds it: where it is and how to reach it.
#ifndef BLINK_NATIVE_LINK_HANDLE_H
#define BLINK_NATIVE_LINK_HANDLE_H

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <string>

#include "transport/reconnecting_transport.h"

namespace blink {

class LinkHandle {
 public:
  explicit LinkHandle(ReconnectingTransport::Connect connect);

  // Connects, and again after a loss for as long as the transport lives. Throws RingError.
  std::unique_ptr<Transport> connect() const;
  // Why the last attempt failed; empty after one that did not.
  std::string problem() const;
  uint64_t num_connects() const;

 private:
  // Shared with the transport, which may outlive this object.
  struct Log {
    std::mutex mutex;
    std::string problem;
    uint64_t num_connects = 0;
  };

  ReconnectingTransport::Connect connect_;
  std::shared_ptr<Log> log_;
};

// Of a Ring or a Link.
std::unique_ptr<Transport> transport_from_python(nanobind::handle ring);

}  // namespace blink

#endif  // BLINK_NATIVE_LINK_HANDLE_H
