#include "transport/reconnecting_transport.h"

#include <utility>

namespace blink {

ReconnectingTransport::ReconnectingTransport(Connect connect)
    : connect_(std::move(connect)), current_(connect_()) {}

TransportInfo ReconnectingTransport::info() const {
  const std::lock_guard lock(mutex_);
  TransportInfo info = current_->info();
  if (!problem_.empty()) info.problem = problem_;
  return info;
}

void ReconnectingTransport::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  current_->close();
}

// The old connection ends with the last verb that is inside it.
Status ReconnectingTransport::reconnect() {
  std::shared_ptr<Transport> next;
  std::string problem;
  try {
    next = connect_();
  } catch (const RingError& error) {
    problem = error.what();
  }
  const std::lock_guard lock(mutex_);
  if (is_closed_) return Status::closed;
  problem_ = problem;
  if (next == nullptr) return Status::lost;
  std::swap(current_, next);
  return Status::ok;
}

}  // namespace blink
