// A transport that survives its link: the same front end, the next connection.
#ifndef BLINK_TRANSPORT_RECONNECTING_TRANSPORT_H
#define BLINK_TRANSPORT_RECONNECTING_TRANSPORT_H

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "transport/transport.h"

namespace blink {

// Verbs go to the connection of the moment, which stays alive until the last of them has returned.
// After a loss all of them say Status::lost until reconnect() has made another; nothing is retried
// here, because only the caller knows which requests died with the link.
class ReconnectingTransport final : public Transport {
 public:
  // Makes a connection; throws RingError where there is none to make.
  using Connect = std::function<std::unique_ptr<Transport>()>;

  // Connects for the first time; throws what `connect` throws.
  explicit ReconnectingTransport(Connect connect);

  using Transport::read;
  using Transport::write;
  Status write(std::span<const WriteRequest> batch) override { return current()->write(batch); }
  Status read(std::span<const ReadRequest> batch) override { return current()->read(batch); }
  Status flush() override { return current()->flush(); }
  TransportInfo info() const override;
  void close() override;
  Status reconnect() override;

 private:
  // One uncontended lock, some 20 ns: little beside a link's round trip, and a ring in this process
  // goes without.
  std::shared_ptr<Transport> current() const {
    const std::lock_guard lock(mutex_);
    return current_;
  }

  Connect connect_;
  mutable std::mutex mutex_;  // guards all below; not held while connecting
  std::shared_ptr<Transport> current_;
  std::string problem_;  // of the last attempt
  bool is_closed_ = false;
};

}  // namespace blink

#endif  // BLINK_TRANSPORT_RECONNECTING_TRANSPORT_H
